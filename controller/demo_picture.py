"""The demo's picture: batch size, K and throughput of a run over time, drawn with matplotlib.

Imports matplotlib, which ``specpilot[demo]`` installs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from controller.demo_summary import MEAN_SECONDS, STEPS, THRESHOLD, DemoError, Run, colour, idle_seconds, tokens_of
from sglang_hooks.wire import StepRecord

_INK = "#222222"
_FAINT = "#6b7280"
_PHASE_TINTS = ("#eef4ee", "#f4eff7")


def draw(run: Run, path: Path) -> None:
    """Draw batch size, K and throughput over time as a PNG; DemoError if there is nothing to draw."""
    if not run.steps:
        raise DemoError("the trace holds no step, so there is nothing to draw")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    figure = Figure(figsize=(11, 7.2), dpi=150, facecolor="white")
    ratios = {"height_ratios": [3, 1.5, 3]}
    axes = figure.subplots(3, 1, sharex=True, gridspec_kw=ratios)
    figure.subplots_adjust(left=0.095, right=0.98, top=0.82, bottom=0.075, hspace=0.12)
    for index, phase in enumerate(run.phases):
        until = run.phases[index + 1].start if index + 1 < len(run.phases) else run.seconds
        tint = _PHASE_TINTS[[other.name for other in run.phases].index(phase.name) % 2]
        for axis in axes:
            axis.axvspan(phase.start, until, color=tint, linewidth=0, zorder=0)
        label = f"{phase.name} text, acceptance {phase.acceptance:g}"
        middle = (phase.start + until) / 2
        axes[0].annotate(
            label, (middle, 1), (0, -6), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", va="top", fontsize=9, color=_FAINT,
        )  # fmt: skip
    begins, ends = _times(run)
    _draw_batch(axes[0], run.steps, begins, ends)
    _draw_steps(axes[1], run.steps, begins, ends)
    _draw_throughput(axes[2], run.steps, ends)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#b8bcc4")
        axis.tick_params(colors=_INK, labelsize=9)
        axis.grid(axis="y", color="#d9dce1", linewidth=0.6, zorder=1)
        axis.set_axisbelow(True)
        axis.set_xlim(0, max(run.seconds, run.steps[-1].time - run.summary.started_at))
    axes[2].set_xlabel("time since the start (s)", fontsize=10, color=_INK)
    figure.align_ylabels(axes)
    title = "Speculation follows the load: a simulated server, steered by a real controller"
    figure.text(0.095, 0.955, title, fontsize=14, fontweight="bold", color=_INK)
    subtitle = (
        f"Policy {run.policy}: K={STEPS} up to {THRESHOLD} running requests, K=0 above, with a band around "
        "the line in which nothing switches.\nStep times follow figures of one H200 (8B-shaped target, "
        "SGLang 0.5.17), with K=0 at the speed of plain decoding; illustrative."
    )
    figure.text(0.095, 0.94, subtitle, fontsize=9, color=_FAINT, va="top", linespacing=1.35)
    _draw_legend(figure, run)
    figure.savefig(path, format="png")


def _times(run: Run) -> tuple[Any, Any]:
    """Return begin and end of each step in seconds since the start; in a gap in between the server idled."""
    ends = np.array([step.time for step in run.steps]) - run.summary.started_at
    begins = np.concatenate([[ends[0] - run.steps[0].seconds], ends[:-1]])
    return begins + np.array([idle_seconds(step) for step in run.steps]), ends


def _draw_batch(axis: Any, steps: Sequence[StepRecord], begins: Any, ends: Any) -> None:
    size = np.array([step.batch_size for step in steps])
    # Four corners a step, so that the area falls to zero where the server was idle.
    x = np.column_stack([begins, begins, ends, ends]).ravel()
    y = np.column_stack([0 * size, size, size, 0 * size]).ravel()
    touching = np.flatnonzero(begins[1:] <= ends[:-1])
    drop = np.concatenate([4 * touching + 3, 4 * touching + 4])
    x, y = np.delete(x, drop), np.delete(y, drop)
    axis.fill_between(x, y, color="#9aa5b4", alpha=0.55, linewidth=0, zorder=2)
    axis.plot(x, y, color="#5b6675", linewidth=0.9, zorder=3)
    axis.axhline(THRESHOLD, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=4)
    axis.set_ylim(0, 1.22 * size.max())
    axis.set_ylabel("batch size\n(requests)", fontsize=10, color=_INK)


def _draw_steps(axis: Any, steps: Sequence[StepRecord], begins: Any, ends: Any) -> None:
    used = sorted({step.steps for step in steps})
    previous: tuple[int, float] | None = None
    for k, group in groupby(range(len(steps)), key=lambda index: steps[index].steps):
        indices = list(group)
        begin, end = begins[indices[0]], ends[indices[-1]]
        if previous is not None:
            axis.plot([begin, begin], [previous[0], k], color="#9aa0aa", linewidth=0.8, zorder=2)
        axis.plot([begin, end], [k, k], color=colour(k), linewidth=5, solid_capstyle="butt", zorder=3)
        previous = k, end
    axis.set_yticks(used)
    margin = 0.3 * max(used[-1] - used[0], 1)
    axis.set_ylim(used[0] - margin, used[-1] + margin)
    axis.set_ylabel("K\n(draft tokens)", fontsize=10, color=_INK)


def _draw_throughput(axis: Any, steps: Sequence[StepRecord], ends: Any) -> None:
    emitted = np.concatenate([[0], np.cumsum([tokens_of(step) for step in steps])])
    grid = np.linspace(0.0, float(ends[-1]), max(2, int(ends[-1] / 0.05)))
    low = np.clip(grid - MEAN_SECONDS / 2, 0.0, None)
    high = np.clip(grid + MEAN_SECONDS / 2, None, ends[-1])
    counts = emitted[np.searchsorted(ends, high, "right")] - emitted[np.searchsorted(ends, low, "right")]
    rate = counts / (high - low)
    k_of = np.array([step.steps for step in steps])
    in_force = k_of[np.clip(np.searchsorted(ends, grid), 0, len(steps) - 1)]
    for k in np.unique(in_force):
        # One point further, so that neighbouring areas meet.
        where = np.convolve(in_force == k, [1, 1])[: len(grid)] > 0
        axis.fill_between(grid, rate, where=where, color=colour(int(k)), alpha=0.32, linewidth=0, zorder=2)
    axis.plot(grid, rate, color=_INK, linewidth=1.4, zorder=3)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_ylim(0, None)
    axis.set_ylabel("throughput\n(tokens/s)", fontsize=10, color=_INK)


def _draw_legend(figure: Any, run: Run) -> None:
    handles: list[Any] = [
        Patch(color=colour(k), label=f"K={k}: {k} drafts a step" if k else "K=0: speculation off")
        for k in sorted({step.steps for step in run.steps}, reverse=True)
    ]
    handles += [
        Patch(facecolor="#9aa5b4", alpha=0.55, label="requests decoding"),
        Line2D([], [], color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=f"threshold, {THRESHOLD} requests"),
        Line2D([], [], color=_INK, linewidth=1.4, label=f"tokens/s, {MEAN_SECONDS:.0f} s mean"),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.088, 0.885), ncols=len(handles),
        frameon=False, fontsize=9, handlelength=1.6, columnspacing=1.6, labelcolor=_INK,
    )  # fmt: skip
