"""The demo: a simulated server under a bursty load, steered by a real controller, and a picture of it.

    this process ── starts ──► controller (``specpilot controller``, policy "threshold")
          │                        ▲  │ steps, tables over ipc://
          └─────── starts ──► simulated server (``controller/simserver.py``, the real hooks)

What is shown live and drawn at the end is read back from the trace that the controller
writes and from its status, as an operator would; the server only tells its totals.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from controller.simserver import H200_8B, Phase, Summary, bursty_workload
from controller.status import ServerStatus, StatusError, fetch_status
from controller.trace import read_segment, records, segments
from sglang_hooks.wire import MASKED, StepRecord

THRESHOLD = 8
STEPS = 3
SEED = 1
SERVER_ID = "demo:1"

REFRESH_SECONDS = 0.25
STATUS_SECONDS = 0.5
START_SECONDS = 30.0
"""A loaded machine may take this long to start Python twice."""
EXIT_SECONDS = 10.0
LOG_LINES = 12
MEAN_SECONDS = 1.0
"""Window of the throughput, live and in the picture."""
IDLE_GAP_SECONDS = 0.25
"""A longer gap between two decode steps with one prefill at most was an idle server."""

COLOURS = {0: "#d9772b", 1: "#7fb8da", 3: "#1f6fb2"}
"""Of K, in the terminal and in the picture."""
OTHER_COLOUR = "#6a51a3"

_MISSING_MATPLOTLIB = "the demo draws its picture with matplotlib: pip install 'specpilot[demo]'"

_CONFIG = """\
[controller]
endpoint = {endpoint}
decide_seconds = 0.25

[policy]
name = "threshold"
threshold = {threshold}
steps = {steps}

[trace]
directory = {directory}
flush_seconds = 0.2
segment_bytes = 1_000_000
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the text says which part failed and how."""


def run_demo(seconds: float, json_path: Path | None, png_path: Path, keep: Path | None, console: Console) -> int:
    """Run for ``seconds`` and return the exit code: 0, 1 for a failure, 130 when interrupted.

    ``json_path`` takes a summary for scripts, ``png_path`` the picture, ``keep`` the trace,
    the logs and the configuration. Without a terminal a few lines stand in for the live view.
    """
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise DemoError(_MISSING_MATPLOTLIB)
        if not seconds >= 1:
            raise DemoError(f"{seconds:g} seconds are too short to show anything: use --seconds 1 or more")
        for path in (json_path, png_path):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="specpilot-demo-") as temporary, _terminable():
            try:
                run = _run(seconds, Path(temporary), console)
                draw(run, png_path)
            finally:
                if keep is not None:
                    shutil.copytree(temporary, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.ipc*"))
        if json_path is not None:
            json_path.write_text(json.dumps(run.report(), indent=2) + "\n")
        _print_summary(run, console)
        kept = f", trace and logs: {keep}" if keep is not None else ""
        console.print(f"picture: {png_path}{kept}", markup=False, highlight=False)
    except (DemoError, OSError) as error:
        console.print(f"[red]specpilot demo:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the demo's controller and server are stopped")
        return 130
    return 0


# -- what was seen --


@dataclass(frozen=True)
class Run:
    """A finished run: the server's totals, and the steps as the trace holds them."""

    seconds: float
    summary: Summary
    policy: str
    steps: list[StepRecord]
    phases: tuple[Phase, ...]

    @property
    def lost(self) -> int:
        """Steps that never reached the trace, wherever they were dropped."""
        return max(self.summary.steps - len(self.steps), self.summary.dropped_records)

    def report(self) -> dict[str, Any]:
        """Return the summary for scripts."""
        return {
            "steps": self.summary.steps,
            "tokens_per_second": self.summary.tokens_per_second,
            "share_by_k": self.summary.share_by_k,
            "switches": self.summary.switches,
            "tables_applied": self.summary.tables_applied,
            "dropped_records": self.lost,
            "policy": self.policy,
        }


def tokens_of(step: StepRecord) -> int:
    """Return the tokens that a step gave its clients: accepted drafts and bonus tokens."""
    return sum([accepted + 1 for accepted in step.accepted_drafts if accepted != MASKED])


class Tail:
    """Reads a growing trace: every ``read`` appends to ``steps`` what was written since."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closed: set[Path] = set()
        self._batches: Counter[Path] = Counter()
        self.steps: list[StepRecord] = []

    def read(self) -> None:
        """Take in the record batches that are whole by now."""
        if not self._directory.exists():
            return
        found = segments([self._directory])
        for path in found:
            for index, batch in enumerate(read_segment(path) if path not in self._closed else ()):
                if index >= self._batches[path]:
                    self._batches[path] = index + 1
                    self.steps += records(batch)
        # One server writes here, and nothing to a segment that has a successor.
        self._closed.update(found[:-1])


# -- the two processes --


class _Child:
    """A process of the demo, in a session of its own: Ctrl-C reaches it through us."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        # Options that point at the user's real server are none of the demo's.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECPILOT_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def check(self) -> bool:
        """Return whether it still runs; DemoError if it failed."""
        code = self.process.poll()
        if code:
            raise self.failure(f"ended early with exit code {code}")
        return code is None

    def failure(self, what: str) -> DemoError:
        """Return an error that ends with the last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return DemoError("\n  ".join([f"the {self.name} {what}; its last lines were:", *(lines or ["(none)"])]))

    def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the demo like Ctrl-C, with its processes stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(seconds: float, folder: Path, console: Console) -> Run:
    endpoint = f"ipc://{folder}/controller.ipc"
    directory = folder / "trace"
    config = folder / "controller.toml"
    texts = {"endpoint": json.dumps(endpoint), "directory": json.dumps(str(directory))}
    config.write_text(_CONFIG.format(threshold=THRESHOLD, steps=STEPS, **texts))
    out = folder / "summary.json"
    with contextlib.ExitStack() as children:
        controller = _Child("controller", ["controller.cli", "controller", "--config", str(config)], folder)
        children.callback(controller.end)
        deadline = time.monotonic() + START_SECONDS
        while not (folder / "controller.ipc").exists():
            if not controller.check() or time.monotonic() > deadline:
                raise controller.failure("did not open its socket")
            time.sleep(0.05)
        options = ["--endpoint", endpoint, "--server-id", SERVER_ID, "--out", str(out)]
        options += ["--seconds", str(seconds), "--seed", str(SEED)]
        server = _Child("server", ["controller.simserver", *options], folder)
        children.callback(server.end)
        view = _View(seconds, endpoint, Tail(directory))
        policy = _watch(view, controller, server, console)
        summary = msgspec.json.decode(out.read_bytes(), type=Summary)
        _await_trace(view.tail, summary.steps, controller)
        server.end()
        controller.end()
    view.tail.read()
    phases = bursty_workload(seconds, random.Random(SEED)).phases  # noqa: S311
    return Run(seconds, summary, policy, view.tail.steps, phases)


def _watch(view: _View, controller: _Child, server: _Child, console: Console) -> str:
    """Show the run until the server has ended; return the name of the policy that steered it."""
    deadline = time.monotonic() + START_SECONDS + view.seconds
    next_line = 0.0
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while server.check():
            if not controller.check():
                raise controller.failure("ended early")
            if time.monotonic() > deadline:
                raise server.failure("did not end in time")
            view.update()
            if live is not None:
                live.update(view.render(console.width), refresh=True)
            elif view.tail.steps and view.elapsed >= next_line:
                next_line = view.elapsed + max(1.0, view.seconds / 8)
                console.print(view.line(), highlight=False)
            time.sleep(REFRESH_SECONDS)
    view.update()
    return view.policy


def _await_trace(tail: Tail, steps: int, controller: _Child) -> None:
    """The server has sent everything: give the controller a moment to write it."""
    deadline = time.monotonic() + EXIT_SECONDS / 4
    while len(tail.steps) < steps and time.monotonic() < deadline and controller.check():
        time.sleep(0.1)
        tail.read()


# -- the live view --


class _View:
    """What the trace and the status say by now, as text."""

    def __init__(self, seconds: float, endpoint: str, tail: Tail) -> None:
        self.seconds = seconds
        self.tail = tail
        self.policy = ""
        self._endpoint = endpoint
        self._status: ServerStatus | None = None
        self._status_at = float("-inf")

    @property
    def elapsed(self) -> float:
        """Seconds from the first step to now."""
        return time.time() - self.tail.steps[0].time if self.tail.steps else 0.0

    def update(self) -> None:
        """Read on."""
        self.tail.read()
        if time.monotonic() - self._status_at > STATUS_SECONDS:
            self._status_at = time.monotonic()
            with contextlib.suppress(StatusError):
                servers = fetch_status(self._endpoint, timeout=1.0).servers
                self._status = servers[0] if servers else None
                if self._status is not None and self._status.table is not None:
                    self.policy = self._status.table.policy

    def tokens_per_second(self) -> float:
        """Tokens of the last second that the trace knows."""
        steps = self.tail.steps
        since = steps[-1].time - MEAN_SECONDS if steps else 0.0
        tokens = 0
        for step in reversed(steps):
            if step.time <= since:
                break
            tokens += tokens_of(step)
        return tokens / MEAN_SECONDS

    def line(self) -> str:
        """Return one line for where nothing can be redrawn."""
        step = self.tail.steps[-1]
        return (
            f"{min(self.elapsed, self.seconds):5.1f} s   batch {step.batch_size:2d}   K={step.steps}   "
            f"{self.tokens_per_second():6,.0f} tokens/s   {self._table_text()}"
        )

    def render(self, width: int) -> RenderableType:
        """Return the whole view for a terminal ``width`` columns wide."""
        if not self.tail.steps:
            return Panel("the controller runs, the server starts …", title="specpilot demo", title_align="left")
        step = self.tail.steps[-1]
        columns = max(20, min(width, 140) - 14)
        batch, steps = _history(self.tail.steps, columns)
        top = max(THRESHOLD * 2, *batch)
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
        grid.add_row("table", self._table_text())
        lost = self._status.records_lost if self._status is not None else 0
        dropped = f", [red]{lost:,} lost[/]" if lost else ", none lost"
        grid.add_row("records", f"{len(self.tail.steps):,} in the trace{dropped}")
        return grid

    def _table_text(self) -> str:
        status = self._status
        if status is None or status.table is None:
            return "none yet: the server's own fallback"
        return f"{status.table.policy}, epoch {status.table.epoch}, {status.table_age_seconds:.0f} s old"


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
        lines.append(Text.assemble(*((_BLOCKS[min(max(n, 0), 8)], _colour(k)) for n, k in cells)))
    return Text("\n").join(lines)


def _digit(steps: int | None) -> str:
    return " " if steps is None else str(steps) if steps < 10 else "+"


def _colour(steps: int | None) -> str:
    return COLOURS.get(steps, OTHER_COLOUR) if steps is not None else "default"


def _style(steps: int | None) -> str:
    return f"bold {_colour(steps)}"


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


# -- at the end --


def _print_summary(run: Run, console: Console) -> None:
    table = Table(title="by K", box=None, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("K", "steps", "share", "mean batch", "tokens per request and step", "tokens/s while at it"):
        table.add_column(name, justify="right")
    for k, steps in _by_k(run.steps).items():
        tokens = sum(map(tokens_of, steps))
        rows = sum(len(step.accepted_drafts) - step.accepted_drafts.count(MASKED) for step in steps)
        busy = sum(step.seconds - _idle_seconds(step) for step in steps)
        table.add_row(
            Text(str(k), style=_style(k)),
            f"{len(steps):,}",
            f"{100 * len(steps) / len(run.steps):.0f} %",
            f"{sum(step.batch_size for step in steps) / len(steps):.1f}",
            f"{tokens / rows:.2f}" if rows else "-",
            f"{tokens / busy:,.0f}" if busy else "-",
        )
    summary = run.summary
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column(style="dim")
    totals.add_column()
    totals.add_row("steps", f"{summary.steps:,} in {summary.seconds:.1f} s, {summary.tokens_per_second:,.0f} tokens/s")
    totals.add_row("policy", f"{run.policy}, {summary.tables_applied} table(s) applied")
    totals.add_row("switches of K", f"{summary.switches}")
    totals.add_row("records", f"{len(run.steps):,} in the trace, {run.lost:,} lost")
    for part in (totals, "", table, "", explain(run)):
        console.print(part, highlight=False)


def _by_k(steps: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    ordered = sorted(steps, key=lambda step: step.steps)
    return {k: list(group) for k, group in groupby(ordered, key=lambda step: step.steps)}


def explain(run: Run) -> str:
    """Return what happened, in a sentence."""
    by_k = _by_k(run.steps)
    if not by_k.get(0) or not by_k.get(STEPS):
        only = " and ".join(map(str, by_k))
        return f"K was {only} all the time: the load never crossed the line of {THRESHOLD} requests."
    drafting, skipping = by_k[STEPS], by_k[0]
    rows = sum(len(step.accepted_drafts) - step.accepted_drafts.count(MASKED) for step in drafting)
    gain = sum(map(tokens_of, drafting)) / rows
    lost = f"{run.lost:,} step records were lost" if run.lost else "not one step record was lost"
    most = max(step.batch_size for step in skipping)
    longer = H200_8B.decode_seconds(STEPS, most) / H200_8B.decode_seconds(0, most)
    switches = f"{run.summary.switches} switch{'es' * (run.summary.switches != 1)}"
    return (
        f"While about {THRESHOLD} requests or fewer ran, the controller let the server draft {STEPS} tokens "
        f"a step, and each request got {gain:.1f} tokens per step instead of 1; when bursts brought up to "
        f"{most} at once, where such a step takes {longer:.1f} times as long as one without drafts, it "
        f"turned speculation off: {switches} in all, and {lost}."
    )


# -- the picture --

_INK = "#222222"
_FAINT = "#6b7280"
_PHASE_TINTS = ("#eef4ee", "#f4eff7")


def draw(run: Run, path: Path) -> None:
    """Draw batch size, K and throughput over time as a PNG.

    DemoError if there is no matplotlib, or nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DemoError(_MISSING_MATPLOTLIB) from error
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
    _draw_batch(axes[0], run)
    _draw_steps(axes[1], run)
    _draw_throughput(axes[2], run)
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
    return begins + np.array([_idle_seconds(step) for step in run.steps]), ends


def _idle_seconds(step: StepRecord) -> float:
    """Seconds before ``step`` in which nothing ran, as far as a record can tell."""
    gap = step.launch_gap_seconds
    return gap if gap > IDLE_GAP_SECONDS and step.forwards <= 2 else 0.0


def _draw_batch(axis: Any, run: Run) -> None:
    begins, ends = _times(run)
    size = np.array([step.batch_size for step in run.steps])
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


def _draw_steps(axis: Any, run: Run) -> None:
    begins, ends = _times(run)
    used = sorted({step.steps for step in run.steps})
    previous: tuple[int, float] | None = None
    for k, group in groupby(range(len(run.steps)), key=lambda index: run.steps[index].steps):
        indices = list(group)
        begin, end = begins[indices[0]], ends[indices[-1]]
        if previous is not None:
            axis.plot([begin, begin], [previous[0], k], color="#9aa0aa", linewidth=0.8, zorder=2)
        axis.plot([begin, end], [k, k], color=_colour(k), linewidth=5, solid_capstyle="butt", zorder=3)
        previous = k, end
    axis.set_yticks(used)
    margin = 0.3 * max(used[-1] - used[0], 1)
    axis.set_ylim(used[0] - margin, used[-1] + margin)
    axis.set_ylabel("K\n(draft tokens)", fontsize=10, color=_INK)


def _draw_throughput(axis: Any, run: Run) -> None:
    from matplotlib.ticker import StrMethodFormatter

    _, ends = _times(run)
    emitted = np.concatenate([[0], np.cumsum([tokens_of(step) for step in run.steps])])
    grid = np.linspace(0.0, float(ends[-1]), max(2, int(ends[-1] / 0.05)))
    low = np.clip(grid - MEAN_SECONDS / 2, 0.0, None)
    high = np.clip(grid + MEAN_SECONDS / 2, None, ends[-1])
    counts = emitted[np.searchsorted(ends, high, "right")] - emitted[np.searchsorted(ends, low, "right")]
    rate = counts / (high - low)
    steps = np.array([step.steps for step in run.steps])
    in_force = steps[np.clip(np.searchsorted(ends, grid), 0, len(steps) - 1)]
    for k in np.unique(in_force):
        # One point further, so that neighbouring areas meet.
        where = np.convolve(in_force == k, [1, 1])[: len(grid)] > 0
        axis.fill_between(grid, rate, where=where, color=_colour(int(k)), alpha=0.32, linewidth=0, zorder=2)
    axis.plot(grid, rate, color=_INK, linewidth=1.4, zorder=3)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_ylim(0, None)
    axis.set_ylabel("throughput\n(tokens/s)", fontsize=10, color=_INK)


def _draw_legend(figure: Any, run: Run) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=_colour(k), label=f"K={k}: {k} drafts a step" if k else "K=0: speculation off")
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
