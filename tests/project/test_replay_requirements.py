"""``benchmarks/replay_requirements.py``: cases say what they should, and figures are met or not by hand-made rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import Arrival

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.slow
def test_the_command_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from replay_requirements import main

    out = tmp_path / "rows.json"
    arguments = ["--only", "change", "azure", "--surfaces", "moe", "--seeds", "1", "--workers", "1", "--out", str(out)]
    assert main(arguments) == 0
    rows = json.loads(out.read_text())
    # Without a file of arrivals there is no such case.
    assert {row["case"] for row in rows} == {"change"}
    assert {row["concurrency"] for row in rows} == {1, 4, 16, 64}
    assert sum(len(row["down"]) for row in rows) >= 9
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| Figure | Asked | Reached | Met |"
    assert sum(line.startswith("| steps after a change") for line in printed) == 3
    again = tmp_path / "again.json"
    assert main(["--only", "--rows", str(out), "--out", str(again)]) == 0
    assert json.loads(again.read_text()) == rows
    assert capsys.readouterr().out.splitlines() == printed


def test_what_fixed_k_come_into_question() -> None:
    """Those that informed-greedy's states call good are run, and with what their own runs then say."""
    from replay_cases import fixed_jobs, moving

    arguments = {"surface": "moe", "cell": 8.0, "path": "", "seed": 1, "seconds": 60.0}
    row = {"case": "closed", **arguments, "policy": "informed-greedy", **moving(**arguments, policy="informed-greedy")}
    assert row["share"] > 0.99
    assert max(row["fixed"].values()) <= 1.0
    jobs = fixed_jobs([row])
    best = max((k for k in row["fixed"] if k != "none"), key=lambda k: row["fixed"][k])
    assert f"static:{best}" in {job.arguments["policy"] for job in jobs}
    assert 1 <= len(jobs) <= 4
    for job in jobs:
        share = moving(**job.arguments)["share"]
        assert share == pytest.approx(row["fixed"][job.arguments["policy"].removeprefix("static:")], abs=0.01)


def test_a_fixed_k_at_constant_load_is_computed_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two fixed K the slower is behind by what their own runs differ."""
    import replay_cases
    from replay_cases import constant

    served = replay_cases.serve
    monkeypatch.setattr(replay_cases, "serve", lambda policy, *rest: served("static:1", *rest))
    row = constant("h200-sglang", 0.9, 8, seed=1, steps=1500)
    assert row["best"] == 7
    assert row["best_share"] == pytest.approx(1.0)
    assert row["explored"] == row["switches"] == 0.0

    def speed(policy: str) -> float:
        scenario = replay_cases.Scenario(
            load_surface("h200-sglang"), replay_cases.made_up(1), 40.0, 1, concurrency=8, acceptance=0.9
        )
        judged = scenario.judge(served(policy, scenario).decodes)
        return float(judged.expected.sum() / judged.seconds.sum())

    assert row["ratio"] == pytest.approx(speed("static:1") / speed("static:7"), rel=0.01)


def test_limits_follow_their_course() -> None:
    from replay_cases import HOVER_SECONDS, boundaries, limits

    assert limits(3, 9, "1 s")[:4] == [(0.0, 3), (0.5, 9), (1.0, 3), (1.5, 9)]
    sine = limits(10, 20, "2 s sine")
    assert sine[-1][0] == pytest.approx(HOVER_SECONDS, abs=0.2)
    assert {size for _, size in sine} == {10, 11, 12, 14, 16, 18, 19, 20}
    for low, high, before, after in boundaries(load_surface("h200-sglang"), 0.6):
        assert low < high
        assert before > after


def test_a_trace_begun_elsewhere_keeps_its_gaps() -> None:
    from replay_cases import begun_at

    trace = [Arrival(at, index + 1, 1) for index, at in enumerate((0.0, 1.0, 3.0, 6.0))]
    assert [(one.at, one.prompt_tokens) for one in begun_at(trace, 0.5)] == [(0.0, 3), (3.0, 4), (5.0, 1), (6.0, 2)]


def moving_rows(**shares: float) -> list[dict[str, Any]]:
    names = {policy: policy.replace("_", ":" if policy.startswith("static") else "-") for policy in shares}
    return [
        {
            "case": "closed", "surface": "moe", "cell": 8, "seed": seed, "policy": names[policy], "share": share,
            "fixed": {"none": 0.5},
        }
        for policy, share in shares.items() for seed in (1, 2)
    ]  # fmt: skip


def met(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    from replay_figures import figures

    return {figure.name: figure.met for figure in figures(rows)}


@pytest.mark.parametrize(
    ("goodput", "kept", "ahead"), [(0.99, True, True), (0.983, True, True), (0.97, False, True), (0.96, False, False)]
)
def test_leads_are_told_by_the_means(goodput: float, kept: bool, ahead: bool) -> None:
    """Of informed-greedy's 10 % over the better fixed K 85 % must be kept; it is 12.5 % before SGLang's rule."""
    rows = moving_rows(static_1=0.9, static_3=0.8, sglang=0.88, informed_greedy=0.99, goodput=goodput)
    found = met(rows)
    assert found["of informed-greedy's lead over the best fixed K, where that is ≥ 3 %"] is kept
    assert found["ahead of SGLang's rule, where informed-greedy is by ≥ 12 %"] is ahead
    assert found["share of the best K, moe"] is (goodput >= 0.97)
    near = met(moving_rows(static_1=0.98, sglang=0.97, informed_greedy=0.99, goodput=goodput))
    assert near["of the best fixed K elsewhere"] is (goodput >= 0.98 * 0.99)
    assert near["against SGLang's rule elsewhere"] is (goodput >= 0.97 * 0.99)


def test_steps_are_judged_by_the_worst_case() -> None:
    cell = {"case": "cold", "surface": "moe", "acceptance": 0.4, "factor": 1.0, "prior": "none"}
    rows = [{**cell, "concurrency": 1, "seed": seed, "steps": 10} for seed in range(10)]
    assert met(rows) == {"steps until within 5 %, costs x 1": True}
    # One seed of ten may miss.
    rows += [{**cell, "concurrency": 8, "seed": seed, "steps": None if seed == 0 else 20} for seed in range(10)]
    assert met(rows) == {"steps until within 5 %, costs x 1": True}
    rows[-1]["steps"] = 301
    assert met(rows) == {"steps until within 5 %, costs x 1": False}


def test_every_case_has_something_to_run() -> None:
    from replay_cases import CASES, SURFACES, jobs_of

    options = argparse.Namespace(
        surfaces=SURFACES,
        seeds=2,
        first_seed=1,
        conv="conv",
        code="code",
        peers=["sglang"],
        seconds=1.0,
        constant_steps=100,
    )
    for case in CASES:
        jobs = [*jobs_of(case, options)]
        assert len(jobs) == len({repr(job) for job in jobs})
        assert bool(jobs) == (case != "speed")
    hovers = [job.arguments for job in jobs_of("hover", options)]
    assert {one["surface"] for one in hovers} == set(SURFACES)
    assert sum(one["resume"] for one in hovers) >= 32
