"""What ``specpilot replay --report`` draws: one HTML page with its table and its plots in it.

Needs matplotlib and Jinja2, which ``specpilot[demo]`` installs; only ``--report`` imports this module.
The plots are SVG with text as text, in the colours of the page around them, light or dark.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from specpilot.controller.replay.judge import SKIPPED_STEPS
from specpilot.controller.replay.result import Examined, load_in_words
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.statistics import mean_and_interval

NAME = "replay.html"

_INK, _RULE = "#0a0b0c", "#0c0b0a"
"""Placeholders for the page's own colours, until the SVG is in it."""

_COLOURS = ("#3b82d6", "#c9760f", "#23936a", "#d6455d", "#8f63d2", "#1b93a6", "#c55a9d", "#7d838c")
"""Colours of the policies, each with a contrast of at least 3 : 1 against the page, light and dark."""
_DASHES = ("-", "--", "-.", ":")
_WIDTH = 6.6
_GRID_POINTS = 150

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """A drawing and what it shows."""

    heading: str
    text: str
    svg: Markup


def write_report(runs: Sequence[Examined], surface: NamedSurface, folder: Path) -> Path:
    """Write ``replay.html`` into ``folder`` and return its path."""
    policies = list(dict.fromkeys(run.result.policy for run in runs))
    first = runs[0].result
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specpilot.controller.replay"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(NAME).render(
        surface=surface,
        where=load_in_words(first),
        seeds=len({run.result.seed for run in runs}),
        best_fixed=best_fixed(runs),
        skipped=SKIPPED_STEPS,
        rows=summary_rows(runs, policies),
        plots=list(plots(runs, policies)),
        version=version("specpilot"),
    )
    path = folder / NAME
    path.write_text(page, encoding="utf-8")
    return path


# -- the table --


def by_seed(runs: Sequence[Examined], policy: str, figure: str = "reference_share") -> dict[int, Any]:
    """Return a policy's figure by seed."""
    return {run.result.seed: getattr(run.result, figure) for run in runs if run.result.policy == policy}


def best_fixed(runs: Sequence[Examined]) -> str | None:
    """Return the fixed K with the highest mean share over the seeds; None if none was run."""
    fixed = {run.result.policy for run in runs if run.result.policy.startswith("static:")}
    return max(sorted(fixed), key=lambda policy: np.mean(list(by_seed(runs, policy).values())), default=None)


def summary_rows(runs: Sequence[Examined], policies: Sequence[str]) -> list[dict[str, str]]:
    """Return the cells of each policy's row: means over the seeds, differences seed by seed."""
    fixed = best_fixed(runs)
    reference = "informed-greedy" if "informed-greedy" in policies else None
    rows = []
    for policy in policies:
        shares = by_seed(runs, policy)

        def mean(figure: str, form: str, scale: float = 1.0, policy: str = policy) -> str:
            values = list(by_seed(runs, policy, figure).values())
            return format(scale * float(np.mean(values)), form)

        times = [run.result.time_per_output_token.mean for run in runs if run.result.policy == policy]
        known = [seconds for seconds in times if seconds is not None]
        until = [steps for steps in by_seed(runs, policy, "steps_to_95").values() if steps is not None]
        rows.append(
            {
                "policy": policy,
                "share": _with_interval(list(shares.values()), signed=False),
                "to_fixed": _difference(runs, policy, fixed),
                "to_reference": _difference(runs, policy, reference),
                "tokens": mean("tokens_per_second", ",.0f"),
                "milliseconds": f"{1e3 * np.mean(known):.2f}" if len(known) == len(times) else "-",
                "switches": mean("switches_per_100_steps", ".2f"),
                "probes": mean("probe_switches_per_100_steps", ".2f"),
                "loss": mean("exploration_loss", ".3f", 100.0),
                "steps": f"{np.median(until):,.0f}" if len(until) == len(shares) else f"{len(until)} of {len(shares)}",
            }
        )
    return rows


def _difference(runs: Sequence[Examined], policy: str, other: str | None) -> str:
    if other is None or other == policy:
        return "-"
    own, its = by_seed(runs, policy), by_seed(runs, other)
    return _with_interval([own[seed] - its[seed] for seed in own], signed=True)


def _with_interval(shares: Sequence[float], signed: bool) -> str:
    mean, half = mean_and_interval(shares)
    text = f"{100 * mean:+.2f}" if signed else f"{100 * mean:.2f}"
    return text if np.isnan(half) else f"{text} ± {100 * half:.2f}"


# -- the plots --


def plots(runs: Sequence[Examined], policies: Sequence[str]) -> Iterator[Plot]:
    """Draw everything, in the order of the page."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    with mpl.rc_context(_STYLE):
        yield _regret(runs, policies)
        yield _course(runs, policies)
        yield _shares(runs, policies)
        yield _until_right(runs, policies)


def _styles(policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes: no two policies share both, and few share one."""
    return {
        policy: {
            "color": _COLOURS[index % len(_COLOURS)],
            "linestyle": _DASHES[(index + index // len(_COLOURS)) % len(_DASHES)],
        }
        for index, policy in enumerate(policies)
    }


def _regret(runs: Sequence[Examined], policies: Sequence[str]) -> Plot:
    figure = Figure(figsize=(_WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    ends = []
    for policy, style in _styles(policies).items():
        regrets = [run.regret for run in runs if run.result.policy == policy]
        steps = np.linspace(0.0, min(regret.steps[-1] for regret in regrets), _GRID_POINTS)
        lost = np.array([np.interp(steps, [0, *regret.steps], [0.0, *regret.lost_seconds]) for regret in regrets])
        mean = lost.mean(axis=0)
        axes.plot(steps, mean, label=policy, linewidth=1.8, **style)
        axes.fill_between(steps, lost.min(axis=0), lost.max(axis=0), color=style["color"], alpha=0.15, linewidth=0)
        ends.append(f"{policy} {mean[-1]:.1f} s after {steps[-1]:,.0f} steps")
    axes.set_xlabel("decode steps")
    axes.set_ylabel("seconds lost")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    # What one policy loses in a minute another loses in a day.
    axes.set_yscale("symlog", linthresh=0.1)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.margins(x=0)
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    text = "Decoding time lost so far against the best K in each state, the mean over the seeds: " + ", ".join(ends)
    return _plot("Regret", f"{text}. Bands reach from the least to the most of the seeds.", figure)


def shown_course(runs: Sequence[Examined], policies: Sequence[str]) -> Examined:
    """Return the run whose course is drawn: the first seed of goodput, or of what adapts, or of anything."""
    adapting = [policy for policy in policies if policy != "none" and not policy.startswith("static:")]
    shown = "goodput" if "goodput" in policies else next(iter([*adapting, *policies]))
    return next(run for run in runs if run.result.policy == shown)


def _course(runs: Sequence[Examined], policies: Sequence[str]) -> Plot:
    run = shown_course(runs, policies)
    course = run.course
    figure = Figure(figsize=(_WIDTH, 5.4), layout="constrained")
    acceptance, batch, steps = figure.subplots(3, 1, sharex=True, height_ratios=[2, 2, 3])
    acceptance.step(course.at, course.acceptance, where="post", color=_COLOURS[2])
    acceptance.set_ylim(0, 1)
    acceptance.set_ylabel("acceptance")
    batch.step(course.at, course.batch, where="post", color=_COLOURS[4], linewidth=1.2)
    batch.set_ylim(0, None)
    batch.set_ylabel("batch size")
    steps.step(course.at, course.steps, where="post", color=_COLOURS[0], linewidth=1.8, label="applied")
    steps.step(
        course.at, course.best_steps, where="post", color=_COLOURS[1], linewidth=1.0, linestyle=":", label="best"
    )
    steps.set_ylabel("K")
    steps.yaxis.set_major_locator(MaxNLocator(integer=True))
    steps.set_ylim(-0.3, max(course.steps.max(), course.best_steps.max()) + 0.3)
    steps.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=2, fontsize=9)
    steps.set_xlabel("seconds")
    steps.margins(x=0)
    agreed = np.mean(course.steps == course.best_steps)
    text = (
        f"Seed {run.result.seed} of {run.result.policy} over time: acceptance of a draft given those before it, "
        f"mean batch size, and the K applied most often beside the one that was best; they agree in "
        f"{100 * agreed:.0f} % of the time."
    )
    return _plot("One run over time", text, figure)


def _shares(runs: Sequence[Examined], policies: Sequence[str]) -> Plot:
    values = [[100 * share for share in by_seed(runs, policy).values()] for policy in policies]
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.4 * len(policies)), layout="constrained")
    axes = _dots(figure, policies, values)
    axes.set_xlabel("% of the best K in each state")
    text = "Share of the tokens that the best K would have made, each run and the median: " + ", ".join(
        f"{policy} {np.median(own):.2f} %" for policy, own in zip(policies, values, strict=True)
    )
    return _plot("Share of the best K", text + ".", figure)


def _until_right(runs: Sequence[Examined], policies: Sequence[str]) -> Plot:
    until = {policy: list(by_seed(runs, policy, "steps_to_95").values()) for policy in policies}
    values = [[float(steps) for steps in until[policy] if steps is not None] for policy in policies]
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.4 * len(policies)), layout="constrained")
    axes = _dots(figure, policies, values)
    never = {policy: sum(steps is None for steps in own) for policy, own in until.items()}
    names = [
        policy + (f"\nnever in {never[policy]} of {len(until[policy])}" if never[policy] else "") for policy in policies
    ]
    axes.set_yticks(range(len(policies)), names)
    axes.set_xlabel("decode steps until within 5 % of the best K, to stay")
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    text = "Steps from the start until a policy is within 5 % of the best K to stay, each run and the median: "
    medians = (
        f"{policy} {f'{np.median(own):,.0f}' if own else 'never'}" for policy, own in zip(policies, values, strict=True)
    )
    return _plot("Steps to 95 %", text + ", ".join(medians) + ".", figure)


def _dots(figure: Any, policies: Sequence[str], values: Sequence[Sequence[float]]) -> Any:
    """Draw a row for each policy: a dot for each run, a line at the median; a box where there are five or more."""
    axes = figure.subplots()
    for row, ((_policy, style), own) in enumerate(zip(_styles(policies).items(), values, strict=True)):
        if len(own) >= 5:
            low, high = np.quantile(own, [0.25, 0.75])
            axes.barh(row, high - low, left=low, height=0.5, color=style["color"], alpha=0.25, linewidth=0)
        if own:
            axes.plot([np.median(own)] * 2, [row - 0.3, row + 0.3], color=style["color"], linewidth=2)
        axes.plot(own, [row] * len(own), "o", color=style["color"], markersize=4, alpha=0.7, linestyle="none")
    axes.set_yticks(range(len(policies)), policies)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    return axes


def _plot(heading: str, text: str, figure: Any) -> Plot:
    file = io.StringIO()
    # Identifiers of one page must differ; without a salt they would also differ from run to run.
    with mpl.rc_context({"svg.hashsalt": heading}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    name = heading.lower().replace(" ", "-").replace("%", "percent")
    opening = re.compile(r"<svg[^>]*>")
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" '
        f'aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{escape(heading)}</title><desc id="{name}-text">{escape(text)}</desc>'
    )
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referred else "", svg)
    svg = opening.sub(lambda _: head, svg, count=1)
    svg = svg.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
    return Plot(heading, text, Markup(svg))  # noqa: S704 - made by matplotlib from numbers and escaped names
