"""Checks of what a server's log says of its start: what SGLang and the plugin said, and the GPU memory of each K."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot.controller.doctor.gpus import LOW_GIGABYTES
from specpilot.controller.doctor.report import MEMORY, RUNNING, Check
from specpilot.controller.doctor.server_arguments import CAPACITY_IS_DEFAULT, GIVE_CAPACITY


@dataclass
class ServerLog:
    """What a server's log says of its newest start."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """The server's arguments as SGLang resolved them."""
    states: dict[int, float] = field(default_factory=dict)
    """GB taken by the state of each K, beside the K that the server starts with."""
    skip_gigabytes: float | None = None
    """GB taken by K=0 as a decode step, the ring included; None if the log does not say."""
    free_gigabytes: float | None = None
    """GB left after the start on the rank that has least; None if the log does not say."""
    ring_gigabytes: float = 0.0
    """GB taken by the ring of tokens that the draft missed."""
    disabled: str = ""
    """Why SGLang has switched --speculative-adaptive off; empty if it has not."""
    skip_is_verify: str = ""
    """Why K=0 is SGLang's own verify step; empty if it is not."""
    capacity_is_default: bool = False
    """Whether SGLang chose --max-running-requests by itself."""
    plugin_active: bool = False
    """Whether the plugin says that it is active."""
    refused: str = ""
    """Why the plugin ended the start; empty if it did not."""


_STATE = re.compile(r"Built adaptive runtime state steps=(\d+): elapsed=[\d.]+s, mem=(-?[\d.]+)GB")
_SKIP = re.compile(
    r"specpilot: K=0 is a plain decode step; its graphs and buffers took (-?[\d.]+) GB \((-?[\d.]+) GB left\) "
    r"and [\d.]+ s, ([\d.]+) GB of it for the newest"
)
_DISABLED = re.compile(r"speculative_adaptive disabled: (.*?)\. Falling back")
_VERIFY = re.compile(r"specpilot: K=0 stays SGLang's own verify of width 1 on this server: (.*)")
_ACTIVE = re.compile(r"specpilot: plugin active on rank")
_REFUSED = re.compile(
    r"(?<!\S)specpilot: ((?:this server does not adapt|no GPU memory left|SGLang \S+ is not one|this SGLang is not|"
    r"capturing the decode graphs|SPECPILOT_\w+\S* |a tree of draft tokens|the tree of this server).*)"
)
_CAPACITY = re.compile(r"Max running requests is reset to \d+ for speculative decoding")
_START = re.compile(r"\bserver_args=(\{.*\})\s*$")
"""Logged when SGLang has resolved its arguments, and has said what it changed in them."""


def read_log(file: Path) -> ServerLog:
    """Return what is known of the newest start in ``file``; OSError if it cannot be read."""
    log = said_before = ServerLog()
    with file.open(errors="replace") as lines:
        for line in lines:
            if found := _START.search(line):
                arguments = _literal(found[1])
                log = ServerLog(arguments, capacity_is_default=said_before.capacity_is_default)
                if not arguments.get("speculative_adaptive"):
                    log.disabled = said_before.disabled
                said_before = ServerLog()
            elif found := _DISABLED.search(line):
                log.disabled = said_before.disabled = found[1]
            elif _CAPACITY.search(line):
                said_before.capacity_is_default = True
            else:
                _read_line(log, line)
    return log


def _literal(text: str) -> dict[str, Any]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}  # of a value that SGLang logs in words
    return value if isinstance(value, dict) else {}


def _read_line(log: ServerLog, line: str) -> None:
    """Take in what a line says of a start that goes on."""
    if found := _STATE.search(line):
        log.states[int(found[1])] = float(found[2])
    elif found := _SKIP.search(line):
        took, left, ring = (float(text) for text in found.groups())
        log.skip_gigabytes = max(took, log.skip_gigabytes or took)
        log.free_gigabytes = min(left, log.free_gigabytes if log.free_gigabytes is not None else left)
        log.ring_gigabytes = max(ring, log.ring_gigabytes)
    elif found := _VERIFY.search(line):
        log.skip_is_verify = found[1].strip()
    elif _ACTIVE.search(line):
        log.plugin_active = True
    elif found := _REFUSED.search(line):
        log.refused = found[1].strip()


def open_log(file: Path | None) -> tuple[ServerLog | None, list[Check]]:
    """Return what a log says, None if there is none."""
    if file is None:
        return None, [MEMORY.not_checked("what each K takes: only a server's log says it; name one with --log")]
    try:
        return read_log(file), []
    except OSError as error:
        return None, [RUNNING.problem(f"{file}: {error.strerror or error}", "correct --log")]


def check_log(log: ServerLog) -> Iterator[Check]:
    """Check what SGLang and the plugin said at the start."""
    if log.refused:
        yield RUNNING.problem(
            f"the plugin ended the start: {log.refused}", "see docs/operations.md, the server refuses"
        )
    if log.disabled:
        yield RUNNING.problem(
            f"SGLang has switched --speculative-adaptive off: {log.disabled}", "change what it names, or leave it out"
        )
    if log.skip_is_verify:
        yield RUNNING.warning(
            f"K=0 stays SGLang's own verify step, which is slower than not speculating: {log.skip_is_verify}",
            "change that where you can; SPECPILOT_SKIP=verify says that it is meant so",
        )
    if log.plugin_active:
        yield RUNNING.ok("the plugin is active")
    elif not (log.refused or log.disabled):
        yield RUNNING.problem(
            "the log does not say that the plugin is active",
            "was SPECPILOT_ENDPOINT set, has it started, does it log at level INFO? See docs/operations.md",
        )
    if log.capacity_is_default:
        yield RUNNING.warning(CAPACITY_IS_DEFAULT, GIVE_CAPACITY)
    yield from check_taken(log)


def check_taken(log: ServerLog) -> Iterator[Check]:
    """Check the GPU memory that the candidates took, and which option gives most of it back."""
    states, skip = sum(log.states.values()), log.skip_gigabytes
    if not log.states and skip is None:
        yield MEMORY.not_checked("what each K takes: the log has no line that says it")
        return
    each = ", ".join(f"K={steps} {taken:.2f}" for steps, taken in sorted(log.states.items()))
    said = f"states beside the first took {states:.2f} GB ({each})" if each else "no state beside the first was built"
    if skip is None or log.free_gigabytes is None:
        yield MEMORY.ok(said)
        return
    said += f"; K=0 as a decode step {skip:.2f} GB, {log.ring_gigabytes:.2f} of it the ring; "
    said += f"{log.free_gigabytes:.2f} GB are left"
    if log.free_gigabytes >= LOW_GIGABYTES:
        yield MEMORY.ok(said)
        return
    parts = {
        "name fewer K in the file of --speculative-adaptive-config": states,
        "lower --cuda-graph-max-bs-decode": skip - log.ring_gigabytes,
        "lower SPECPILOT_SKIP_RING_MB": log.ring_gigabytes,
    }
    yield MEMORY.warning(said, f"{max(parts, key=lambda name: parts[name])}, or lower --mem-fraction-static")
