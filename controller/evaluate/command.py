"""``specpilot evaluate``: what another policy would have earned, judged by the log of the one that ran.

    TRACES ─► pass 1: models of each half ─► tables, models for the other half
           ─► pass 2: weights, tokens, seconds by stratum and replicate ─► per-step efficiency
           ─► replay on the fitted models                               ─► effect on the server

Two kinds of answers that must not be mixed. *Per-step efficiency* (``snips``, ``doubly-robust``) is an
estimate from what happened, in the states that were logged (``policies/offpolicy/estimators.py``). The *effect on
the server* (``replay``) is a simulation. Memory does not depend on the length of the trace.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from specpilot.controller.errors import ConfigError
from specpilot.controller.evaluate.effect import SEEDS, Effect, effects
from specpilot.controller.evaluate.models import Fitted, FoldSums, fit_folds
from specpilot.controller.evaluate.steps import StepReader
from specpilot.controller.replay.policies import ReplayError, parse_policy, split_policies
from specpilot.controller.trace.checks import Chunk, Findings, chosen, empty, only, read_source, survey
from specpilot.controller.trace.reader import TraceError
from specpilot.policies.baselines import Truth
from specpilot.policies.interface import Plan, PolicyError
from specpilot.policies.offpolicy.bootstrap import Blocks
from specpilot.policies.offpolicy.estimators import ESTIMATORS, PolicySums
from specpilot.policies.offpolicy.follower import Follower
from specpilot.policies.offpolicy.overlap import LEAST_ANSWERED, Overlap, Unanswered, needed_floor
from specpilot.policies.offpolicy.step_model import Predicted
from specpilot.policies.offpolicy.switch_sums import SwitchSums
from specpilot.policies.rules.exploration import BLOCK_STEPS
from specpilot.sglang_hooks.wire import Hello

FAILED = 1
KNOWN = "static:K, threshold:N, batch-table:1:5,8:3, goodput or logged"
HALF_WIDTH = 0.02
"""Share of the estimate that the suggested exploration floor brings the interval down to, to each side."""
LISTED_CELLS = 8

EFFICIENCY, EFFECT = "per-step efficiency", "effect on the server"


class EvaluateError(ConfigError):
    """An evaluation that cannot be made as it was asked for; the text says what to change."""


class Cell(msgspec.Struct, frozen=True):
    """Where the log cannot answer."""

    batch: str
    context: str
    steps: int
    """K that the policy would run there."""
    logged_steps: int
    effective_blocks: float
    reason: str


class Row(msgspec.Struct, frozen=True):
    """One policy by one estimator, as ``--json`` has it."""

    policy: str
    estimator: str
    kind: str
    """``per-step efficiency`` or ``effect on the server``."""
    model_based: bool
    estimate: float | None
    """Tokens per second: of decoding for the former kind, of the server's time for the latter. None: refused."""
    low: float | None
    high: float | None
    """95 % interval."""
    effective_samples: float
    """Independent draws behind the estimate: blocks of steps, or runs of a simulation."""
    gain: float | None = None
    """In speed over what was logged, for the same tokens in the same states, with its own interval."""
    gain_low: float | None = None
    gain_high: float | None = None
    answered: float = 1.0
    """Share of the logged steps that the estimate is about."""
    seconds_per_token: float | None = None
    """Of a replay: mean time per output token."""
    reason: str = ""
    """Why there is no estimate."""
    unanswered: list[Cell] = []
    exploration_floor: float | None = None
    """With which a log of as many steps would answer; None: it answers, or no floor would do."""


@dataclass(frozen=True)
class Evaluation:
    """All rows, and what they rest on."""

    server: str
    steps: int
    rows: list[Row]
    notes: list[str]
    findings: list[str]


# -- policies --

Tables = Callable[[Sequence[Fitted], Hello], list[Plan]]
"""From the models of both folds to the table for the steps of each."""


def parse(text: str) -> Tables | None:
    """Return how to make a policy's tables; None for ``logged``. EvaluateError says what is wrong.

    >>> parse("best")
    Traceback (most recent call last):
    specpilot.controller.evaluate.command.EvaluateError: policy 'best' cannot be evaluated: use static:K, threshold:N, \
batch-table:1:5,8:3, goodput or logged
    """
    name = text.partition(":")[0]
    if text == "logged":
        return None
    if text == "goodput":
        return lambda fitted, hello: [one.plan(hello) for one in fitted]
    if name not in ("static", "threshold", "batch-table"):
        raise EvaluateError(f"policy {text!r} cannot be evaluated: use {KNOWN}")
    factory = parse_policy(text)
    assert factory is not None
    # These look at nothing but the server.
    unknown = Truth(lambda *_: math.nan, lambda *_: math.nan)
    return lambda _fitted, hello: [factory(hello, unknown).decide(hello, 0.0)]


# -- the evaluation --


def evaluate(
    paths: Sequence[Path], policies: Sequence[str], server: str | None = None, replay_seconds: float = 60.0
) -> Evaluation:
    """Evaluate ``policies`` on the traces of one server.

    ``replay_seconds``: of virtual time for the effect on the server; 0 leaves that out. Raises TraceError
    where the traces cannot be read, EvaluateError where the question makes no sense.
    """
    names = list(dict.fromkeys(policies))
    if not names:
        raise EvaluateError(f"--policy names none: use {KNOWN}")
    tables = {name: parse(name) for name in names}
    findings = Findings()
    source = only(chosen(survey(paths, findings), server))
    hello = source.hello
    _check_tree(hello)
    folds = fold_sums(read_source(source, findings), hello)
    if folds is None:
        raise TraceError(empty(source, findings))
    if not any(fold.times for fold in folds):
        raise EvaluateError(
            f"no step of {source.server} has a time of its own: every one follows a prefill, an idle spell or a "
            "switch of K. Record for longer"
        )
    fitted = fit_folds(folds, hello)
    try:
        plans = {name: None if make is None else make(fitted, hello) for name, make in tables.items()}
    except PolicyError as error:
        raise EvaluateError(str(error)) from error
    judged = judge(read_source(source, Findings()), hello, plans, fitted)
    rows = [row for name in names for row in _rows(name, judged)]
    notes = []
    if judged.reader.unusable:
        notes.append(f"{judged.reader.unusable:,} steps are left out: their K is no candidate")
    if judged.switches.outliers:
        notes.append(f"the times of {judged.switches.outliers:,} steps are left out: far longer than any K explains")
    replayed = [name for name in names if name != "logged"]
    if replay_seconds > 0.0 and replayed:
        found = effects(paths, server, replayed, folds[0].merged(folds[1]), replay_seconds)
        rows += [_effect_row(effect) for effect in found.effects]
        notes += [f"replay: {note}" for note in found.notes]
    return Evaluation(source.server, judged.steps, rows, notes, findings.lines())


def _check_tree(hello: Hello) -> None:
    drafting = [k for k in hello.candidate_steps if k]
    if hello.topk > 1 and len(drafting) > 1:
        raise EvaluateError(
            f"{hello.server_id} drafts trees (top-k {hello.topk}) of several K: what a smaller tree would have had "
            "accepted is not seen in a larger one, so its log cannot be evaluated"
        )


def fold_sums(chunks: Iterator[Chunk], hello: Hello) -> list[FoldSums] | None:
    """Add up what the models are fitted to, each half by itself; None where there is no row."""
    reader = StepReader(hello)
    folds = [FoldSums(reader.arms), FoldSums(reader.arms)]
    empty_handed = True
    for chunk in chunks:
        steps, trials, passed = reader.steps(chunk)
        empty_handed &= not len(chunk.rows)
        for index, fold in enumerate(folds):
            fold.add(steps, np.flatnonzero(steps.fold == index), trials, passed)
    return None if empty_handed else folds


@dataclass(frozen=True)
class Judged:
    """What the second pass adds up."""

    sums: dict[str, PolicySums]
    switches: SwitchSums
    reader: StepReader

    @property
    def steps(self) -> int:
        """Logged steps that were judged."""
        return int(next(iter(self.sums.values())).overlap.steps.sum())


def judge(
    chunks: Iterator[Chunk], hello: Hello, plans: dict[str, list[Plan] | None], fitted: Sequence[Fitted]
) -> Judged:
    """Add up what every policy would have done; ``plans``: a table, or one for each fold, or None for what was run."""
    reader = StepReader(hello)
    arms = reader.arms.tolist()
    models = [one.model for one in fitted]
    followers = {
        name: None if plan is None else Follower(plan, arms, hello.fallback_steps) for name, plan in plans.items()
    }
    sums = {name: PolicySums(arms, logged=plan is None) for name, plan in plans.items()}
    switches = SwitchSums()
    for chunk in chunks:
        steps, _, _ = reader.steps(chunk)
        if not len(steps):
            continue
        blocks, predicted = Blocks.of(steps), Predicted.of(steps, models)
        outlier = switches.add(steps, predicted, reader.arms, blocks)
        for name, follower in followers.items():
            target = steps.arm
            if follower is not None:
                target = follower.follow(steps.batch_size, steps.mean_context, steps.fold)
            sums[name].add(steps, target, predicted, outlier, blocks)
    return Judged(sums, switches, reader)


def _rows(name: str, judged: Judged) -> list[Row]:
    sums = judged.sums[name]
    cells = sums.overlap.unanswered()
    listed = [_cell(cell) for cell in cells]
    rows = []
    for estimator in ESTIMATORS:
        found = sums.estimate(estimator, judged.switches)
        if found is None:
            rows.append(_refused(name, estimator, sums.overlap, cells, listed, judged))
            continue
        rows.append(
            Row(
                name,
                estimator,
                EFFICIENCY,
                False,
                found.estimate,
                found.low,
                found.high,
                found.effective_samples,
                found.gain,
                found.gain_low,
                found.gain_high,
                found.answered,
                unanswered=listed,
            )
        )
    return rows


def _refused(
    name: str, estimator: str, overlap: Overlap, cells: list[Unanswered], listed: list[Cell], judged: Judged
) -> Row:
    answered = overlap.answered
    spread = judged.switches.spread
    block = max(judged.reader.block_steps, BLOCK_STEPS)
    floor = needed_floor(cells, judged.steps, spread, block, HALF_WIDTH)
    reason = (
        f"the log tells what {name} would have done in {100.0 * answered:.1f} % of its steps only, "
        f"{100.0 * LEAST_ANSWERED:.0f} % are needed"
    )
    usable = math.isfinite(floor) and floor > 0.0
    return Row(
        name,
        estimator,
        EFFICIENCY,
        False,
        None,
        None,
        None,
        0.0,
        answered=answered,
        reason=reason,
        unanswered=listed,
        exploration_floor=float(f"{floor:.2g}") if usable else None,
    )


def _cell(cell: Unanswered) -> Cell:
    return Cell(
        _span(cell.batch), _span(cell.context), cell.steps, cell.logged_steps, cell.effective_blocks, cell.reason
    )


def _span(limits: tuple[int, int | None]) -> str:
    low, high = limits
    return f"{low:,} and more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _effect_row(effect: Effect) -> Row:
    return Row(
        effect.policy,
        "replay",
        EFFECT,
        True,
        effect.tokens_per_second,
        effect.low,
        effect.high,
        float(SEEDS if effect.tokens_per_second is not None else 0),
        seconds_per_token=effect.seconds_per_token,
        reason=effect.reason,
    )


# -- the command --


@dataclass(frozen=True)
class EvaluateRequest:
    """What is to be evaluated, as the command line asks for it."""

    traces: Sequence[Path]
    policies: Sequence[str]
    server: str | None = None
    json: Path | None = None
    replay_seconds: float = 60.0


def evaluate_command(request: EvaluateRequest, console: Console) -> int:
    """Evaluate, print, write; the exit code: 1 where a per-step estimate was refused, or a trace cannot be read."""
    if not 0.0 <= request.replay_seconds < math.inf:
        raise EvaluateError("--replay-seconds must be 0 or above")
    if request.json is not None and not request.json.parent.is_dir():
        raise EvaluateError(f"{request.json}: there is no folder {request.json.parent}")
    try:
        found = evaluate(request.traces, split_policies(request.policies), request.server, request.replay_seconds)
    except TraceError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return FAILED
    except ReplayError as error:
        raise EvaluateError(str(error)) from error
    if request.json is not None:
        request.json.write_bytes(msgspec.json.format(msgspec.json.encode(found.rows)) + b"\n")
    print_evaluation(found, console)
    return FAILED if any(row.estimate is None and row.kind == EFFICIENCY for row in found.rows) else 0


def print_evaluation(found: Evaluation, console: Console) -> None:
    """Write an evaluation for a person: a table per kind, then what was refused, and why."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for line in found.findings:
        say(line)
    say(f"{found.server}: {found.steps:,} decode steps")
    table = Table(title=f"{EFFICIENCY}: tokens per second of decoding, in the states that were logged")
    for name in ("policy", "estimator"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "95 % interval", "gain, same work", "effective samples", "of the steps"):
        table.add_column(name, justify="right")
    for row in found.rows:
        if row.kind == EFFICIENCY:
            table.add_row(row.policy, row.estimator, *_figures(row))
    console.print(table)
    replayed = [row for row in found.rows if row.kind == EFFECT]
    if replayed:
        table = Table(title=f"{EFFECT}: model-based, requests of the trace on a simulated server")
        for name in ("policy", "estimator"):
            table.add_column(name, no_wrap=True)
        for name in ("tokens/s", "95 % of the seeds", "ms/token"):
            table.add_column(name, justify="right")
        for row in replayed:
            if row.estimate is None:
                table.add_row(row.policy, row.estimator, "refused", "", "")
            else:
                wait = "-" if row.seconds_per_token is None else f"{1e3 * row.seconds_per_token:.2f}"
                table.add_row(
                    row.policy, row.estimator, f"{row.estimate:,.0f}", f"{row.low:,.0f} … {row.high:,.0f}", wait
                )
        console.print(table)
    for line in refusals(found.rows):
        say(line)
    for note in found.notes:
        say(note)


def _figures(row: Row) -> list[str]:
    if row.estimate is None:
        return ["refused", "", "", "", f"{100.0 * row.answered:.1f} %"]
    assert row.gain is not None
    assert row.gain_low is not None
    assert row.gain_high is not None
    return [
        f"{row.estimate:,.1f}",
        f"{row.low:,.1f} … {row.high:,.1f}",
        f"{100.0 * row.gain:+.2f} % ({100.0 * row.gain_low:+.2f} … {100.0 * row.gain_high:+.2f})",
        f"{row.effective_samples:,.0f}",
        f"{100.0 * row.answered:.1f} %",
    ]


def refusals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines that say what the log cannot tell, and what would help."""
    told: set[str] = set()
    for row in rows:
        key = f"{row.policy} {row.kind}"
        if key in told or not (row.reason or row.unanswered):
            continue
        told.add(key)
        if row.kind == EFFECT:
            yield f"{row.policy} cannot be replayed: {row.reason}"
            continue
        yield f"{row.policy}: {row.reason or f'left out, {100.0 * (1.0 - row.answered):.2f} % of the steps'}:"
        for cell in row.unanswered[:LISTED_CELLS]:
            yield f"  batch {cell.batch}, context {cell.context}: {cell.reason} ({cell.logged_steps:,} steps)"
        if len(row.unanswered) > LISTED_CELLS:
            yield f"  and {len(row.unanswered) - LISTED_CELLS} more such cells"
        if row.estimate is not None:
            continue
        if row.exploration_floor is None:
            yield "  no exploration floor makes so short a log answer: record for longer"
        else:
            yield (
                f"  recorded with policy.exploration_floor = {row.exploration_floor:g}, as many steps would answer, "
                f"within ±{100.0 * HALF_WIDTH:g} %; more steps, where a K loses so much that it is drawn more rarely"
            )


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot evaluate``."""
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument(
        "--policy", action="append", required=True, help="static:K, threshold:N, batch-table:…, goodput, logged"
    )
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint, if they are of several")
    command.add_argument("--replay-seconds", type=float, default=60.0, help="of virtual time (0: no replay)")
    command.add_argument("--json", type=Path, help="write the rows")


def run(options: argparse.Namespace, console: Console) -> int:
    """Evaluate, print and write; return the exit code."""
    request = EvaluateRequest(options.traces, options.policy, options.server, options.json, options.replay_seconds)
    return evaluate_command(request, console)
