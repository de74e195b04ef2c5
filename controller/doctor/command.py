"""``specpilot doctor``: what would keep a server from being steered, or makes it smaller than it need be.

It looks and changes nothing: no file, folder or socket is made, and no server is asked to do anything.

    installation         versions, and whether SGLang finds the plugin
    configuration        SPECPILOT_ variables, the controller's file, the folders of trace and prior
    endpoint             the socket's folder, or the keys
    running_controller   what a controller says of itself and its servers
    server_arguments     SGLang's arguments, as given and as a running server has them
    server_log, gpus     what a server's log says of its start; GPU memory
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specpilot.controller.client.arguments import add_controller, endpoint_and_keys, server_url
from specpilot.controller.client.status import NO_KEYS
from specpilot.controller.doctor.configuration import check_configuration, check_settings, check_storage
from specpilot.controller.doctor.endpoint import address, check_socket
from specpilot.controller.doctor.gpus import check_gpus
from specpilot.controller.doctor.installation import check_versions
from specpilot.controller.doctor.report import RUNNING, Check, print_checks, problems
from specpilot.controller.doctor.running_controller import check_controller
from specpilot.controller.doctor.server_arguments import (
    ExaminedServer,
    check_server,
    read_arguments,
    read_running,
    server_of,
)
from specpilot.controller.doctor.server_log import check_log, open_log
from specpilot.controller.files import json_text
from specpilot.controller.serve.report import ControllerStatus
from specpilot.sglang_hooks.connection import KeyFiles


@dataclass(frozen=True)
class DoctorRequest:
    """What the command line asks for."""

    arguments: Sequence[str] = ()
    config: Path | None = None
    endpoint: str = ""
    keys: KeyFiles = NO_KEYS
    url: str = ""
    log: Path | None = None


def examine(request: DoctorRequest, environment: Mapping[str, str]) -> list[Check]:
    """Return every check, grouped by area."""
    settings, of_settings = check_settings(environment)
    config, of_config = check_configuration(request.config)
    at = address(request.endpoint, request.keys, environment, config)
    status, of_controller = check_controller(at)
    given, of_arguments = read_arguments(request.arguments)
    running, of_running = read_running(request.url, environment.get("OPENAI_API_KEY", ""))
    log, of_log = open_log(request.log)
    started = running or (server_of(log.arguments) if log is not None and log.arguments else None)
    return [
        *check_versions(environment),
        *of_settings,
        *of_config,
        *check_socket(at, config),
        *of_controller,
        *(check_storage(config) if config is not None else ()),
        *(of_arguments if request.arguments or not request.url else ()),
        *(check_server(given, settings) if given is not None else ()),
        *of_running,
        *(check_server(started, settings) if started is not None else ()),
        *check_connected(running, status),
        *of_log,
        *(check_log(log) if log is not None else ()),
        *check_gpus(settings, started or given, running is not None, environment.get("CUDA_VISIBLE_DEVICES")),
    ]


def check_connected(running: ExaminedServer | None, status: ControllerStatus | None) -> list[Check]:
    """Check that a running server is among those of the controller, by its model: its name may be any."""
    if running is None or status is None:
        return []
    model = running.get("model_path")
    if any(server.model == model for server in status.servers):
        return [RUNNING.ok(f"a server of {model} is connected to the controller")]
    return [
        RUNNING.problem(
            f"no server of {model} is connected to the controller",
            "was it started with this SPECPILOT_ENDPOINT, and did SGLang run the plugin? Its log tells: --log",
        )
    ]


def doctor(request: DoctorRequest, environment: Mapping[str, str], console: Console, as_json: bool = False) -> int:
    """Print every check; return 1 if there is a problem, else 0."""
    checks = examine(request, environment)
    if as_json:
        console.file.write(json_text(checks).decode())
    else:
        print_checks(checks, console)
    return int(problems(checks))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot doctor``."""
    command.add_argument("--config", type=Path, help="the controller's TOML file (default: all defaults)")
    command.add_argument("--url", type=server_url, help="URL of a running server, such as http://127.0.0.1:30000")
    command.add_argument("--log", type=Path, metavar="FILE", help="a server's log, for the GPU memory that it took")
    add_controller(command)
    command.add_argument("--json", action="store_true", help="print the checks as JSON")
    command.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of SGLang's server")


def run(options: argparse.Namespace, console: Console) -> int:
    """Print every check; return 1 if there is a problem, else 0."""
    _, keys = endpoint_and_keys(options)
    request = DoctorRequest(options.arguments, options.config, options.endpoint, keys, options.url or "", options.log)
    return doctor(request, os.environ, console, options.json)
