"""The command line: each command's name, what it is for, and the module that brings its options and runs it.

A command's module has ``add_arguments(parser)`` and ``run(options, console) -> exit code``. It is imported only
when the command is named, so that ``specpilot status`` starts without numpy, and every command without torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from rich.console import Console

from specpilot.controller.errors import CommandError, ConfigError

FAILED = 1
USAGE = 2


class Command(NamedTuple):
    """One command, or a group of them."""

    name: str
    purpose: str
    module: str = ""
    """The command's module below ``specpilot.controller``; empty for a group."""
    group: tuple[Command, ...] = ()


COMMANDS = (
    Command("controller", "run the controller beside one or more servers", "run"),
    Command("launch", "an SGLang server with the controller beside it", "launch.command"),
    Command("doctor", "what keeps a server from being steered, and what to change", "doctor.command"),
    Command("status", "what every server does now, and who decided it", "client.status"),
    Command("set", "change policy, mode or switchback while everything runs, or show them", "client.settings"),
    Command("keygen", "CURVE keys for a controller on tcp://, and what to set where", "serve.keys"),
    Command(
        "trace",
        "look into trace logs",
        group=(
            Command("info", "what a trace holds, what it lost, and whether it is whole", "trace.info"),
            Command("export", "a trace as Parquet, CSV or JSON lines, for other programs", "trace.export"),
        ),
    ),
    Command("fit", "a stored prior from traces, and how well it holds", "fit.command"),
    Command("fit-neural", "a net for the policy neural from traces; needs torch", "fit.neural"),
    Command("replay", "policies against each other on a simulated server, in virtual time", "replay.command"),
    Command("evaluate", "what another policy would have earned, judged by traces", "evaluate.command"),
    Command("compare", "skip, each static K and the learned policy on a live server", "compare.command"),
    Command("demo", "a simulated server steered by a real controller, and a picture of it", "demo.command"),
    Command(
        "bench",
        "measure Specpilot itself",
        group=(
            Command("hook", "cost on the scheduler thread, table latency, the controller's share of a core", "bench"),
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong input."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parser(words).parse_args(words)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    # A pipe has no width: do not wrap what a script will read at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", "160")))
    try:
        return int(options.run(options, console))
    except ConfigError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return USAGE
    except CommandError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return FAILED


def parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser, with the options of those commands that occur among ``words`` (None: of all)."""
    whole = argparse.ArgumentParser(prog="specpilot", description="Adaptive speculative decoding for SGLang.")
    whole.add_argument("--version", action="version", version=version("specpilot"))
    whole.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    _add(whole, "COMMAND", COMMANDS, words)
    return whole


def _add(
    above: argparse.ArgumentParser, metavar: str, commands: Sequence[Command], words: Sequence[str] | None
) -> None:
    parsers = above.add_subparsers(required=True, metavar=metavar)
    for command in commands:
        own = parsers.add_parser(command.name, help=command.purpose)
        if command.group:
            _add(own, "WHAT", command.group, words)
        elif words is None or command.name in words:
            module = import_module(f"specpilot.controller.{command.module}")
            module.add_arguments(own)
            own.set_defaults(run=module.run)


if __name__ == "__main__":
    sys.exit(main())
