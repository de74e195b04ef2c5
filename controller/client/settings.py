"""``specpilot set``: what is in force, and changes of it while everything runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specpilot.controller.client.arguments import add_controller, endpoint_and_keys
from specpilot.controller.client.status import NO_KEYS, StatusError, ask
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.live_config import SetReport, Setting
from specpilot.sglang_hooks.connection import KeyFiles
from specpilot.sglang_hooks.wire import SetReply, SetRequest


def change_settings(endpoint: str, request: SetRequest, keys: KeyFiles = NO_KEYS) -> SetReport:
    """Have the controller make a change, and return what is in force; ConfigError if it refuses.

    StatusError if no controller answers.
    """
    reply = ask(endpoint, request, SetReply, keys=keys)
    if reply.error:
        raise ConfigError(reply.error)
    try:
        return msgspec.json.decode(reply.report, type=SetReport)
    except msgspec.DecodeError as error:
        raise StatusError(f"the controller at {endpoint} gave an answer that cannot be read: {error}") from error


def parsed(values: Sequence[str]) -> dict[str, str]:
    """Return KEY=VALUE arguments as a dictionary; ConfigError for anything else.

    >>> parsed(["mode=shadow", "policy.max_steps="])
    {'mode': 'shadow', 'policy.max_steps': ''}
    """
    values_by_key: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key or key in values_by_key:
            raise ConfigError(f"{text!r}: use KEY=VALUE, each key once, such as policy.max_steps=3")
        values_by_key[key.strip()] = value.strip()
    return values_by_key


def set_command(
    endpoint: str,
    keys: KeyFiles,
    values: Sequence[str],
    server: str,
    seconds: float,
    reset: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Change what is asked for, print what is in force, and return 0."""
    if not 0.0 <= seconds <= 86_400.0:
        raise ConfigError(f"--for {seconds:g}: use seconds above 0, at most a day (86,400)")
    if seconds and not values:
        raise ConfigError("--for: name what is to be set for that time, as KEY=VALUE")
    request = SetRequest(parsed(values), server, seconds, reset)
    report = change_settings(endpoint, request, keys)
    if as_json:
        console.print(msgspec.json.format(msgspec.json.encode(report)).decode(), markup=False, highlight=False,
                      soft_wrap=True)  # fmt: skip
        return 0
    print_settings(report, console)
    if values and not seconds:
        keep = f"write it into {report.file}" if report.file else "write it into a file for --config"
        console.print(f"until the controller restarts; {keep} to keep it", highlight=False, soft_wrap=True)
    return 0


def print_settings(report: SetReport, console: Console) -> None:
    """Write what is in force for a person: a row a key, first of all servers, then of single ones."""
    grid = Table(box=None)
    for name in ("key", "value", "from"):
        grid.add_column(name, overflow="fold")
    server = ""
    for setting in report.settings:
        if setting.server != server:
            server = setting.server
            grid.add_section()
            grid.add_row(f"[bold]{escape(server)}[/]", "", "")
        grid.add_row(escape(setting.key), escape(_text(setting.value)), escape(_origin(setting, report)))
    console.print(grid)
    if report.error:
        console.print(f"[red]{escape(report.error)}[/]")


def _text(value: object) -> str:
    return "(none)" if value is None else msgspec.json.encode(value).decode()


def _origin(setting: Setting, report: SetReport) -> str:
    if setting.origin == "file" and report.file:
        return report.file
    return f"set, for {setting.seconds:.0f} s more" if setting.seconds is not None else setting.origin


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot set``."""
    command.add_argument(
        "values", nargs="*", metavar="KEY=VALUE", help="new value, such as policy.max_steps=3; KEY= reverts it"
    )
    command.add_argument("--server", default="", metavar="NAME", help="change only this server (default: all)")
    command.add_argument(
        "--for", dest="seconds", type=float, default=0.0, metavar="SECONDS", help="revert after SECONDS"
    )
    command.add_argument("--reset", action="store_true", help="first take back everything that was set")
    add_controller(command)
    command.add_argument("--json", action="store_true", help="print what is in force as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Change what is asked for, print what is in force, and return 0."""
    endpoint, keys = endpoint_and_keys(options)
    return set_command(
        endpoint, keys, options.values, options.server, options.seconds, options.reset, options.json, console
    )
