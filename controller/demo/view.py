"""The demo's live view: what the trace and the controller's status say by now, in a terminal."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.demo.colours import colour
from specpilot.controller.demo.run import MEAN_SECONDS, tokens_of
from specpilot.controller.serve.report import ServerStatus
from specpilot.policies.knowledge import describe_gain
from specpilot.sglang_hooks.wire import DecisionTable, StepRecord

REFRESH_SECONDS = 0.25
LEAST_TOP = 16
"""Requests that the top of the chart stands for at least."""
STATUS_SECONDS = 0.5


class View:
    """A run of ``seconds`` as text; ``steps`` is what the trace holds of it, and grows elsewhere."""

    def __init__(self, seconds: float, endpoint: str, steps: Sequence[StepRecord]) -> None:
        self.seconds = seconds
        self.steps = steps
        self.policy = ""
        self._endpoint = endpoint
        self._status: ServerStatus | None = None
        self._page = ""
        self._status_at = float("-inf")

    @property
    def elapsed(self) -> float:
        """Seconds from the first step to now."""
        return time.time() - self.steps[0].time if self.steps else 0.0

    def update(self) -> None:
        """Ask for the status if it is time."""
        if time.monotonic() - self._status_at > STATUS_SECONDS:
            self._status_at = time.monotonic()
            with contextlib.suppress(StatusError):
                status = fetch_status(self._endpoint, timeout=1.0)
                servers, self._page = status.servers, status.page
                self._status = servers[0] if servers else None
                if self._status is not None and self._status.table is not None:
                    self.policy = self._status.table.policy

    def tokens_per_second(self) -> float:
        """Return the tokens of the last second that the trace knows."""
        since = self.steps[-1].time - MEAN_SECONDS if self.steps else 0.0
        tokens = 0
        for step in reversed(self.steps):
            if step.time <= since:
                break
            tokens += tokens_of(step)
        return tokens / MEAN_SECONDS

    def line(self) -> str:
        """Return one line for where nothing can be redrawn."""
        step = self.steps[-1]
        return (
            f"{min(self.elapsed, self.seconds):5.1f} s   batch {step.batch_size:2d}   K={step.steps}   "
            f"{self.tokens_per_second():6,.0f} tokens/s   {self._table_text()}"
        )

    def render(self, width: int) -> RenderableType:
        """Return the whole view for a terminal ``width`` columns wide."""
        if not self.steps:
            return Panel("the controller runs, the server starts …", title="specpilot demo", title_align="left")
        step = self.steps[-1]
        columns = max(20, min(width, 140) - 14)
        batch, steps = _history(self.steps, columns)
        top = max(LEAST_TOP, *batch)
        head = Table.grid(padding=(0, 3))
        head.add_row(_big(step.steps), self._figures(step))
        chart = Table.grid(padding=(0, 1))
        chart.add_column(justify="right", style="dim", width=8)
        chart.add_row(f"requests\n{top}", _bars(batch, steps, top))
        chart.add_row("K", Text.assemble(*((_digit(k), _style(k)) for k in steps)))
        span = columns * REFRESH_SECONDS
        chart.add_row("", Text(f"{f'-{span:.0f} s':<{columns - 3}}now", style="dim"))
        title = f"specpilot demo   {min(self.elapsed, self.seconds):.0f} of {self.seconds:.0f} s"
        return Panel(Group(head, Text(), chart), title=title, title_align="left", width=columns + 14)

    def _figures(self, step: StepRecord) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(min_width=40)
        doing = f"drafting {step.steps} tokens a step" if step.steps else "not speculating"
        grid.add_row("now", Text(doing, style=_style(step.steps)))
        grid.add_row("batch size", f"[bold]{step.batch_size}[/]" + (f", {step.queued} queued" if step.queued else ""))
        grid.add_row("tokens/s", f"[bold]{self.tokens_per_second():,.0f}[/]")
        status = self._status
        if status is not None and status.expected_gain is not None:
            gain = describe_gain(status.expected_gain).removeprefix("speculation ").removeprefix("is ")
            grid.add_row("speculation", gain)
        grid.add_row("table", self._table_text())
        if status is not None and status.table is not None:
            grid.add_row("K by batch", _map(status.table))
        lost = self._status.records_lost if self._status is not None else 0
        dropped = f", [red]{lost:,} lost[/]" if lost else ", none lost"
        if self._page.startswith("http"):
            grid.add_row("page", self._page)
        grid.add_row("records", f"{len(self.steps):,} in the trace{dropped}")
        return grid

    def _table_text(self) -> str:
        status = self._status
        if status is None or status.table is None:
            return "none yet: the server's own fallback"
        return f"{status.table.policy}, epoch {status.table.epoch}, {status.table_age_seconds:.0f} s old"


def _map(table: DecisionTable) -> Text:
    """Return the K chosen for each region of batch size, at the shortest contexts: the demo has no others."""
    chosen = table.choice[:: len(table.context_edges) + 1]
    text = Text("1 ", style="dim")
    text.append_text(Text.assemble(*((_digit(k), _style(k)) for k in chosen)))
    return text.append(f" {table.batch_edges[-1]}+" if table.batch_edges else "", style="dim")


def _history(steps: Sequence[StepRecord], columns: int) -> tuple[list[int], list[int | None]]:
    """Return, for the newest ``columns`` refresh intervals, the largest batch and the commonest K.

    An interval without a step has batch 0 and K None.
    """
    end = int(steps[-1].time / REFRESH_SECONDS)
    batch = [0] * columns
    counts: list[Counter[int]] = [Counter() for _ in range(columns)]
    for step in reversed(steps):
        column = columns - 1 - end + int(step.time / REFRESH_SECONDS)
        if column < 0:
            break
        batch[column] = max(batch[column], step.batch_size)
        counts[column][step.steps] += 1
    return batch, [max(count, key=count.__getitem__) if count else None for count in counts]


_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR_ROWS = 6


def _bars(values: Sequence[int], steps: Sequence[int | None], top: int) -> Text:
    """Return a bar chart _BAR_ROWS lines high, coloured by K."""
    lines = []
    for row in reversed(range(_BAR_ROWS)):
        eighths = (round(value / top * _BAR_ROWS * 8) - row * 8 for value in values)
        cells = zip(eighths, steps, strict=True)
        lines.append(Text.assemble(*((_BLOCKS[min(max(n, 0), 8)], colour(k)) for n, k in cells)))
    return Text("\n").join(lines)


def _digit(steps: int | None) -> str:
    return " " if steps is None else str(steps) if steps < 10 else "+"


def _style(steps: int | None) -> str:
    return f"bold {colour(steps)}"


_GLYPHS = {
    "K": ("█  █", "█ █ ", "██  ", "█ █ ", "█  █"),
    "=": ("   ", "▄▄▄", "   ", "▀▀▀", "   "),
    "0": ("▄▀▀▄", "█  █", "█  █", "█  █", "▀▄▄▀"),
    "1": (" ▄█ ", "  █ ", "  █ ", "  █ ", " ▄█▄"),
    "2": ("▄▀▀▄", "   █", " ▄▀ ", "█   ", "█▄▄▄"),
    "3": ("▀▀▀▄", "   █", " ▀▀▄", "   █", "▄▄▄▀"),
    "4": ("█  █", "█  █", "▀▀▀█", "   █", "   █"),
    "5": ("█▀▀▀", "█   ", "▀▀▀▄", "   █", "▄▄▄▀"),
    "6": ("▄▀▀ ", "█   ", "█▀▀▄", "█  █", "▀▄▄▀"),
    "7": ("▀▀▀█", "   █", "  █ ", " █  ", " █  "),
    "8": ("▄▀▀▄", "█  █", "▄▀▀▄", "█  █", "▀▄▄▀"),
    "9": ("▄▀▀▄", "█  █", " ▀▀█", "   █", " ▄▄▀"),
}


def _big(steps: int) -> Text:
    glyphs = [_GLYPHS[character] for character in f"K={steps}"]
    return Text("\n".join("  ".join(row) for row in zip(*glyphs, strict=True)), style=_style(steps))
