"""The demo's picture, in the style of the web page: what a run did over time, and what was learned in it.

Imports matplotlib, which ``specpilot[demo]`` installs.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import blended_transform_factory
from PIL import Image

from specpilot.controller.demo.run import (
    MEAN_SECONDS,
    TOLD_BATCHES,
    DemoError,
    DemoRun,
    Learned,
    crossing,
    idle_seconds,
    tokens_of,
)
from specpilot.sglang_hooks.wire import StepRecord

WIDTH, HEIGHT = 13.0, 7.9
"""Inches."""

# Those of controller/web/static/page.css and colours.js, in light.
GROUND, CARD, INK, SOFT, LINE = "#f3f5f8", "#ffffff", "#17202b", "#566273", "#d9dfe7"
CHOSEN = "#e8f1fa"
SKIP, RAMP = (180, 78, 8), ((84, 160, 208), (11, 61, 120))
_TIMES_BATCH = "\N{MULTIPLICATION SIGN} batch = tokens a second"
_SUM = f"Tokens a request ÷ step {_TIMES_BATCH}; most wins"
_TINTS = ("#f6f8fb", "#eef2f7")


def draw(run: DemoRun, path: Path) -> None:
    """Draw a run as a PNG; DemoError if there is nothing to draw."""
    if not run.steps:
        raise DemoError("the trace holds no step, so there is nothing to draw")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=130, facecolor=GROUND)
    title = "Speculation follows the load, and nobody gave it a threshold"
    figure.text(0.02, 0.955, title, fontsize=17, fontweight="bold", color=INK)
    subtitle = (
        f"A simulated server, steered by a real controller with the policy {run.policy}, which knew nothing of it at "
        "the start. K: tokens drafted a step; K=0 does not speculate."
    )
    figure.text(0.02, 0.922, subtitle, fontsize=10, color=SOFT)
    candidates = run.page.candidate_steps
    _draw_run(figure, run, candidates)
    learned = run.learned
    _draw_learned(figure, learned, candidates)
    _draw_reasons(figure, learned, candidates)
    source = (
        "Step times of the simulation follow figures of one H200 (8B-shaped target, SGLang 0.5.17), with K=0 at the "
        "speed of plain decoding; illustrative."
    )
    figure.text(0.02, 0.014, source, fontsize=8, color=SOFT)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    # A palette makes it a third of the size.
    Image.open(drawn).convert("RGB").quantize(256).save(path, format="png", optimize=True)


def _colour(steps: int, candidates: Sequence[int]) -> tuple[float, ...]:
    """Return the page's colour of a K: one for skipping, and a ramp over the other candidates."""
    drafting = [k for k in candidates if k]
    place = drafting.index(steps) / (len(drafting) - 1) if steps in drafting and len(drafting) > 1 else 0.7
    colour = SKIP if steps == 0 else [low + place * (high - low) for low, high in zip(*RAMP, strict=True)]
    return tuple(value / 255 for value in colour)


def _card(figure: Any, box: tuple[float, float, float, float], title: str, hint: str) -> None:
    """Draw a card at left, bottom, width, height of the figure, with its heading."""
    left, bottom, width, height = box
    figure.add_artist(
        FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.012", mutation_aspect=WIDTH / HEIGHT,
            facecolor=CARD, edgecolor=LINE, linewidth=1, transform=figure.transFigure, zorder=-1,
        )
    )  # fmt: skip
    figure.text(left + 0.013, bottom + height - 0.035, title, fontsize=12, fontweight="bold", color=INK)
    figure.text(left + 0.013, bottom + height - 0.06, hint, fontsize=9, color=SOFT)


def _plain(axis: Any) -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(LINE)
    axis.tick_params(colors=SOFT, labelsize=9, length=0)
    axis.grid(axis="y", color=LINE, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.set_facecolor("none")


# -- over time --


def _draw_run(figure: Any, run: DemoRun, candidates: Sequence[int]) -> None:
    box = (0.02, 0.045, 0.53, 0.855)
    _card(
        figure,
        box,
        "What it did",
        "Running requests, K and tokens a second over time. Thin lines: what was tried, to learn",
    )
    heights = {"height_ratios": [3, 1.5, 3]}
    grid = figure.add_gridspec(3, 1, left=0.082, right=0.537, top=0.805, bottom=0.105, hspace=0.13, **heights)
    axes = grid.subplots(sharex=True)
    for index, phase in enumerate(run.phases):
        until = run.phases[index + 1].start if index + 1 < len(run.phases) else run.seconds
        tint = _TINTS[[other.name for other in run.phases].index(phase.name) % 2]
        for axis in axes:
            axis.axvspan(phase.start, until, color=tint, linewidth=0, zorder=0)
        label = f"{phase.name} text, {100 * phase.acceptance:.0f} % accepted"
        axes[0].annotate(
            label, ((phase.start + until) / 2, 1), (0, 5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=8, color=SOFT,
        )  # fmt: skip
    begins, ends = _times(run)
    _draw_batch(axes[0], run.steps, begins, ends)
    _draw_steps(axes[1], run.steps, begins, ends, candidates)
    _draw_throughput(axes[2], run.steps, ends, candidates)
    for axis in axes:
        _plain(axis)
        axis.set_xlim(0, max(run.seconds, run.steps[-1].time - run.summary.started_at))
    for axis in (axes[0], axes[2]):
        axis.locator_params(axis="y", nbins=5)
    axes[2].set_xlabel("seconds since the start", fontsize=9, color=SOFT)
    figure.align_ylabels(axes)


def _times(run: DemoRun) -> tuple[Any, Any]:
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
    axis.fill_between(x, y, color="#9aa5b4", alpha=0.4, linewidth=0, zorder=2)
    axis.plot(x, y, color="#5b6675", linewidth=0.9, zorder=3)
    axis.set_ylim(0, 1.12 * size.max())
    axis.set_ylabel("requests", fontsize=9, color=SOFT)


def _draw_steps(axis: Any, steps: Sequence[StepRecord], begins: Any, ends: Any, candidates: Sequence[int]) -> None:
    previous: tuple[int, float] | None = None
    for k, group in groupby(range(len(steps)), key=lambda index: steps[index].steps):
        indices = list(group)
        begin, end = begins[indices[0]], ends[indices[-1]]
        if previous is not None:
            axis.plot([begin, begin], [previous[0], k], color="#c3cad4", linewidth=0.6, zorder=2)
        axis.plot([begin, end], [k, k], color=_colour(k, candidates), linewidth=6, solid_capstyle="butt", zorder=3)
        previous = k, end
    axis.set_yticks(candidates)
    margin = 0.25 * max(candidates[-1] - candidates[0], 1)
    axis.set_ylim(candidates[0] - margin, candidates[-1] + margin)
    axis.set_ylabel("K", fontsize=9, color=SOFT)


def _draw_throughput(axis: Any, steps: Sequence[StepRecord], ends: Any, candidates: Sequence[int]) -> None:
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
        axis.fill_between(grid, rate, where=where, color=_colour(int(k), candidates), alpha=0.35, linewidth=0, zorder=2)
    axis.plot(grid, rate, color=INK, linewidth=1.3, zorder=3)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_ylim(0, None)
    axis.set_ylabel(f"tokens a second, {MEAN_SECONDS:.0f} s mean", fontsize=9, color=SOFT)


# -- what was learned --


def _draw_learned(figure: Any, learned: Sequence[Learned], candidates: Sequence[int]) -> None:
    hint = "Tokens a second by batch size, at the end. Dots: that K ran there; bands: 95 %"
    _card(figure, (0.565, 0.405, 0.415, 0.495), "What it learned", hint)
    axis = figure.add_axes((0.615, 0.497, 0.315, 0.318))
    _plain(axis)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("batch size (running requests), and the K chosen there", fontsize=9, color=SOFT, labelpad=5)
    if not learned:
        axis.text(0.5, 0.5, "nothing yet in so short a time", transform=axis.transAxes, ha="center", color=SOFT)
        return
    sizes = np.array([at.batch_size for at in learned])
    for k in candidates:
        options = [at.options[k] for at in learned]
        rate = np.array([option.tokens_per_second for option in options])
        low, high = (sizes * [option.tokens[i] / option.seconds[j] for option in options] for i, j in ((1, 2), (2, 1)))
        colour = _colour(k, candidates)
        axis.fill_between(sizes, low, high, color=colour, alpha=0.13, linewidth=0, zorder=2)
        axis.plot(sizes, rate, color=colour, linewidth=1.8, zorder=3)
        ran = [option.tried for option in options]
        axis.plot(sizes[ran], rate[ran], "o", color=colour, markersize=3.6, zorder=4)
    _name_lines(axis, learned, candidates)
    top = 1.08 * max(option.tokens_per_second for at in learned for option in at.options.values())
    axis.set_ylim(0, top)
    ends = sizes[0] / 1.04, sizes[-1] * 1.04
    axis.set_xlim(*ends)
    axis.xaxis.set_major_locator(FixedLocator([size for size in (1, 2, 4, 8, 16, 32, 64) if size <= sizes[-1]]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.tick_params(axis="x", pad=13)
    for batch in TOLD_BATCHES:
        axis.axvline(batch, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    _draw_choices(axis, learned, candidates)
    where = crossing(learned)
    if where is not None:
        height = float(np.interp(where, sizes, [at.options[0].tokens_per_second for at in learned]))
        axis.plot([where], [height], "o", color=CARD, markeredgecolor=INK, markersize=8, markeredgewidth=1.5, zorder=5)
        axis.annotate(
            f"from about {where:.0f} on it\nis better to skip", (where, height), (-14, 12), textcoords="offset points",
            ha="right", va="center", fontsize=9, color=INK, linespacing=1.25,
        )  # fmt: skip


def _name_lines(axis: Any, learned: Sequence[Learned], candidates: Sequence[int]) -> None:
    """Name each line at its end, in its colour, none over another."""
    ends = sorted((learned[-1].options[k].tokens_per_second, k) for k in candidates)
    apart = 0.07 * max(rate for rate, _ in ends)
    height = -np.inf
    for rate, k in ends:
        height = max(rate, height + apart)
        axis.annotate(
            f"K={k}", (1, height), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=10, fontweight="bold", color=_colour(k, candidates),
        )  # fmt: skip


def _draw_choices(axis: Any, learned: Sequence[Learned], candidates: Sequence[int]) -> None:
    """Draw the K chosen at each batch size as a strip below the axis."""
    sizes = [float(at.batch_size) for at in learned]
    edges = [sizes[0] / 1.04, *(np.sqrt(a * b) for a, b in pairwise(sizes)), sizes[-1] * 1.04]
    across = blended_transform_factory(axis.transData, axis.transAxes)
    for at, left, right in zip(learned, edges, edges[1:], strict=False):
        axis.barh(
            -0.045, right - left, 0.05, left, color=_colour(at.choice, candidates), edgecolor=CARD, linewidth=0.8,
            transform=across, clip_on=False, zorder=3,
        )  # fmt: skip


def _draw_reasons(figure: Any, learned: Sequence[Learned], candidates: Sequence[int]) -> None:
    """Draw the sum behind K at each of TOLD_BATCHES."""
    bottom, height = 0.045, 0.345
    _card(figure, (0.565, bottom, 0.415, height), "Why", _SUM)
    told = [at for at in learned if at.batch_size in TOLD_BATCHES]
    axis = figure.add_axes((0.578, bottom + 0.015, 0.389, height - 0.085))
    axis.set_axis_off()
    axis.set_xlim(0, 1)
    rows = sum(len(at.options) + 1 for at in told)
    axis.set_ylim(max(rows, 1), 0)
    row = 0.5
    for at in told:
        for x, text in ((0.25, "tokens"), (0.39, "÷ step"), (0.55, _TIMES_BATCH)):
            axis.text(x, row, text, fontsize=8.5, color=SOFT, va="center")
        most = max(option.tokens_per_second for option in at.options.values())
        axis.text(0.0, row, f"At {at.batch_size} requests", fontsize=10, fontweight="bold", color=INK, va="center")
        for option in at.options.values():
            row += 1.0
            colour = _colour(option.steps, candidates)
            rate = option.tokens_per_second
            weight = "bold" if option.steps == at.choice else "normal"
            if option.steps == at.choice:
                axis.axhspan(row - 0.47, row + 0.47, color=CHOSEN, linewidth=0)
            axis.text(0.012, row, f"K={option.steps}", fontsize=10, fontweight="bold", color=colour, va="center")
            axis.text(0.25, row, f"{option.tokens[0]:.2f}", fontsize=9.5, color=INK, va="center")
            axis.text(0.48, row, f"{1e3 * option.seconds[0]:.1f} ms", fontsize=9.5, color=INK, va="center", ha="right")
            axis.text(0.55, row, f"{rate:,.0f}", fontsize=9.5, color=INK, va="center", fontweight=weight)
            axis.barh(row, 0.23 * rate / most, 0.3, 0.64, color=colour)
            against = "chosen" if option.steps == at.choice else f"{100 * option.against_choice[0]:+.0f} %"
            axis.text(0.99, row, against, fontsize=9.5, color=INK, va="center", ha="right", fontweight=weight)
        row += 1.0
