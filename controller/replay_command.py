"""``specpilot replay``: every policy with every seed, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from controller.replay import GENERATED_REQUESTS, Scenario, at_rate, saturation, simulate
from controller.replay_judge import Result
from controller.replay_policies import ReplayError, parse_policy
from controller.surface import load_surface
from controller.workload import ArrivalsError, generated_requests, read_arrivals


def replay(
    surface: str,
    arrivals: Path | None,
    policies: Sequence[str],
    seeds: int,
    load: float,
    concurrency: int | None,
    seconds: float,
    out: Path | None,
    console: Console,
) -> int:
    """Run every policy with every seed, write the results as JSON, print their means."""
    for policy in policies:
        parse_policy(policy)
    finite = 0.0 < load < math.inf and 0.0 < seconds < math.inf
    if not finite or seeds <= 0 or (concurrency is not None and concurrency <= 0):
        raise ReplayError("--load, --seconds, --seeds and --concurrency must be above 0")
    if out is not None and not out.parent.is_dir():
        raise ReplayError(f"{out}: there is no folder {out.parent}")
    try:
        named = load_surface(surface)
        from_file = read_arrivals(arrivals) if arrivals is not None else None
    except (ArrivalsError, ValueError) as error:
        raise ReplayError(str(error)) from error
    console.print(f"[bold]{named.name}[/]: {named.label}")
    saturated = saturation(named, from_file) if from_file and concurrency is None else 0.0
    results = []
    for seed in range(1, seeds + 1):
        requests = from_file or generated_requests(GENERATED_REQUESTS, seed)
        if concurrency is not None:
            scenario = Scenario(named, requests, seconds, seed, concurrency=concurrency)
        else:
            rate = load * (saturated or saturation(named, requests))
            scenario = Scenario(named, at_rate(requests, rate, seconds), seconds, seed, load=load)
        results += [simulate(policy, scenario) for policy in policies]
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    console.print(summary_table(results, policies))
    return 0


def summary_table(results: Sequence[Result], policies: Sequence[str]) -> Table:
    """Return the means over the seeds, one row a policy."""
    first = results[0]
    where = f"load {first.load:g}" if first.load is not None else f"closed loop, {first.concurrency} at a time"
    table = Table(title=f"{first.surface}, {where}, mean of {len({result.seed for result in results})} seeds")
    table.add_column("policy", no_wrap=True)
    for name in (
        "tokens/s",
        "ms/token",
        "p99",
        "of the best K",
        "switches/100",
        "of them probes",
        "exploration loss",
        "steps to 95 %",
        "steps",
    ):
        table.add_column(name, justify="right")
    for policy in dict.fromkeys(policies):
        own = [result for result in results if result.policy == policy]
        table.add_row(
            policy,
            f"{_mean([one.tokens_per_second for one in own]):,.0f}",
            _or_dash([one.time_per_output_token.mean for one in own], 1e3, ".2f"),
            _or_dash([one.time_per_output_token.p99 for one in own], 1e3, ".2f"),
            f"{100 * _mean([one.reference_share for one in own]):.2f} %",
            f"{_mean([one.switches_per_100_steps for one in own]):.2f}",
            f"{_mean([one.probe_switches_per_100_steps for one in own]):.2f}",
            f"{100 * _mean([one.exploration_loss for one in own]):.3f} %",
            _or_dash([one.steps_to_95 for one in own], 1.0, ",.0f"),
            f"{_mean([float(one.steps) for one in own]):,.0f}",
        )
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_dash(values: Sequence[float | None], scale: float, form: str) -> str:
    known = [value for value in values if value is not None]
    return format(scale * _mean(known), form) if len(known) == len(values) else "-"
