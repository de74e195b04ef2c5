"""What the rows of ``replay_requirements.py`` say: each figure as asked and as reached, and tables by case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from replay_cases import CASES, SURFACES, Row, moving

from specpilot.controller.statistics import mean_and_interval


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    asked: str
    reached: str
    met: bool | None
    """None: reported only."""


def text_of(row: Row, *names: str) -> str:
    return ", ".join(f"{row[name]:g}" if isinstance(row[name], float) else str(row[name]) for name in names)


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def mean_of(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


@dataclass(frozen=True)
class Cell:
    """One surface and load: mean shares by policy over the seeds."""

    where: str
    surface: str
    case: str
    shares: dict[str, float]
    halves: dict[str, float]
    """Of the 95 % interval of the paired difference between goodput's share and the policy's."""

    @property
    def best_fixed(self) -> str:
        return max((name for name in self.shares if name.startswith("static:")), key=lambda name: self.shares[name])

    def lead(self, policy: str, over: str) -> float:
        return self.shares[policy] / self.shares[over] - 1.0


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    found = []
    for (case, surface, cell), own in grouped(rows, "case", "surface", "cell").items():
        by_policy = {
            policy: {row["seed"]: row["share"] for row in runs} for (policy,), runs in grouped(own, "policy").items()
        }
        goodput = by_policy["goodput"]
        halves = {
            policy: mean_and_interval([goodput[seed] - shares[seed] for seed in goodput])[1]
            for policy, shares in by_policy.items()
        }
        shares = {policy: float(np.mean(list(values.values()))) for policy, values in by_policy.items()}
        shares["none"] = float(np.mean([row["fixed"]["none"] for row in own if row["policy"] == "informed-greedy"]))
        where = f"{surface}, {'closed' if case == 'closed' else case} {cell:g}"
        found.append(Cell(where, surface, case, shares, halves))
    return found


def worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    return min(found, default=(math.nan, "no such case"))


SHARE_ASKED = {"h200-sglang": 0.99, "moe": 0.97}
"""By surface; 0.98 on the others."""


def share_figures(cells: Sequence[Cell]) -> Iterator[Figure]:
    for surface in SURFACES:
        asked = SHARE_ASKED.get(surface, 0.98)
        own = [
            (cell.shares["goodput"], cell.where) for cell in cells if cell.surface == surface and cell.case != "code"
        ]
        if own:
            least, where = worst(own)
            reached = f"least {percent(least)} ({where}), mean {percent(float(np.mean([share for share, _ in own])))}"
            yield Figure(f"share of the best K, {surface}", f"≥ {percent(asked, 0)}", reached, least >= asked)


def lead_figures(cells: Sequence[Cell]) -> Iterator[Figure]:
    counted = [cell for cell in cells if cell.case != "code"]
    leads = [cell for cell in counted if cell.lead("informed-greedy", cell.best_fixed) >= 0.03]
    kept = [
        (cell.lead("goodput", cell.best_fixed) / cell.lead("informed-greedy", cell.best_fixed), cell.where)
        for cell in leads
    ]
    if kept:
        least, where = worst(kept)
        yield Figure(
            "of informed-greedy's lead over the best fixed K, where that is ≥ 3 %",
            "≥ 85 %", f"least {percent(least, 1)} ({where}), {len(kept)} cells", least >= 0.85,
        )  # fmt: skip
    others = [(1.0 + cell.lead("goodput", cell.best_fixed), cell.where) for cell in counted if cell not in leads]
    if others:
        least, where = worst(others)
        yield Figure("of the best fixed K elsewhere", "≥ 99 %", f"least {percent(least)} ({where})", least >= 0.99)
    ahead = [cell for cell in counted if "sglang" in cell.shares]
    far = [cell for cell in ahead if cell.lead("informed-greedy", "sglang") >= 0.12]
    if far:
        least, where = worst((cell.lead("goodput", "sglang"), cell.where) for cell in far)
        yield Figure(
            "ahead of SGLang's rule, where informed-greedy is by ≥ 12 %",
            "≥ 10 %", f"least {percent(least, 1)} ({where}), {len(far)} cells", least >= 0.10,
        )  # fmt: skip
    near = [cell for cell in ahead if cell not in far]
    if near:
        least, where = worst((cell.lead("goodput", "sglang"), cell.where) for cell in near)
        yield Figure(
            "against SGLang's rule elsewhere", "≥ -1 %", f"least {percent(least, 1)} ({where})", least >= -0.01
        )
    for cell in (cell for cell in cells if cell.case == "code"):
        yield Figure(
            f"prefill-bound: {cell.where}", "reported",
            f"goodput {percent(cell.shares['goodput'])} of the best K, "
            f"best fixed K {percent(cell.shares[cell.best_fixed])}",
            None,
        )  # fmt: skip


def constant_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    least, where = worst((row["ratio"], text_of(row, "surface", "acceptance", "concurrency", "seed")) for row in rows)
    mean = mean_of(rows, "ratio")
    yield Figure(
        "of the best fixed K at constant load, each run after 2,000 steps",
        "≥ 99 %", f"least {percent(least)} ({where}), mean {percent(mean)}", least >= 0.99,
    )  # fmt: skip
    tied = [
        own
        for own in grouped(rows, "surface", "acceptance", "concurrency").values()
        if mean_of(own, "best_share") > 0.9995
    ]
    if tied:
        least, where = worst(
            (mean_of(own, "ratio"), text_of(own[0], "surface", "acceptance", "concurrency")) for own in tied
        )
        yield Figure(
            "of the best fixed K where adapting cannot help, mean over seeds",
            "≥ 99.5 %", f"least {percent(least)} ({where}), {len(tied)} cells", least >= 0.995,
        )  # fmt: skip
    for name, label, asked, form in (
        ("exploration_loss", "time lost by exploring, once settled", 0.005, percent),
        ("explored", "steps explored, once settled", 0.015, percent),
        ("switches", "switches other than probes in 100 steps at constant load", 1.0, "{:.3f}".format),
    ):
        means = [(mean_of(own, name), text_of(own[0], "surface", "acceptance", "concurrency"))
                 for own in grouped(rows, "surface", "acceptance", "concurrency").values()]  # fmt: skip
        most, where = max(means)
        yield Figure(
            label, f"≤ {form(asked)}",
            f"most {form(most)} ({where}), mean {form(float(np.mean([mean for mean, _ in means])))}",
            most <= asked,
        )  # fmt: skip
    least, where = worst((row["against_none"], text_of(row, "surface", "acceptance", "concurrency")) for row in rows)
    yield Figure("beside it: of no speculation", "reported", f"least {percent(least, 1)} ({where})", None)


def quantiles(values: Sequence[int | None]) -> tuple[float, float, int]:
    """Median, 90th percentile, and how many never came."""
    numbers = np.array([math.inf if value is None else value for value in values], float)
    middle, high = np.quantile(numbers, [0.5, 0.9], method="inverted_cdf")
    return float(middle), float(high), int(np.isinf(numbers).sum())


def steps_figure(label: str, rows: Sequence[Row], asked: int, *cell: str) -> Figure:
    """Judged by the 90th percentile over the seeds of the cell where that is highest."""
    middle, high, never = quantiles([row["steps"] for row in rows])
    worst_high, where = max(
        (quantiles([row["steps"] for row in own])[1], text_of(own[0], *cell)) for own in grouped(rows, *cell).values()
    )
    reached = f"median {middle:,.0f}, p90 {high:,.0f}" + (f", never in {never} of {len(rows)}" if never else "")
    return Figure(
        label, f"≤ {asked:,}", f"{reached}; worst case's p90 {worst_high:,.0f} ({where})", worst_high <= asked
    )


def cold_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for (prior, factor), own in sorted(grouped(rows, "prior", "factor").items()):
        asked = {"own": 50, "wrong": 600}.get(prior, 300 if factor == 1.0 else 1500)
        label = {"own": "with a stored prior", "wrong": "with a wrong prior"}.get(prior, f"costs x {factor:g}")
        yield steps_figure(f"steps until within 5 %, {label}", own, asked, "surface", "acceptance", "concurrency")


def change_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for label, direction, batches, asked in (
        ("down, 0.9 to 0.3", "down", (1, 4, 16, 64), 60),
        ("up, 0.3 to 0.9, batch ≥ 4", "up", (4, 16, 64), 150),
        ("up, 0.3 to 0.9, batch 1", "up", (1,), 400),
    ):
        own = [row for row in rows if row["concurrency"] in batches]
        flat = [{**row, "steps": value} for row in own for value in row[direction]]
        if flat:
            yield steps_figure(f"steps after a change {label}", flat, asked, "surface", "concurrency")


def hover_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for (resume,), own in sorted(grouped(rows, "resume").items()):
        names = ("surface", "acceptance", "low", "high", "course")
        means = [(mean_of(group, "ratio"), text_of(group[0], *names)) for group in grouped(own, *names).values()]
        least, where = worst(means)
        asked = 0.97 if resume else 0.98
        label = "hovering over a boundary" + (", with a resume penalty" if resume else "")
        mean = float(np.mean([ratio for ratio, _ in means]))
        yield Figure(
            f"of the better fixed K, {label}", f"≥ {percent(asked, 0)}",
            f"least {percent(least)} ({where}), mean {percent(mean)}", least >= asked,
        )  # fmt: skip


def speed_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    least = min(row["steps_per_second"] for row in rows)
    each = ", ".join(f"{row['steps_per_second']:,.0f} at batch {row['concurrency']}" for row in rows)
    yield Figure("steps/s learned and decided, one core", "≥ 20,000", each, least >= 20_000)
    most = max(row["decision_milliseconds_p99"] for row in rows)
    yield Figure("milliseconds a decision table, p99", "≤ 5", f"{most:.2f}", most <= 5.0)


FIGURES: dict[str, Callable[[Sequence[Row]], Iterator[Figure]]] = {
    "constant": constant_figures,
    "cold": cold_figures,
    "change": change_figures,
    "hover": hover_figures,
    "speed": speed_figures,
}


def figures(rows: Sequence[Row]) -> list[Figure]:
    cells = cells_of(row for row in rows if CASES[row["case"]] is moving)
    found = [*share_figures(cells), *lead_figures(cells)] if cells else []
    for case, made in FIGURES.items():
        if own := [row for row in rows if row["case"] == case]:
            found += made(own)
    return found


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| Figure | Asked | Reached | Met |", "|---|---|---|---|"]
    for figure in figures(rows):
        met = "-" if figure.met is None else ("yes" if figure.met else "**no**")
        lines.append(f"| {figure.name} | {figure.asked} | {figure.reached} | {met} |")
    cells = cells_of(row for row in rows if CASES[row["case"]] is moving)
    if cells:
        lines += [
            "",
            "Share of the best K; goodput's difference to the best fixed K, of several seeds with its 95 % interval.",
            "",
        ]
        lines += [
            "| Case | none | Best fixed K | SGLang's rule | informed-greedy | goodput | Difference |",
            "|" + "---|" * 7,
        ]
    for cell in cells:
        best = cell.best_fixed
        shares = {name: f"{100 * share:.2f}" for name, share in cell.shares.items()}
        half = f" ± {100 * cell.halves[best]:.2f}" if math.isfinite(cell.halves[best]) else ""
        lines.append(
            f"| {cell.where} | {shares.get('none', '-')} | {shares[best]} ({best.removeprefix('static:')}) "
            f"| {shares.get('sglang', '-')} | {shares['informed-greedy']} | {shares['goodput']} "
            f"| {100 * (cell.shares['goodput'] - cell.shares[best]):+.2f}{half} |"
        )
    return "\n".join([*lines, *details(rows)]) + "\n"


def details(rows: Sequence[Row]) -> Iterator[str]:
    if own := [row for row in rows if row["case"] == "constant"]:
        yield from ("", "Constant load: least and mean over the seeds of goodput over the best fixed K.", "")
        yield from ("| Case | Best K | Least | Mean | of none | Explored | Lost | Switches |", "|" + "---|" * 8)
        for runs in grouped(own, "surface", "acceptance", "concurrency").values():
            least = min(row["ratio"] for row in runs)
            yield (
                f"| {text_of(runs[0], 'surface', 'acceptance', 'concurrency')} | {runs[0]['best']} | {percent(least)} "
                f"| {percent(mean_of(runs, 'ratio'))} | {percent(mean_of(runs, 'against_none'), 1)} "
                f"| {percent(mean_of(runs, 'explored'))} | {percent(mean_of(runs, 'exploration_loss'), 3)} "
                f"| {mean_of(runs, 'switches'):.3f} |"
            )
    if own := [row for row in rows if row["case"] == "cold"]:
        yield from ("", "Cold: steps until within 5 %, median / 90th percentile over the seeds.", "")
        kinds = [("none", 1.0), ("none", 0.2), ("none", 8.0), ("own", 1.0), ("wrong", 1.0)]
        yield from ("| Case | Costs x 1 | x 0.2 | x 8 | Stored prior | Wrong prior |", "|" + "---|" * 6)
        for runs in grouped(own, "surface", "acceptance", "concurrency").values():
            by_kind = grouped(runs, "prior", "factor")
            texts = []
            for kind in kinds:
                middle, high, _ = quantiles([row["steps"] for row in by_kind[kind]])
                texts.append(f"{middle:,.0f} / {high:,.0f}")
            yield f"| {text_of(runs[0], 'surface', 'acceptance', 'concurrency')} | {' | '.join(texts)} |"
    if own := [row for row in rows if row["case"] == "change"]:
        yield from ("", "Changes: steps until the table is right, median / 90th percentile (count).", "")
        yield from ("| Case | 0.9 to 0.3 | 0.3 to 0.9 |", "|---|---|---|")
        for runs in grouped(own, "surface", "concurrency").values():
            texts = []
            for direction in ("down", "up"):
                values = [value for row in runs for value in row[direction]]
                middle, high, _ = quantiles(values) if values else (math.nan, math.nan, 0)
                texts.append(f"{middle:,.0f} / {high:,.0f} ({len(values)})" if values else "nothing to change")
            yield f"| {text_of(runs[0], 'surface', 'concurrency')} | {' | '.join(texts)} |"
    if own := [row for row in rows if row["case"] == "hover"]:
        yield from ("", "Hovering: goodput over the better fixed K, mean over the seeds.", "")
        yield from ("| Case | Resume penalty | Better K | Ratio | Best K at every step | Switches |", "|" + "---|" * 6)
        for runs in grouped(own, "surface", "acceptance", "low", "high", "course", "resume").values():
            where = text_of(runs[0], "surface", "acceptance", "low", "high", "course")
            yield (
                f"| {where} | {'yes' if runs[0]['resume'] else 'no'} | {runs[0]['best']} "
                f"| {percent(mean_of(runs, 'ratio'))} | {percent(mean_of(runs, 'adapting'))} "
                f"| {mean_of(runs, 'switches'):.2f} |"
            )
