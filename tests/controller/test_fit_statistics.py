"""The statistics of a fit say of every record what the learners say, however the trace is cut and read."""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.controller.fit.acceptance_fit import trials_by_position
from specpilot.controller.fit.by_k import kind_steps
from specpilot.controller.fit.joining import Joined, read_segment
from specpilot.controller.fit.statistics import (
    BLOCK_RECORDS,
    FOLDS,
    ROW,
    SAMPLE,
    Sample,
    TraceStatistics,
    bands_of,
    identities,
)
from specpilot.controller.trace.checked_reader import read_checked
from specpilot.controller.trace.columns import Columns
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.format import to_batch
from specpilot.controller.trace.sources import survey
from specpilot.controller.trace.step_seconds import REASONS, why_not_own
from specpilot.policies.models.acceptance import BANDS
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost import fit_to_learn
from specpilot.policies.models.trials import trials_of
from specpilot.sglang_hooks.wire import StepRecord
from tests.controller.test_trace_checks import KEY, write
from tests.support.messages import hello, record

STEPS = (0, 1, 3, 5)


def served(count: int, seed: int = 0, start: int = 0, **changes: Any) -> list[StepRecord]:
    """Records of a server that goes through batches, contexts and K, with everything in between that may be."""
    rng = random.Random(seed)
    now, step, steps = 1_700_000_000.0 + start, 2 * start, 3
    rows = []
    for seq in range(start, start + count):
        if rng.random() < 0.2:
            steps = rng.choice(STEPS)
        batch = rng.choice([1, 2, 3, 7, 40, 64, 90])
        forwards = rng.choice([1] * 12 + [2, 3])
        seconds = 0.01 * (1 + steps) * rng.lognormvariate(0.0, 0.1)
        now, step = now + seconds, step + forwards
        rows.append(
            record(
                record_seq=seq,
                step=step,
                time=now,
                seconds=seconds,
                batch_size=batch,
                padded_batch_size=batch,
                context_tokens=batch * rng.choice([10, 1024, 1025, 5000, 20000]),
                steps=steps,
                draft_tokens=steps + 1,
                accepted_drafts=[rng.randint(-1, steps) for _ in range(batch)],
                truncated=sorted(rng.sample(range(batch), rng.randint(0, batch)) if rng.random() < 0.3 else []),
                forwards=forwards,
                previous_kind=rng.choice([1] * 9 + [2]),
                after_idle=rng.choice([False] * 9 + [True, None]),
                grammar=rng.random() < 0.03,
                overlap=rng.random() < 0.9,
                launch_gap_seconds=rng.choice([-0.001, 0.0, 0.02 * seconds, 0.3 * seconds, 0.6 * seconds]),
                **changes,
            )
        )
    return rows


def part_of(*paths: Path) -> TraceStatistics:
    (source,) = survey(paths, Findings())
    joined = Joined(source.hello)
    for path in source.segments:
        joined.add(read_segment(path))
    return joined.part


def facts(part: TraceStatistics) -> dict[str, Any]:
    """All that a fit is made from, in a form that compares."""
    return {
        "used": part.used,
        "reasons": +part.reasons,
        "kinds": part.kinds,
        "cells": {key: (one.seen, one.rows.tolist()) for key, one in part.cells.items()},
        "switches": {key: (one.seen, one.rows.tolist()) for key, one in part.switches.items()},
        "accepted": {key: counted.tolist() for key, counted in part.accepted.items()},
        "blocks": {key: {kind: counted.tolist() for kind, counted in one.items()} for key, one in part.blocks.items()},
        "rows": part.findings.rows,
        "excluded": part.findings.excluded,
    }


def cut(rows: Sequence[StepRecord], at: Sequence[int]) -> list[Sequence[StepRecord]]:
    ends = sorted({0, *at, len(rows)})
    return [rows[a:b] for a, b in pairwise(ends)]


# -- which records teach cost --


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 149), max_size=4), st.sets(st.integers(0, 149), max_size=6))
def test_the_rule_for_columns_is_the_learners_record_by_record(seed: int, at: list[int], lost: set[int]) -> None:
    rows = [r for n, r in enumerate(served(150, seed)) if n not in lost]
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), *cut(rows, [n for n in at if n < len(rows)]))
        found: list[bool] = []
        before = None
        for chunk in read_checked([path]):
            tokens = chunk.columns["draft_tokens"]
            same = np.concatenate(([tokens[0] == before], tokens[1:] == tokens[:-1]))
            found += (why_not_own(chunk.columns, chunk.follows, same) == 0).tolist()
            before = tokens[-1]
    assert found == [fit_to_learn(step, previous) for previous, step in pairwise([None, *rows])]
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"forwards": 2}, "other forward passes came between"),
        ({"previous_kind": 2}, "the pass before was no decode"),
        ({"after_idle": True}, "the server had been idle"),
        ({"grammar": True}, "the batch had a grammar"),
        ({"seconds": 0.0}, "no time is given"),
        ({"launch_gap_seconds": 0.0003}, "the host waited before the launch"),
        ({"launch_gap_seconds": 0.0051, "overlap": False}, "the host waited before the launch"),
        ({"draft_tokens": 2, "accepted_drafts": [1, 0]}, "K had just changed"),
        ({"after_idle": None}, ""),
        ({"launch_gap_seconds": 0.0002}, ""),
        ({"launch_gap_seconds": 0.005, "overlap": False}, ""),
    ],
)
def test_why_a_record_tells_no_time(changes: dict[str, Any], reason: str) -> None:
    columns = Columns(to_batch([record(record_seq=0), record(record_seq=1, **changes)]))
    same = np.array([True, columns["draft_tokens"][1] == columns["draft_tokens"][0]])
    assert REASONS[why_not_own(columns, np.array([False, True]), same)[1]] == reason
    previous, step = record(record_seq=0), record(record_seq=1, **changes)
    assert fit_to_learn(step, previous) == (reason == "")


def test_all_records_are_accounted_for(tmp_path: Path) -> None:
    part = part_of(write(tmp_path, served(500)))
    assert part.used + sum(part.reasons.values()) == 500
    assert part.used == sum(sample.seen for sample in part.cells.values())
    switched = part.reasons["K had just changed"]
    assert 0 < switched == sum(sample.seen for sample in part.switches.values())


# -- acceptance --


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_acceptance_counts_are_the_trials_of_all_records(seed: int, depth: int) -> None:
    rows = served(120, seed)
    with tempfile.TemporaryDirectory() as directory:
        part = part_of(write(Path(directory), rows[:50], rows[50:]))
    for band in [None, *range(BANDS.cells)]:
        expected = np.zeros((2, depth), int)
        for r in rows:
            if band in (None, BANDS.cell(r.batch_size, r.context_tokens / r.batch_size)):
                trials, passed = trials_of(r, depth)
                expected[0, : len(trials)] += np.array(trials, int)
                expected[1, : len(passed)] += np.array(passed, int)
        tables = {
            (kind - 1, of_band, fold): counted
            for (kind, of_band, fold), counted in part.accepted.items()
            if band in (None, of_band)
        }
        assert np.array_equal(np.array(trials_by_position(tables, depth)), expected)


def test_bands_are_those_of_the_model() -> None:
    rows = served(300)
    expected = [BANDS.cell(r.batch_size, r.context_tokens / r.batch_size) for r in rows]
    assert bands_of(Columns(to_batch(rows))).tolist() == expected


# -- it does not matter how it is cut --


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 100),
    st.lists(st.lists(st.integers(1, 199), max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(1, 199), max_size=3),
)
def test_statistics_do_not_depend_on_segments_or_batches(
    seed: int, batches: list[list[int]], segment_ends: list[int]
) -> None:
    rows = served(200, seed)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        whole = facts(part_of(write(Path(one), rows)))
        for n, piece in enumerate(cut(rows, segment_ends)):
            ends = [at for at in batches[n % len(batches)] if at < len(piece)]
            write(Path(many), *cut(piece, ends))
        assert facts(part_of(Path(many))) == whole


def test_a_sample_is_of_the_records_not_of_how_they_came() -> None:
    rows = np.zeros(5000, ROW)
    rows["hash"] = identities(hello(), np.arange(5000))
    rows["seconds"] = np.arange(5000)
    assert len(np.unique(rows["hash"])) == 5000
    whole, backwards, halves = Sample(SAMPLE), Sample(SAMPLE), Sample(SAMPLE)
    whole.add(rows, 5000)
    for start in range(0, 5000, 7)[::-1]:
        backwards.add(rows[start : start + 7], len(rows[start : start + 7]))
    even, odd = Sample(SAMPLE), Sample(SAMPLE)
    even.add(rows[::2], 2500)
    odd.add(rows[1::2], 2500)
    halves.add(odd.rows, odd.seen)
    halves.add(even.rows, even.seen)
    for other in (backwards, halves):
        assert other.seen == 5000
        assert other.rows.tolist() == whole.rows.tolist()
    # Uniform: the mean of 512 of 0..4999 is within four standard errors.
    assert abs(whole.rows["seconds"].mean() - 2500) < 4 * 1443 / SAMPLE**0.5
    assert np.all(np.diff(identities(hello(instance="other"), np.arange(9))) != np.diff(rows["hash"][:9]))


def test_segments_of_two_servers_add_up(tmp_path: Path) -> None:
    first, second = served(100, 1), served(100, 2)
    a, b = write(tmp_path, first), write(tmp_path, second, key="other:1/0")
    joined = Joined(hello())
    for path in (a, b):
        joined.add(read_segment(path))
    alone = [part_of(path) for path in (a, b)]
    assert joined.part.used == alone[0].used + alone[1].used
    assert joined.part.kinds == alone[0].kinds + alone[1].kinds
    assert not joined.part.findings.counts


def test_parts_travel(tmp_path: Path) -> None:
    read = read_segment(write(tmp_path, served(50)))
    again = pickle.loads(pickle.dumps(read))
    assert facts(again.part) == facts(read.part)
    assert (again.head.num_rows, again.tail.num_rows) == (1, 1)
    assert len(pickle.dumps(read.head)) < 20_000


# -- segments that do not simply go on --


def test_a_segment_copied_twice_counts_once(tmp_path: Path) -> None:
    rows = served(300)
    path = write(tmp_path / "once", rows)
    whole = facts(part_of(path))
    first = write(tmp_path, rows[:150])
    write(tmp_path, rows[150:])
    shutil.copy(first, first.with_name("000003.arrows"))
    part = part_of(tmp_path / first.parent.name)
    assert facts(part) == whole | {"rows": 450, "excluded": 150}
    assert part.findings.counts == {"out of order": 150}


def test_missing_records_between_segments_are_found_and_not_joined(tmp_path: Path) -> None:
    rows = served(300)
    write(tmp_path, rows[:100])
    last = write(tmp_path, rows[120:])
    part = part_of(tmp_path)
    assert part.findings.records == {"missing records": 20}
    assert part.findings.listed[0].path == str(last)
    assert part.reasons["the record before it is missing or was excluded"] == 2


def test_a_clock_that_goes_back_between_segments_is_found(tmp_path: Path) -> None:
    rows = served(300)
    write(tmp_path, rows[:100])
    write(tmp_path, [msgspec.structs.replace(r, time=r.time - 50.0) for r in rows[100:200]])
    write(tmp_path, [msgspec.structs.replace(r, time=r.time - 500.0) for r in served(50)], instance="i2")
    part = part_of(tmp_path)
    assert part.findings.counts == {"clock jump": 2}
    assert (part.findings.rows, part.findings.excluded) == (250, 2)


def test_a_process_that_restarts_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, served(100))
    write(tmp_path, [msgspec.structs.replace(r, time=r.time + 100.0) for r in served(100)], instance="i2")
    part = part_of(tmp_path)
    assert not part.findings.counts
    assert part.findings.rows == 200
    assert part.reasons["the record before it is missing or was excluded"] == 2


def test_bad_rows_take_no_part(tmp_path: Path) -> None:
    rows = served(200)
    bad = msgspec.structs.replace(rows[100], probability=float("nan"))
    part = part_of(write(tmp_path, [*rows[:100], bad, *rows[101:]]))
    expected = part_of(write(tmp_path / "without", rows[:100], rows[101:]))
    assert {**facts(part), "rows": 0, "excluded": 0} == {**facts(expected), "rows": 0, "excluded": 0}
    assert part.findings.counts == {"probability": 1}


# -- trees --


@given(st.lists(st.tuples(st.sampled_from([0, 2, 3]), st.sampled_from([1, 4, 8, 16])), min_size=1, max_size=60))
def test_k_of_a_tree_is_told_as_by_the_learners_in_the_end(steps: list[tuple[int, int]]) -> None:
    applied = AppliedSteps(topk=4)
    for asked, tokens in steps:
        applied.of(record(steps=asked, draft_tokens=tokens))
    widths = {asked: applied._widths[asked].most_common() for asked, _ in steps}
    if any(len(seen) > 1 and seen[0][1] == seen[1][1] for seen in widths.values()):
        return  # a tie, which the one that was seen first wins
    kinds = Counter(asked * 8192 + tokens for asked, tokens in steps)
    told = kind_steps(kinds, tree=True)
    for asked, tokens in set(steps):
        usual = {one: seen[0][0] for one, seen in sorted(widths.items())}
        expected = asked if usual[asked] == tokens else next((k for k, w in usual.items() if w == tokens), None)
        assert told[asked * 8192 + tokens] == expected


def test_trees_are_counted_by_their_depth(tmp_path: Path) -> None:
    rows = [
        record(record_seq=n, step=n, time=1e9 + 0.01 * n, steps=3, draft_tokens=16, accepted_drafts=[n % 4, -1])
        for n in range(100)
    ]
    part = part_of(write(tmp_path, rows, topk=4))
    assert part.used == 99
    assert kind_steps(part.kinds, True) == {3 * 8192 + 16: 3}
    tables = {(3, band, fold): counted for (_, band, fold), counted in part.accepted.items()}
    assert [counts.tolist() for counts in trials_by_position(tables, 5)] == [[100, 75, 50, 0, 0], [75, 50, 25, 0, 0]]
    assert part_of(tmp_path).kinds == {3 * 8192 + 16: 100}


def test_folds_are_blocks() -> None:
    rows = [record(record_seq=n) for n in range(BLOCK_RECORDS * (FOLDS + 1))]
    with tempfile.TemporaryDirectory() as directory:
        timed = [msgspec.structs.replace(r, step=n, time=1e9 + 0.01 * n) for n, r in enumerate(rows)]
        part = part_of(write(Path(directory), timed, key=KEY))
    held = {fold: int(counted.sum()) // 2 for (_, _, fold), counted in part.accepted.items()}
    assert held == {0: 2 * BLOCK_RECORDS, 1: BLOCK_RECORDS, 2: BLOCK_RECORDS, 3: BLOCK_RECORDS, 4: BLOCK_RECORDS}
