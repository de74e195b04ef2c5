"""Checks of ``specpilot doctor`` on what a server's log says of its start, and on GPU memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot.controller.doctor.report import Area, Check
from specpilot.controller.doctor.server import CAPACITY_IS_DEFAULT, GIVE_CAPACITY, RUNNING, Server
from specpilot.sglang_hooks.settings import Settings

MEMORY = Area("memory")

LOW_GIGABYTES = 1.0
"""Prefills allocate their activations from what is left on the GPU after the start."""


# -- a server's log --


@dataclass
class Log:
    """What a server's log says of its newest start."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """As SGLang resolved them."""
    states: dict[int, float] = field(default_factory=dict)
    """GB taken by K, beside the K that it starts with."""
    skip_gigabytes: float | None = None
    free_gigabytes: float | None = None
    """On the rank that has least, after the start."""
    ring_gigabytes: float = 0.0
    disabled: str = ""
    skip_is_verify: str = ""
    capacity_is_default: bool = False
    in_place: bool = False
    refused: str = ""


_STATE = re.compile(r"Built adaptive runtime state steps=(\d+): elapsed=[\d.]+s, mem=(-?[\d.]+)GB")
_SKIP = re.compile(
    r"specpilot: K=0 is a plain decode step; its graphs and buffers took (-?[\d.]+) GB \((-?[\d.]+) GB left\) "
    r"and [\d.]+ s, ([\d.]+) GB of it for the newest"
)
_DISABLED = re.compile(r"speculative_adaptive disabled: (.*?)\. Falling back")
_VERIFY = re.compile(r"specpilot: K=0 stays SGLang's own verify of width 1 on this server: (.*)")
_IN_PLACE = re.compile(r"specpilot: plugin active on rank")
_REFUSED = re.compile(
    r"(?<!\S)specpilot: ((?:this server does not adapt|no GPU memory left|SGLang \S+ is not one|this SGLang is not|"
    r"capturing the decode graphs|SPECPILOT_\w+\S* |a tree of draft tokens|the tree of this server).*)"
)
_CAPACITY = re.compile(r"Max running requests is reset to \d+ for speculative decoding")
_START = re.compile(r"\bserver_args=(\{.*\})\s*$")
"""Logged when SGLang has resolved its arguments, and has said what it changed in them."""


def read_log(file: Path) -> Log:
    """Return what is known of the newest start in ``file``; OSError if it cannot be read."""
    log = said_before = Log()
    with file.open(errors="replace") as lines:
        for line in lines:
            if found := _START.search(line):
                arguments = _literal(found[1])
                log = Log(arguments, capacity_is_default=said_before.capacity_is_default)
                if not arguments.get("speculative_adaptive"):
                    log.disabled = said_before.disabled
                said_before = Log()
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


def _read_line(log: Log, line: str) -> None:
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
    elif _IN_PLACE.search(line):
        log.in_place = True
    elif found := _REFUSED.search(line):
        log.refused = found[1].strip()


def open_log(file: Path | None) -> tuple[Log | None, list[Check]]:
    """Return what a log says, None if there is none."""
    if file is None:
        return None, [MEMORY.not_checked("what each K takes: only a server's log says it; name one with --log")]
    try:
        return read_log(file), []
    except OSError as error:
        return None, [RUNNING.problem(f"{file}: {error.strerror or error}", "correct --log")]


def check_log(log: Log) -> Iterator[Check]:
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
    if log.in_place:
        yield RUNNING.ok("the plugin is in place")
    elif not (log.refused or log.disabled):
        yield RUNNING.problem(
            "the log does not say that the plugin is in place",
            "was SPECPILOT_ENDPOINT set, has it started, does it log at level INFO? See docs/operations.md",
        )
    if log.capacity_is_default:
        yield RUNNING.warning(CAPACITY_IS_DEFAULT, GIVE_CAPACITY)
    yield from check_taken(log)


def check_taken(log: Log) -> Iterator[Check]:
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


# -- the GPUs --


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU in bytes."""

    index: int
    name: str
    uuid: str
    total: int
    used: int


def read_gpus() -> list[Gpu]:
    """Return this machine's NVIDIA GPUs; ImportError without nvidia-ml-py, OSError without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = []
        for index, handle in enumerate(handles):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            found.append(Gpu(index, str(name), str(uuid), int(memory.total), int(memory.used)))
        return found
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def visible(gpus: Sequence[Gpu], devices: str | None) -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names, by index or UUID; all of them if it is not set."""
    if devices is None:
        return list(gpus)
    names = [name.strip() for name in devices.split(",") if name.strip()]
    return [gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in names)]


def check_gpus(settings: Settings | None, server: Server | None, started: bool, devices: str | None) -> Iterator[Check]:
    """Check this machine's GPUs against the ring; ``started``: a server holds its memory there already.

    ``devices``: ``CUDA_VISIBLE_DEVICES``, None if it is not set.
    """
    try:
        gpus = visible(read_gpus(), devices)
    except ImportError:
        yield MEMORY.not_checked("GPU memory: nvidia-ml-py is not installed here")
        return
    except OSError as error:
        yield MEMORY.not_checked(f"GPU memory: no NVIDIA driver answers here ({error})")
        return
    if not gpus:
        yield MEMORY.not_checked("GPU memory: no NVIDIA GPU is visible here")
    ring = settings.skip_ring_mb << 20 if settings is not None and settings.skip == "decode" else 0
    fraction = server.get("mem_fraction_static") if server is not None else None
    for gpu in gpus:
        yield judge_gpu(gpu, ring, fraction, started)


def judge_gpu(gpu: Gpu, ring: int, fraction: float | None, started: bool) -> Check:
    """Judge one GPU; ``ring`` in bytes, ``fraction`` as in --mem-fraction-static if that is known.

    SGLang gives weights and KV pool that fraction, before graphs and ring are made of the rest.
    """
    said = f"GPU {gpu.index} ({gpu.name}): {gpu.used / 1e9:.1f} of {gpu.total / 1e9:.1f} GB are used"
    free = gpu.total - gpu.used
    if started:
        if free < LOW_GIGABYTES * 1e9:
            return MEMORY.warning(
                said, "lower --mem-fraction-static, the number of candidates or SPECPILOT_SKIP_RING_MB"
            )
        return MEMORY.ok(said)
    if free < ring:
        return MEMORY.warning(
            f"{said}: less is free than SPECPILOT_SKIP_RING_MB may take ({ring / 1e9:.1f} GB)",
            "if the server is to run there, end what uses that GPU",
        )
    if fraction is not None:
        rest = gpu.total * (1 - fraction)
        said += f"; --mem-fraction-static {fraction:g} leaves {rest / 1e9:.1f} GB for graphs, activations and the ring"
        if rest < ring:
            return MEMORY.problem(said, f"lower it, or SPECPILOT_SKIP_RING_MB ({ring / 1e9:.1f} GB)")
    return MEMORY.ok(f"{said}; the ring may take {ring / 1e9:.1f} GB" if ring else said)
