"""What a comparison came to: each arm against the first, in pairs of runs of the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from specpilot.controller.compare.runs import ComparisonRun
from specpilot.controller.errors import ConfigError
from specpilot.controller.files import write_json
from specpilot.controller.serve.report import ServerStatus
from specpilot.controller.statistics import mean_and_interval


class ArmResult(msgspec.Struct, frozen=True):
    """One arm at one concurrency."""

    concurrency: int
    arm: str
    runs: int
    tokens_per_second: float
    """Output tokens per second, mean over runs."""
    tokens_per_second_interval: float | None
    """Half the width of its 95 % interval (Student's t); None for a single run."""
    time_per_output_token: float
    """Seconds per output token, mean over runs."""
    gain: float | None
    """Gain over the first arm, as a share of its tokens per second: geometric mean over repetitions that have both."""
    low: float | None
    """Lower end of the gain's 95 % interval (Student's t on the log ratios); None for a single pair."""
    high: float | None
    """Upper end of the gain's 95 % interval; None for a single pair."""


def arm_results(runs: Sequence[ComparisonRun], arms: Sequence[str]) -> list[ArmResult]:
    """Return a result for each concurrency and arm that has a run, in the order of the runs and of ``arms``."""
    results = []
    base = {(run.concurrency, run.repetition): run for run in runs if run.arm == arms[0]}
    for clients in dict.fromkeys(run.concurrency for run in runs):
        for arm in arms:
            own = [run for run in runs if (run.concurrency, run.arm) == (clients, arm)]
            if not own:
                continue
            mean, half = mean_and_interval([run.tokens_per_second for run in own])
            pairs = [(run, base[clients, run.repetition]) for run in own if (clients, run.repetition) in base]
            ratios = [math.log(run.tokens_per_second / other.tokens_per_second) for run, other in pairs]
            gain, around = mean_and_interval(ratios) if ratios else (math.nan, math.nan)
            results.append(
                ArmResult(
                    concurrency=clients,
                    arm=arm,
                    runs=len(own),
                    tokens_per_second=mean,
                    tokens_per_second_interval=_known(half),
                    time_per_output_token=sum(run.time_per_output_token for run in own) / len(own),
                    gain=_known(math.expm1(gain)),
                    low=_known(math.expm1(gain - around)),
                    high=_known(math.expm1(gain + around)),
                )
            )
    return results


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def print_table(runs: Sequence[ComparisonRun], arms: Sequence[str], console: Console) -> None:
    """Write tokens per second and gain over the first arm, a row a concurrency; the fastest arm is bold."""
    results = arm_results(runs, arms)
    grid = Table(
        title=f"output tokens/s, and gain over {arms[0]} with its 95 % interval", title_justify="left", box=None
    )
    grid.add_column("clients", justify="right")
    for arm in arms:
        grid.add_column(arm, justify="right")
    for clients in dict.fromkeys(result.concurrency for result in results):
        row = {result.arm: result for result in results if result.concurrency == clients}
        best = max(row.values(), key=lambda result: result.tokens_per_second).arm
        texts = [_text(row[arm], arm == arms[0]) if arm in row else "" for arm in arms]
        grid.add_row(str(clients), *(f"[bold]{t}[/]" if a == best else t for a, t in zip(arms, texts, strict=True)))
    console.print(grid)


def _text(result: ArmResult, first: bool) -> str:
    text = f"{result.tokens_per_second:,.0f}"
    if first or result.gain is None:
        return text
    text += f" {100 * result.gain:+.1f} %"
    if result.low is not None and result.high is not None:
        text += f" ({100 * result.low:+.1f} … {100 * result.high:+.1f})"
    return text


def write_comparison(path: Path, runs: Sequence[ComparisonRun], arms: Sequence[str], server: ServerStatus) -> None:
    """Write every run, and what each arm came to."""
    content: dict[str, Any] = {
        "server": server.server,
        "model": server.model,
        "gpu": server.gpu,
        "sglang_version": server.sglang_version,
        "candidate_steps": server.candidate_steps,
        "arms": list(arms),
        "cells": arm_results(runs, arms),
        "runs": list(runs),
    }
    write_json(path, content)


def draw(path: Path, runs: Sequence[ComparisonRun], arms: Sequence[str], server: ServerStatus) -> None:
    """Draw gain, with its intervals, and time per output token by concurrency."""
    from matplotlib.figure import Figure

    results = arm_results(runs, arms)
    clients = list(dict.fromkeys(result.concurrency for result in results))
    figure = Figure(figsize=(10, 7), dpi=150, facecolor="white", layout="constrained")
    gain, latency = figure.subplots(2, 1, sharex=True)
    for index, arm in enumerate(arms):
        own = [result for result in results if result.arm == arm]
        # Beside each other, so that intervals can be told apart.
        places = [clients.index(result.concurrency) + 0.08 * (index - (len(arms) - 1) / 2) for result in own]
        gains = [100 * (result.gain if result.gain is not None else math.nan) for result in own]
        around = [_around(result) for result in own]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.2, "color": f"C{index}", "label": arm}
        gain.errorbar(places, gains, [*zip(*around, strict=True)], capsize=2, **style)
        latency.plot(places, [1e3 * result.time_per_output_token for result in own], **style)
    gain.set_ylabel(f"tokens/s over {arms[0]} (%)")
    latency.set_ylabel("time per output token (ms)")
    latency.set_xlabel("concurrent requests")
    latency.set_xticks(range(len(clients)), [str(count) for count in clients])
    latency.set_ylim(bottom=0)
    gain.axhline(0, color="#6b7280", linewidth=0.8)
    gain.legend(ncols=len(arms), fontsize=8, frameon=False)
    repetitions = len({run.repetition for run in runs})
    gain.set_title(f"{server.model} on {server.gpu}, {repetitions} repetitions, 95 % intervals", fontsize=10)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _around(result: ArmResult) -> tuple[float, float]:
    """Return how far the interval reaches below and above, in percent; 0 where there is none."""
    if result.gain is None or result.low is None or result.high is None:
        return 0.0, 0.0
    return 100 * (result.gain - result.low), 100 * (result.high - result.gain)
