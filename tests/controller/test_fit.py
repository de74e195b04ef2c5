"""``specpilot fit`` on real files: what it fits, writes, says, and refuses."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from specpilot.controller import cli
from specpilot.controller.errors import ConfigError
from specpilot.controller.fit.command import FitRequest, fit_command
from specpilot.controller.fit.cost_fit import cost_line, robust_line
from specpilot.controller.fit.engines import read_fleet
from specpilot.controller.fit.prior import FittedPrior, fit
from specpilot.controller.fit.report import DOUBTFUL, LISTED_CELLS, FitReports, print_report
from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.run import serve
from specpilot.controller.replay.scenario import GENERATED_REQUESTS, Scenario
from specpilot.controller.serve.priors import PriorStore
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import Phase, generated_requests
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.sources import survey
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.baselines import Truth
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy
from specpilot.policies.models.acceptance import AcceptanceModel
from specpilot.policies.models.cost import CostModel
from specpilot.policies.models.cost_prior import fingerprint, read_prior
from specpilot.sglang_hooks.wire import Hello, StepRecord
from tests.controller.test_fit_statistics import served
from tests.controller.test_trace_checks import CONFIG, KEY, write
from tests.support.costs import CAPTURED, SERVER, STEPS, Surface
from tests.support.messages import hello, record

QUIET = Console(file=sys.stderr, quiet=True)
MEASURED = Surface("fa3")
OF_SERVER = {"candidate_steps": STEPS, "captured_batch_sizes": CAPTURED}
UP, DOWN = 0.004, 0.001


def steady(
    count: int, seed: int, sizes: Sequence[int], noise: float = 0.03, acceptance: float = 0.6, outliers: float = 0.01
) -> list[StepRecord]:
    """Records of a server that follows a measured surface, in spells of one K."""
    rng = random.Random(seed)
    rows, now, steps, batch, seq = [], 1_700_000_000.0, 3, sizes[0], 0
    while seq < count:
        before, steps, batch = steps, rng.choice(STEPS), rng.choice(sizes)
        for at in range(rng.randint(4, 30)):
            context = rng.uniform(200.0, 3000.0)
            seconds = MEASURED.seconds(steps, batch, context) * math.exp(rng.gauss(0.0, noise))
            if at == 0 and steps != before:
                seconds += UP if before == 0 else DOWN if steps == 0 else 0.0
            if rng.random() < outliers:
                seconds *= 10.0 ** rng.uniform(1.0, 3.0)
            now += seconds
            drafts = [next((j for j in range(steps) if rng.random() > acceptance), steps) for _ in range(batch)]
            rows.append(
                record(
                    record_seq=seq, step=seq, time=now, seconds=seconds, batch_size=batch, padded_batch_size=batch,
                    context_tokens=round(batch * context), steps=steps, draft_tokens=steps + 1, accepted_drafts=drafts,
                )
            )  # fmt: skip
            seq += 1
    return rows


def fitted(*paths: Path) -> FittedPrior:
    sources = survey(paths, Findings())
    return fit(read_fleet(sources, "serial", None, QUIET), sources[-1].hello)


def run(*arguments: object) -> int:
    return cli.main(["fit", *map(str, arguments)])


# -- what is fitted --


@pytest.mark.slow
def test_costs_are_the_surface_under_noise_and_outliers(tmp_path: Path) -> None:
    write(tmp_path, steady(8_000, 1, sizes=[1, 8, 32]), **OF_SERVER)
    found = fitted(tmp_path)
    assert {(cell.steps, cell.size) for cell in found.cells} == {(k, b) for k in STEPS for b in (1, 8, 32)}
    for cell in found.cells:
        truth = MEASURED.seconds(cell.steps, cell.size, cell.mean_context / cell.size)
        assert cell.seconds == pytest.approx(truth, rel=0.02)
        assert 0.02 < cell.spread < 0.045
        assert cell.held_out_error is not None
        assert cell.held_out_error < 0.035  # the median of 3 % of noise is 2 %
        assert cell.coverage is not None
        assert 0.9 < cell.coverage <= 1.0
        assert cell.prior_error is not None
        assert cell.prior_error < 0.04
    switches = {switch.kind: switch.seconds for switch in found.switches}
    assert switches["up"] == pytest.approx(UP, rel=0.2)
    assert switches["down"] == pytest.approx(DOWN, rel=0.4)
    assert abs(switches["other"]) < 3e-4
    model = CostModel(SERVER, found.prior["cost"])
    for k in STEPS:
        for b in (1, 8, 32):
            assert model.predict(k, b, 1000.0)[0] == pytest.approx(MEASURED.seconds(k, b, 1000.0), rel=0.06)


@pytest.mark.slow
def test_acceptance_is_that_of_the_requests(tmp_path: Path) -> None:
    write(tmp_path, steady(4_000, 2, sizes=[2, 16], acceptance=0.7), **OF_SERVER)
    found = fitted(tmp_path)
    model = AcceptanceModel.from_prior(found.prior["acceptance"], 7)
    assert model.hazard(8, 1000.0)[:3] == pytest.approx([0.7, 0.7, 0.7], abs=0.04)
    assert {band.batch_sizes for band in found.bands} == {"up to 4", "5 to 32"}
    for band in found.bands:
        assert band.hazards[0] == pytest.approx(0.7, abs=0.03)
        assert band.held_out_error is not None
        assert band.held_out_error < 0.1


@pytest.mark.parametrize(("levels", "least", "most"), [((0.6,), 15.9, 16.0), ((0.2, 0.5, 0.9), 1.0, 6.0)])
def test_acceptance_counts_as_little_as_it_says_of_a_moment(
    tmp_path: Path, levels: tuple[float, ...], least: float, most: float
) -> None:
    rng, rows = random.Random(3), []
    for n in range(24 * 256):
        level = levels[n // 256 % len(levels)]
        accepted = [next((j for j in range(3) if rng.random() > level), 3) for _ in range(2)]
        rows.append(record(record_seq=n, step=n, time=1e9 + 0.01 * n, accepted_drafts=accepted))
    write(tmp_path, rows)
    acceptance = fitted(tmp_path).prior["acceptance"]
    assert least <= acceptance["trials"][0] <= most
    share = acceptance["passed"][0] / acceptance["trials"][0]
    assert share == pytest.approx(sum(levels) / len(levels), abs=0.02)


def test_a_prior_is_what_a_controller_starts_from(tmp_path: Path) -> None:
    write(tmp_path / "trace", steady(2_000, 3, sizes=[2, 8]), **OF_SERVER)
    (tmp_path / "prior").mkdir()
    assert run(tmp_path / "trace", "-o", tmp_path / "prior") == 0
    server = hello(**OF_SERVER)
    prior = PriorStore(tmp_path / "prior").load(server)
    assert prior is not None
    assert prior.keys() == {"cost", "acceptance"}
    stored, wrong = read_prior(prior["cost"], server)
    assert stored is not None, wrong
    assert stored.version == 2
    policy = Goodput(prior)
    plan = policy.decide(server, 0.0)
    assert "as the stored prior says" in plan.reason
    assert policy.note == ""
    # What the controller learns from it, and would write, has the same form.
    assert policy.to_prior().keys() == prior.keys()  # type: ignore[union-attr]


def test_a_cell_of_few_records_has_a_median_and_one_of_two_is_left_out(tmp_path: Path) -> None:
    rows = steady(2_000, 4, sizes=[8])
    last = rows[-1]
    for n in range(12):
        seconds = 0.02 if n != 5 else 20.0
        last = msgspec.structs.replace(
            last, record_seq=last.record_seq + 1, step=last.step + 1, time=last.time + seconds, seconds=seconds,
            batch_size=9 if n < 9 else 30, padded_batch_size=32, steps=5, draft_tokens=6, context_tokens=9000,
            accepted_drafts=[0] * (9 if n < 9 else 30),
        )  # fmt: skip
        rows.append(last)
    write(tmp_path, rows, **OF_SERVER)
    cells = {(cell.steps, cell.size): cell for cell in fitted(tmp_path).cells}
    few = cells[5, 10.0]
    assert few.records in (8, 9)
    assert few.seconds == pytest.approx(0.02)
    assert few.slope_per_1000_tokens == 0.0
    assert few.held_out_error is None
    assert cells[5, 32.0].records == 3
    stored = {tuple(cell[:2]): cell for cell in fitted(tmp_path).prior["cost"]["cells"]}
    # No evidence of a slope: the controller takes its own.
    assert stored[5, 10.0][5:7] == [0.0, 0.0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(3, 300),
    st.floats(1e-6, 1e4),
    st.floats(0.0, 0.5),
    st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    st.floats(0.0, 0.3),
)
def test_lines_are_finite_and_near_whatever_the_records(
    seed: int, count: int, scale: float, noise: float, span: float, outliers: float
) -> None:
    rng = np.random.default_rng(seed)
    context = 1000.0 + span * rng.random(count)
    seconds = scale * np.exp(rng.normal(0.0, noise, count)) * np.where(rng.random(count) < outliers, 1e3, 1.0)
    line = cost_line(seconds, context, robust_line())
    assert all(math.isfinite(value) for value in msgspec.structs.astuple(line))
    predicted = line.seconds(context)
    assert np.all(predicted > 0.0)
    assert seconds.min() * 0.5 <= predicted.mean() <= seconds.max() * 2.0


def test_steps_without_any_noise_are_within_their_interval(tmp_path: Path) -> None:
    write(tmp_path, [record(record_seq=n, step=n, time=1e9 + 0.01 * n, steps=0, draft_tokens=1, accepted_drafts=[0, 0])
                     for n in range(600)])  # fmt: skip
    found = fitted(tmp_path)
    (cell,) = found.cells
    assert (cell.coverage, cell.slope_per_1000_tokens) == (1.0, 0.0)
    assert cell.seconds == pytest.approx(0.01)
    # Nothing but K=0: nothing is known of the drafts.
    assert (found.bands, found.switches) == ([], [])
    assert found.prior["acceptance"] == {"trials": [0.0] * 3, "passed": [0.0] * 3}
    assert Goodput(found.prior).decide(hello(), 0.0).choice


# -- a start within 150 steps --


class Recorded(Goodput):
    """The learned policy, which writes down what it learns from until ``end``."""

    def __init__(self, folder: Path, server: Hello, end: float) -> None:
        super().__init__()
        self.writer = TraceWriter(folder, KEY, msgspec.structs.replace(server, server_id="node:30000"), CONFIG)
        self._end = end

    def learn(self, step: StepRecord) -> None:
        super().learn(step)
        if step.time < self._end:
            self.writer.append([step])


@pytest.mark.slow
def test_a_fitted_prior_starts_near_the_best_k_on_the_other_half(tmp_path: Path) -> None:
    surface, requests = load_surface("h200-sglang"), generated_requests(GENERATED_REQUESTS, 1)
    seconds = 60.0
    for concurrency, acceptance in ((8, 0.75), (64, 0.5)):
        made: list[Recorded] = []

        def make(server: Hello, _truth: Truth, made: list[Recorded] = made, name: int = concurrency) -> Policy:
            made.append(Recorded(tmp_path / str(name), server, seconds / 2.0))
            return made[0]

        phases = (Phase(0.0, "first", acceptance), Phase(seconds / 2.0, "second", acceptance - 0.1))
        serve("goodput", Scenario(surface, requests, seconds, 1, concurrency=concurrency, acceptance=phases), make)
        made[0].writer.close()
    prior = fitted(tmp_path / "8", tmp_path / "64").prior
    for concurrency, acceptance in ((8, 0.65), (64, 0.4)):
        half = Scenario(
            surface, requests[1000:], seconds, 2, concurrency=concurrency, acceptance=acceptance, steps=150 + 400
        )
        judged = JudgedSteps.of(serve("goodput", half, lambda *_: Goodput(prior)).decodes, surface.speculating)
        begin = judged.steps_to_95()
        assert begin is not None
        assert begin <= 150


# -- engines --


def _outcome(folder: Path, engine: str, trace: Path) -> tuple[bytes, bytes]:
    prior, report = folder / "prior.json", folder / "report.json"
    assert run(trace, "-o", prior, "--json", report, "--engine", engine, "--workers", 2) == 0
    return prior.read_bytes(), report.read_bytes()


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in five segments, one of them bad, one missing."""
    folder = tmp_path_factory.mktemp("pieces")
    rows = steady(3_000, 5, sizes=[4, 24])
    rows[1700] = msgspec.structs.replace(rows[1700], probability=0.0)
    for start in range(0, 3000, 500):
        path = write(folder, rows[start : start + 200], rows[start + 200 : start + 500], **OF_SERVER)
    path.with_name("000002.arrows").unlink()
    return folder


@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_the_result_does_not_depend_on_the_engine(
    pieces: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one = _outcome(tmp_path, "serial", pieces)
    assert _outcome(tmp_path, engine, pieces) == one
    (report,) = json.loads(one[1])["fits"]
    assert report["findings_by_kind"] == {"missing records": 1, "probability": 1}
    assert report["servers"] == {KEY: 5}


# -- what is asked for --


def test_several_fingerprints_have_a_prior_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out"
    out.mkdir()
    older, newer = {**OF_SERVER, "sglang_version": "0.5.22"}, OF_SERVER
    write(trace, steady(600, 6, sizes=[8]), **older)
    write(trace, steady(600, 7, sizes=[8]), key="other:1/1", **newer)
    keys = [fingerprint(hello(**one)) for one in (older, newer)]
    assert run(trace, "-o", tmp_path / "prior.json") == 1
    error = capsys.readouterr().err
    assert "these traces are of several fingerprints" in error
    assert "let -o be a folder" in error
    assert all(part in error for part in (*keys, KEY, "other:1/1", "000001.arrows"))
    assert not (tmp_path / "prior.json").exists()
    assert run(trace, "-o", out) == 0
    assert {path.name for path in out.iterdir()} == {f"{key}.json" for key in keys}
    for name, key in (("other:1/1", keys[1]), (keys[0], keys[0])):
        assert run(trace, "-o", tmp_path / "prior.json", "--server", name) == 0
        assert json.loads((tmp_path / "prior.json").read_text())["cost"]["fingerprint"] == key
    assert run(trace, "-o", out, "--server", "nobody") == 1
    assert "no server or fingerprint 'nobody' in these traces" in capsys.readouterr().err


def test_servers_of_one_fingerprint_are_a_fleet(tmp_path: Path) -> None:
    write(tmp_path, steady(600, 8, sizes=[8]), **OF_SERVER)
    write(tmp_path, steady(600, 9, sizes=[8]), key="other:1/1", **OF_SERVER)
    report_file = tmp_path / "report.json"
    assert run(tmp_path, "-o", tmp_path / "prior.json", "--json", report_file) == 0
    (report,) = msgspec.json.decode(report_file.read_bytes(), type=FitReports).fits
    assert report.servers == {KEY: 1, "other:1/1": 1}
    assert report.records == sum(len(steady(600, seed, sizes=[8])) for seed in (8, 9))
    assert report.used + sum(report.not_used.values()) == report.records - report.excluded


def test_the_report_says_what_was_found_and_what_was_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = steady(1_500, 10, sizes=[8, 64])
    rows[700] = msgspec.structs.replace(rows[700], probability=1.5)
    path = write(tmp_path, rows, **OF_SERVER)
    path.with_name("000009.arrows").write_bytes(b"junk")
    assert run(tmp_path, "-o", tmp_path / "prior.json") == 0
    text = capsys.readouterr().out
    assert f"prior {tmp_path}/prior.json" in text
    assert "target-8b, eagle3-8b on H200, SGLang 0.5.23" in text
    assert f"{len(rows):,}; " in text
    assert "1 excluded" in text
    assert "K had just changed" in text
    assert f"{path}, row 700 (record 700): probability 1.5 is not above 0 and at most 1: excluded" in text
    assert f"{path.with_name('000009.arrows')}: is not a specpilot trace: excluded" in text
    assert "tokens per step" in text


def test_the_table_shows_most_of_many_cells_and_marks_the_doubtful(tmp_path: Path) -> None:
    write(tmp_path, steady(2_000, 11, sizes=CAPTURED[:12]), **OF_SERVER)
    report_file = tmp_path / "report.json"
    assert run(tmp_path, "-o", tmp_path / "prior.json", "--json", report_file) == 0
    (report,) = msgspec.json.decode(report_file.read_bytes(), type=FitReports).fits
    assert len(report.cells) > LISTED_CELLS
    console = Console(width=200, record=True, file=io.StringIO())
    doubtful = msgspec.structs.replace(
        report, cells=[msgspec.structs.replace(report.cells[0], prior_error=2 * DOUBTFUL)]
    )
    print_report(report, console)
    assert f"and {len(report.cells) - LISTED_CELLS} more cells" in console.export_text()
    print_report(doubtful, console)
    assert "20.00 %" in console.export_text()


@pytest.mark.parametrize("missing", ["sklearn.linear_model", "ray"])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    write(tmp_path, steady(200, 12, sizes=[8]), **OF_SERVER)
    assert run(tmp_path, "-o", tmp_path / "prior.json", "--engine", "ray" if missing == "ray" else "serial") == 2
    extra = "ray" if missing == "ray" else "fit"
    assert f"pip install '.[{extra}]'" in capsys.readouterr().err
    assert not (tmp_path / "prior.json").exists()


def test_traces_that_teach_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "prior.json"
    assert run(tmp_path, "-o", out) == 1
    assert "no trace is there: name a trace folder" in capsys.readouterr().err
    write(tmp_path / "a", [msgspec.structs.replace(r, forwards=2) for r in served(60)])
    assert run(tmp_path / "a", "-o", out) == 2
    error = capsys.readouterr().err
    assert "no step time can be learned from these traces: 0 records tell a step's own time" in error
    assert ": other forward passes came between" in error
    write(tmp_path / "b", served(60, probability=-1.0))
    assert run(tmp_path / "b", "-o", out) == 1
    assert "passes the checks" in capsys.readouterr().err
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_named_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "trace", steady(200, 13, sizes=[8]), **OF_SERVER)
    assert run(tmp_path / "trace", "-o", tmp_path / "no" / "prior.json") == 2
    assert f"there is no folder {tmp_path / 'no'}: make it first" in capsys.readouterr().err
    report = tmp_path / "no" / "report.json"
    assert run(tmp_path / "trace", "-o", tmp_path / "prior.json", "--json", report) == 2
    assert f"{report} cannot be written: No such file or directory" in capsys.readouterr().err


def test_workers_that_cannot_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "-o", tmp_path / "prior.json", "--engine", "processes", "--workers", 0) == 2
    assert "--workers 0: at least one is needed" in capsys.readouterr().err


def test_a_ray_cluster_that_is_not_there_is_named(
    pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

    def init(**_options: object) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run(pieces, "-o", tmp_path / "prior.json", "--engine", "ray") == 2
    assert "the Ray cluster 10.0.0.1:6379 cannot be used: nobody answers" in capsys.readouterr().err


def test_a_request_from_python(tmp_path: Path) -> None:
    write(tmp_path, steady(400, 14, sizes=[8]), **OF_SERVER)
    assert fit_command(FitRequest([tmp_path], tmp_path / "prior.json"), QUIET) == 0
    with pytest.raises(ConfigError, match="make it first"):
        fit_command(FitRequest([tmp_path], tmp_path / "x" / "prior.json"), QUIET)
