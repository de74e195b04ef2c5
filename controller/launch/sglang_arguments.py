"""SGLang's own arguments, read with SGLang's own parser: what was given, and what Specpilot would add and why.

Nothing is resolved: SGLang does that in its own process, with the model and the GPU at hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot.controller.errors import ConfigError

CANDIDATES = (0, 1, 2, 3, 5)
"""K that a server is started with if nobody says otherwise: each costs a set of CUDA graphs."""
START_STEPS = 3
"""K at the start, and the fallback without a controller, if nobody says otherwise."""
RUNNING_REQUESTS = 256
"""--max-running-requests that is added where none is given; SGLang alone would take 48 under speculation."""
ADAPTIVE = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms, in upper or lower case, whose K SGLang can change at run time; it takes NEXTN for EAGLE."""
ADDRESS = {"host": "127.0.0.1", "port": 30000}


@dataclass(frozen=True)
class Addition:
    """Arguments added to the server's command line, and the reason that the operator is shown."""

    arguments: tuple[str, ...]
    why: str


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what ``arguments`` set, by the names of SGLang's ServerArgs; no defaults.

    Raises ConfigError if SGLang cannot be imported here, or does not take them.
    """
    try:
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise ConfigError(
            f"SGLang cannot be imported ({error}): run this in the environment that the server runs in"
        ) from error
    parser = _Parser(prog="sglang.launch_server", add_help=False)
    ServerArgs.add_cli_args(parser)
    if "--config" in arguments:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        arguments = ConfigArgumentMerger(parser).merge_config_with_args(list(arguments))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(arguments)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"SGLang does not take these arguments: {message}")


def health_url(options: Mapping[str, Any]) -> str:
    """Return where the server will say that it is ready; a wildcard address is asked on loopback.

    >>> health_url({"host": "0.0.0.0", "port": 8000})
    'http://127.0.0.1:8000/health'
    """
    address = ADDRESS | {name: options[name] for name in ADDRESS if options.get(name) is not None}
    host = str(address["host"])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 (asked, not bound)
    scheme = "https" if options.get("ssl_certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{address['port']}/health"


def candidate_steps(file: Path) -> list[int]:
    """Return the K that a file for ``--speculative-adaptive-config`` names; ConfigError if it cannot be read.

    SGLang builds a state for each K that any of its slots names.
    """
    try:
        slots = json.loads(file.read_text())
        steps = {int(step) for slot in slots.values() for step in slot["candidate_steps"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--speculative-adaptive-config {file} cannot be used ({error}): "
            'write {"1": {"candidate_steps": [0, 1, 3]}}'
        ) from error
    return sorted(steps)


def unsteerable(options: Mapping[str, Any]) -> list[str]:
    """Return why SGLang would not let K change at run time with these arguments; each says what to change.

    SGLang only warns of these and then serves at one K (``adaptive_unsupported_reason`` in its
    ``adaptive_spec_params``).
    """
    reasons = []
    algorithm = options.get("speculative_algorithm")
    if algorithm is None:
        reasons.append(
            "no --speculative-algorithm: there is nothing to steer; give EAGLE3 or EAGLE and its "
            "--speculative-draft-model-path"
        )
    elif algorithm.upper() not in ADAPTIVE:
        reasons.append(f"--speculative-algorithm {algorithm}: K can change at run time with {', '.join(ADAPTIVE)} only")
    attention_dp = options.get("attn_dp_size")
    if options.get("enable_dp_attention") or (attention_dp is not None and attention_dp > 1):
        reasons.append("attention data parallelism: SGLang does not adapt with it; use --tp-size and --dp-size alone")
    others = ("enable_multi_layer_eagle", "enable_two_batch_overlap", "enable_pdmux")
    return reasons + [
        f"--{name.replace('_', '-')}: SGLang does not adapt with it; leave it out"
        for name in others
        if options.get(name)
    ]


def additions(options: Mapping[str, Any], candidates: Sequence[int], adaptive_config: Path) -> list[Addition]:
    """Return what makes this server steerable: arguments that are not given, each with its reason.

    ``options`` as from ``given``; ``candidates`` are written to ``adaptive_config`` by the caller.
    """
    added: list[Addition] = []
    topk = options.get("speculative_eagle_topk")
    if topk is None or topk == 1:
        known = options.get("speculative_adaptive_config")
        steps = candidate_steps(Path(known)) if known else list(candidates)
        if 0 not in steps:
            raise ConfigError(f"0 is not among the candidate steps {steps}: the server could never skip; add it")
        if not options.get("speculative_adaptive"):
            added.append(Addition(("--speculative-adaptive",), "without it SGLang keeps one K"))
        if not known:
            added.append(
                Addition(
                    ("--speculative-adaptive-config", str(adaptive_config)),
                    f"the K to build graphs for: {', '.join(map(str, steps))}",
                )
            )
        if topk is None:
            added.append(Addition(("--speculative-eagle-topk", "1"), "a chain of drafts, whose length can change"))
        start = options.get("speculative_num_steps")
        if start is None:
            start = max((step for step in steps if step <= START_STEPS), default=0) or min(
                step for step in steps if step
            )
            added.append(
                Addition(
                    ("--speculative-num-steps", str(start)),
                    "K at the start, and without a controller (or set SPECPILOT_FALLBACK)",
                )
            )
        elif start not in steps:
            raise ConfigError(
                f"--speculative-num-steps {start} is not among the candidate steps {steps}: add it to them"
            )
        if options.get("speculative_num_draft_tokens") is None:
            added.append(Addition(("--speculative-num-draft-tokens", str(start + 1)), "K+1 for a chain"))
    if options.get("max_running_requests") is None:
        added.append(
            Addition(
                ("--max-running-requests", str(RUNNING_REQUESTS)),
                "under speculation SGLang takes 48 if nobody says otherwise; lower it if the start runs out of memory",
            )
        )
    return added
