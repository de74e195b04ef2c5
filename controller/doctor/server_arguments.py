"""Checks of ``specpilot doctor`` on the arguments of SGLang's server.

Three sources, each optional: what follows ``--`` (as it stands, nothing resolved), and what SGLang made of it, from a
running server's ``/server_info`` or from a log (``server_log``).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot.controller.doctor.report import ARGUMENTS, RUNNING, Area, Check
from specpilot.controller.errors import ConfigError
from specpilot.controller.launch.sglang_arguments import candidate_steps, given, unsteerable
from specpilot.sglang_hooks.contract import TESTED_VERSIONS
from specpilot.sglang_hooks.settings import Settings

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
"""``--attention-backend`` of the classes that ``specpilot.sglang_hooks.skip.ATTENTION_BACKENDS`` names."""
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
class ExaminedServer:
    """A server's arguments, from one of the sources."""

    area: Area
    """Area that its checks belong to: which of the sources the arguments are from."""
    options: Mapping[str, Any]
    """Arguments by the names of SGLang's ServerArgs."""
    running: bool = False
    """Whether ``options`` are SGLang's resolved values, defaults included."""
    command: str = ""
    """Command line of a running server."""
    version: str = ""
    """SGLang's version in a running server."""
    capacity: Sequence[int] = field(default=())
    """Requests that each replica of a running server really runs at a time."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or ``default`` where it is not given or None."""
        value = self.options.get(name)
        return default if value is None else value

    @property
    def tree(self) -> bool:
        """Whether it drafts trees, which SGLang's adaptive mode does not take."""
        return bool(self.get("speculative_eagle_topk", 1) > 1)


# -- the sources --


def read_arguments(arguments: Sequence[str]) -> tuple[ExaminedServer | None, list[Check]]:
    """Return the arguments as a server's, None if they cannot be read here."""
    if not arguments:
        return None, [ARGUMENTS.not_checked("none given: put SGLang's arguments after --, or name --url")]
    try:
        options = given(arguments)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            return None, [ARGUMENTS.not_checked("SGLang is not installed here, and only it can read its arguments")]
        return None, [ARGUMENTS.problem(str(error), "correct them: the server would not start")]
    return ExaminedServer(ARGUMENTS, options), []


def read_running(url: str, api_key: str = "") -> tuple[ExaminedServer | None, list[Check]]:
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


def server_of(info: Mapping[str, Any]) -> ExaminedServer:
    """Return a server of what ``/server_info`` holds; values of another type than SGLang's are passed over."""
    options = {name: info[name] for name, kind in KINDS.items() if _is(info.get(name), kind)}
    states = info.get("internal_states")
    capacity = [
        state["effective_max_running_requests_per_dp"]
        for state in (states if isinstance(states, list) else [])
        if isinstance(state, dict) and _is(state.get("effective_max_running_requests_per_dp"), int)
    ]
    command, version = info.get("launch_command"), info.get("version")
    return ExaminedServer(
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


def check_server(server: ExaminedServer, settings: Settings | None) -> Iterator[Check]:
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


def check_adaptive(server: ExaminedServer) -> Iterator[Check]:
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


def _names(server: ExaminedServer, option: str) -> bool:
    """Return whether a running server's command line has an option, spelt out."""
    return any(word.partition("=")[0] == option for word in server.command.split())


def check_candidates(server: ExaminedServer, settings: Settings | None) -> Iterator[Check]:
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


def check_skip(server: ExaminedServer, settings: Settings | None) -> Iterator[Check]:
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


def check_capacity(server: ExaminedServer) -> Iterator[Check]:
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


def check_loop(server: ExaminedServer) -> Iterator[Check]:
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
