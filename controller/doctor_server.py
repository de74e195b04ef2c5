"""Checks of ``specpilot doctor`` on SGLang's server: what it is, or would be, started with, and its GPU memory.

Three sources, each optional: arguments after ``--`` (as they stand, nothing resolved), a running server's
``/server_info`` (what SGLang made of them), and a server's log (what SGLang and the plugin said at its start).
"""

from __future__ import annotations

import ast
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.config import ConfigError
from controller.doctor_report import Area, Check
from controller.server_arguments import candidate_steps, given, unsteerable
from sglang_hooks.contract import TESTED_VERSIONS
from sglang_hooks.settings import Settings

ARGUMENTS = Area("arguments")
RUNNING = Area("running server")
MEMORY = Area("memory")

URL_SECONDS = 10.0
"""``/server_info`` is answered by the scheduler, between two steps."""
MAX_INFO_BYTES = 16 << 20
DEFAULT_RUNNING_REQUESTS = 48
"""What SGLang takes under speculation if nobody says otherwise (its ``speculative_hook``)."""
CAPACITY_IS_DEFAULT = (
    f"--max-running-requests is not given: under speculation SGLang takes {DEFAULT_RUNNING_REQUESTS}, and further "
    "requests wait"
)
GIVE_CAPACITY = "give it, such as --max-running-requests 256 (`specpilot launch` does)"
DECODE_SKIP_BACKENDS = ("triton", "fa3", "fa4")
"""``--attention-backend`` of the classes that ``sglang_hooks.skip.ATTENTION_BACKENDS`` names."""
LOW_GIGABYTES = 1.0
"""Prefills allocate their activations from what is left on the GPU after the start."""

KINDS: dict[str, type] = {
    "model_path": str,
    "speculative_algorithm": str,
    "speculative_adaptive": bool,
    "speculative_adaptive_config": str,
    "speculative_eagle_topk": int,
    "speculative_num_steps": int,
    "speculative_num_draft_tokens": int,
    "speculative_use_rejection_sampling": bool,
    "speculative_use_block_verification": bool,
    "max_running_requests": int,
    "cuda_graph_max_bs_decode": int,
    "mem_fraction_static": float,
    "scheduler_recv_interval": int,
    "sleep_on_idle": bool,
    "enable_mixed_chunk": bool,
    "attention_backend": str,
    "prefill_attention_backend": str,
    "decode_attention_backend": str,
    "device": str,
    "page_size": int,
    "pp_size": int,
    "dp_size": int,
    "attn_dp_size": int,
    "enable_dp_attention": bool,
    "enable_multi_layer_eagle": bool,
    "enable_two_batch_overlap": bool,
    "enable_pdmux": bool,
    "enable_hisparse": bool,
    "enable_lora": bool,
}
"""What is read of a server's arguments, by the names of SGLang's ServerArgs."""


@dataclass(frozen=True)
class Server:
    """A server's arguments; ``area`` tells which of the sources they are from."""

    area: Area
    options: Mapping[str, Any]
    running: bool = False
    """``options`` are SGLang's resolved values, defaults included."""
    command: str = ""
    """Of a running server: its command line."""
    version: str = ""
    capacity: Sequence[int] = field(default=())
    """Of a running server: requests that each replica really runs at a time."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or ``default`` where it is not given or None."""
        value = self.options.get(name)
        return default if value is None else value

    @property
    def tree(self) -> bool:
        """Whether it drafts trees, which SGLang's adaptive mode does not take."""
        return bool(self.get("speculative_eagle_topk", 1) > 1)


# -- the sources --


def read_arguments(arguments: Sequence[str]) -> tuple[Server | None, list[Check]]:
    """Return the arguments as a server's, None if they cannot be read here."""
    if not arguments:
        return None, [ARGUMENTS.not_checked("none given: put SGLang's arguments after --, or name --url")]
    try:
        options = given(arguments)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            return None, [ARGUMENTS.not_checked("SGLang is not installed here, and only it can read its arguments")]
        return None, [ARGUMENTS.problem(str(error), "correct them: the server would not start")]
    return Server(ARGUMENTS, options), []


def read_running(url: str, api_key: str = "") -> tuple[Server | None, list[Check]]:
    """Return what a running server says of itself, None if it does not answer."""
    if not url:
        return None, []
    try:
        info = _fetch(url, "/server_info", api_key)
        if info is None:
            info = _fetch(url, "/get_server_info", api_key)
        if info is None:
            raise ValueError("it knows neither /server_info nor /get_server_info")
    except urllib.error.HTTPError as error:
        change = "set OPENAI_API_KEY to its --api-key" if error.code in (401, 403) else "is it an SGLang server?"
        return None, [RUNNING.problem(f"{url} answers {error.code} {error.reason}", change)]
    except (OSError, ValueError) as error:
        return None, [RUNNING.problem(f"{url} cannot be asked: {error}", "correct --url, or wait until it is ready")]
    return server_of(info), [RUNNING.ok(f"{url} answers: {info.get('model_path')}, SGLang {info.get('version')}")]


def _fetch(url: str, path: str, api_key: str) -> dict[str, Any] | None:
    """Return the JSON object at a path, None if there is no such path."""
    request = urllib.request.Request(url + path)  # noqa: S310 (the command line takes http and https only)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=URL_SECONDS) as answer:  # noqa: S310
            info = json.loads(answer.read(MAX_INFO_BYTES))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    except RecursionError as error:
        raise ValueError("its answer is nested too deeply") from error
    if not isinstance(info, dict):
        raise ValueError(f"{path} is no JSON object")
    return info


def server_of(info: Mapping[str, Any]) -> Server:
    """Return a server of what ``/server_info`` holds; values of another type than SGLang's are passed over."""
    options = {name: info[name] for name, kind in KINDS.items() if _is(info.get(name), kind)}
    states = info.get("internal_states")
    capacity = [
        state["effective_max_running_requests_per_dp"]
        for state in (states if isinstance(states, list) else [])
        if isinstance(state, dict) and _is(state.get("effective_max_running_requests_per_dp"), int)
    ]
    command, version = info.get("launch_command"), info.get("version")
    return Server(
        RUNNING,
        options,
        running=True,
        command=command if isinstance(command, str) else "",
        version=version if isinstance(version, str) else "",
        capacity=capacity,
    )


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


# -- what the arguments do --


def check_server(server: Server, settings: Settings | None) -> Iterator[Check]:
    """Check everything that the arguments alone tell."""
    if server.version and server.version not in TESTED_VERSIONS:
        yield server.area.warning(
            f"SGLang {server.version} is not a tested version", f"install one of {', '.join(TESTED_VERSIONS)}"
        )
    reasons = unsteerable(server.options)
    for reason in reasons:
        found, _, change = reason.partition("; ")
        yield server.area.problem(found, change or "choose one of them")
    if not reasons:
        yield from check_adaptive(server)
        yield from check_candidates(server, settings)
        yield from check_skip(server, settings)
    yield from check_capacity(server)
    yield from check_loop(server)


def check_adaptive(server: Server) -> Iterator[Check]:
    """Check that SGLang asks for a K at every step."""
    in_force = server.get("speculative_adaptive", False)
    asked = in_force or _names(server, "--speculative-adaptive")
    chosen = not server.running or _names(server, "--speculative-eagle-topk")
    if server.tree and (chosen or not asked):
        topk, tokens = server.get("speculative_eagle_topk"), server.get("speculative_num_draft_tokens")
        yield server.area.ok(f"a tree of drafts (topk {topk}, {tokens} tokens): K is 0 or the whole tree")
        if asked:
            yield server.area.warning("--speculative-adaptive with a tree: SGLang switches it off", "leave it out")
        return
    if in_force:
        yield server.area.ok("--speculative-adaptive is in force" if server.running else "--speculative-adaptive")
    elif asked:
        yield server.area.problem(
            "--speculative-adaptive was given, and SGLang has switched it off",
            "its log names the reason in the line `speculative_adaptive disabled`",
        )
    elif server.running:
        yield server.area.problem(
            "--speculative-adaptive is not in force: SGLang keeps one K",
            "add it; if it was given, the log names the reason in the line `speculative_adaptive disabled`",
        )
    else:
        yield server.area.warning(
            "--speculative-adaptive is not given: SGLang would keep one K, and the plugin refuses the start",
            "add it, or start with `specpilot launch`, which does",
        )
    steps, tokens = server.get("speculative_num_steps"), server.get("speculative_num_draft_tokens")
    if steps is not None and tokens is not None and tokens != steps + 1:
        yield server.area.warning(
            f"--speculative-num-draft-tokens {tokens}: SGLang silently takes {steps + 1} for a chain",
            f"give {steps + 1}, or leave it out",
        )


def _names(server: Server, option: str) -> bool:
    """Return whether a running server's command line has an option, spelt out."""
    return any(word.partition("=")[0] == option for word in server.command.split())


def check_candidates(server: Server, settings: Settings | None) -> Iterator[Check]:
    """Check the K that the server builds states for."""
    start = server.get("speculative_num_steps")
    if server.tree:
        steps = [0, start] if start is not None else []
    else:
        file = server.get("speculative_adaptive_config")
        try:
            steps = candidate_steps(Path(file)) if file else _sglangs_candidates()
        except ConfigError as error:
            if server.running:  # it may lie on another machine, or in a container
                yield server.area.not_checked(f"candidates: {file} cannot be read from here")
            else:
                yield server.area.problem(str(error), "correct it: the server would not start")
            return
        except ImportError:
            yield server.area.not_checked("candidates: SGLang's own set, which only SGLang knows; it is not here")
            return
        if 0 not in steps:
            yield server.area.problem(
                f"0 is not among the candidates {steps}: the server can never skip", f"add 0 to {file}"
            )
        elif not any(steps):
            yield server.area.problem(f"0 is the only candidate: {file}", "add a K above it")
        else:
            whose = "" if file else ", SGLang's own set: each of them takes GPU memory"
            yield server.area.ok(f"candidates {', '.join(map(str, steps))}{whose}")
        if start is not None and start not in steps:
            yield server.area.problem(
                f"--speculative-num-steps {start} is not among the candidates {steps}", "add it to them, or change it"
            )
    fallback = settings.fallback if settings is not None else None
    if fallback is not None and steps and fallback not in steps:
        yield server.area.problem(
            f"SPECPILOT_FALLBACK={fallback} is not among the candidates {steps}: the server refuses to start",
            "choose one of them",
        )


def _sglangs_candidates() -> list[int]:
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    return sorted(resolve_candidate_steps_from_config(None))


def check_skip(server: Server, settings: Settings | None) -> Iterator[Check]:
    """Check what the arguments tell of whether K=0 can be an ordinary decode step (``skip.unsupported_reason``)."""
    if settings is not None and settings.skip == "verify":
        if server.tree:
            yield server.area.problem(
                "SPECPILOT_SKIP=verify with a tree of drafts: the server refuses to start", "unset SPECPILOT_SKIP"
            )
        else:
            yield server.area.ok("K=0 is SGLang's own verify step, as SPECPILOT_SKIP asks for")
        return
    attention = server.get("attention_backend")
    backends = {server.get(name, attention) for name in ("prefill_attention_backend", "decode_attention_backend")}
    named = sorted(name for name in backends if name is not None)
    rejection = server.get("speculative_use_rejection_sampling") or server.get("speculative_use_block_verification")
    checks = (
        (server.get("device", "cuda") != "cuda", f"--device {server.get('device')} is not cuda"),
        (len(backends) > 1 and len(named) > 1, f"prefill and decode have two attention backends, {', '.join(named)}"),
        (
            any(name not in DECODE_SKIP_BACKENDS for name in named),
            f"attention backend {', '.join(named)} is not one of {', '.join(DECODE_SKIP_BACKENDS)}",
        ),
        (server.tree and server.get("page_size", 1) > 1, "a tree with --page-size above 1"),
        (server.get("pp_size", 1) > 1, "--pipeline-parallel-size is above 1"),
        (bool(rejection), "speculative rejection sampling is on"),
        (server.get("enable_lora", False), "--enable-lora is on"),
        (server.get("enable_hisparse", False), "--enable-hisparse is on"),
    )
    reasons = [reason for applies, reason in checks if applies]
    if reasons and server.tree:
        yield server.area.problem(
            f"the tree cannot be skipped by decode steps ({'; '.join(reasons)}): the server refuses to start",
            "change that, or start it without SPECPILOT_ENDPOINT",
        )
    elif reasons:
        yield server.area.warning(
            f"K=0 stays SGLang's own verify step, which is slower than not speculating: {'; '.join(reasons)}",
            "change that where you can, such as --attention-backend triton or fa3",
        )
    elif not named:
        yield server.area.not_checked(
            "K=0 as a decode step: SGLang chooses the attention backend by model and GPU; its log or --url tell"
        )
    else:
        yield server.area.ok(f"nothing in the arguments keeps K=0 from being a decode step ({', '.join(named)})")


def check_capacity(server: Server) -> Iterator[Check]:
    """Check what bounds the batch."""
    most = server.get("max_running_requests")
    asked = _names(server, "--max-running-requests")
    default = most == DEFAULT_RUNNING_REQUESTS and server.command and not asked if server.running else most is None
    if default:
        yield server.area.warning(CAPACITY_IS_DEFAULT, GIVE_CAPACITY)
    elif most is not None:
        yield server.area.ok(f"--max-running-requests {most}")
    each = most // max(1, server.get("dp_size", 1)) if most is not None else None
    if server.capacity and each is not None and (lowest := min(server.capacity)) < each:
        yield server.area.warning(
            f"SGLang runs {lowest} requests at a time, not {each}: the KV pool does not hold more",
            "raise --mem-fraction-static, or ask for fewer with --max-running-requests",
        )
    graphs = server.get("cuda_graph_max_bs_decode")
    if graphs is not None and most is not None and graphs < most:
        yield server.area.warning(
            f"CUDA graphs go up to batch size {graphs}, --max-running-requests is {most}: larger batches do without",
            f"give --cuda-graph-max-bs-decode {most}, at a cost in GPU memory for every candidate",
        )


def check_loop(server: Server) -> Iterator[Check]:
    """Check what keeps tables from being taken in, or steps from being decided by them."""
    interval = server.get("scheduler_recv_interval", 1)
    if interval > 1:
        yield server.area.warning(
            f"--scheduler-recv-interval {interval}: tables, as requests, are taken in every {interval} passes only",
            "leave it out",
        )
    if server.get("sleep_on_idle", False):
        yield server.area.warning(
            "--sleep-on-idle: an idle server takes no table in until the next request",
            "leave it out, or expect `pending` in `specpilot status` and no `specpilot compare`",
        )
    if server.get("enable_mixed_chunk", False):
        yield server.area.warning(
            "--enable-mixed-chunk: in a step mixed with a prefill every running request decodes one token, whatever "
            "the table says",
            "leave it out, unless it was measured to gain",
        )


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
_IN_PLACE = re.compile(r"specpilot: in place on rank")
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
