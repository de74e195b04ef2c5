"""``specpilot launch -- ARGUMENTS``: an SGLang server and the controller beside it, as one foreground process.

Signals go on to the server, whose exit code is the command's. A controller that ends is started
again: the server goes on meanwhile, as it always does without one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.config import default_endpoint, load_config, runtime_directory
from specpilot.controller.errors import ConfigError
from specpilot.controller.launch.sglang_arguments import CANDIDATES, Addition, additions, given, health_url, unsteerable
from specpilot.controller.processes import await_controller, end, python_module, specpilot_command
from specpilot.sglang_hooks.connection import KeyFiles, is_tcp, socket_path
from specpilot.sglang_hooks.settings import Settings, SettingsError

SERVER = tuple(python_module("sglang.launch_server"))
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LOOK_SECONDS = 0.2
ASK_SECONDS = 1.0
SAY_SECONDS = (10.0, 30.0)
"""Seconds between two progress lines: in the first minutes, and later."""
CONTROLLER_START_SECONDS = 10.0
RESTART_SECONDS = (1.0, 60.0)
"""Seconds before the controller is started again: the first time, and at most."""
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class LaunchRequest:
    """What the command line asks for."""

    arguments: list[str]
    """Arguments of SGLang's server."""
    config: Path | None = None
    candidates: Sequence[int] = ()
    dry_run: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """What would be started, before anything is."""

    command: list[str]
    """Command line of the server."""
    added: list[Addition]
    """Arguments that were added to it, with reasons."""
    environment: dict[str, str]
    """Environment of the server."""
    endpoint: str
    keys: KeyFiles
    candidates: list[int]
    adaptive_config: Path
    """File that the candidates are written to, if the command line names it."""
    health: str
    """URL at which the server says that it is ready."""
    first_node: bool
    """Whether this is the node of rank 0, beside which the controller runs."""


def plan(request: LaunchRequest, environment: Mapping[str, str]) -> LaunchPlan:
    """Decide on arguments and environment; ConfigError where the server could not be steered."""
    config = load_config(request.config)
    options = given(request.arguments)
    if reasons := unsteerable(options):
        raise ConfigError("this server could not be steered:\n  " + "\n  ".join(reasons))
    endpoint = environment.get("SPECPILOT_ENDPOINT") or config.controller.endpoint or default_endpoint()
    environment = {**environment, "SPECPILOT_ENDPOINT": endpoint}
    try:
        settings = Settings.from_environment(environment)
    except SettingsError as error:
        raise ConfigError(str(error)) from error
    health = health_url(options)
    port = options.get("port", 30000)
    folder = runtime_directory() if is_tcp(endpoint) else socket_path(endpoint).parent
    adaptive_config = folder / f"adaptive-{port}.json"
    added = additions(options, request.candidates, adaptive_config)
    command = [*SERVER, *request.arguments, *(argument for item in added for argument in item.arguments)]
    return LaunchPlan(
        command=command,
        added=added,
        environment=dict(environment),
        endpoint=endpoint,
        keys=settings.key_files,
        candidates=list(request.candidates),
        adaptive_config=adaptive_config,
        health=health,
        first_node=not options.get("node_rank"),
    )


def launch(request: LaunchRequest, console: Console) -> int:
    """Run until the server ends; return its exit code."""
    planned = plan(request, os.environ)
    for item in planned.added:
        console.print(f"specpilot: adds {shlex.join(item.arguments)}: {item.why}", highlight=False, soft_wrap=True)
    if request.dry_run:
        console.print(
            f"SPECPILOT_ENDPOINT={planned.endpoint} {shlex.join(planned.command)}", highlight=False, soft_wrap=True
        )
        return 0
    return Supervisor(planned, request.config, console).run()


class Supervisor:
    """Starts server and controller, starts the controller again when it ends, and ends both with the server."""

    def __init__(self, planned: LaunchPlan, config: Path | None, console: Console) -> None:
        self._plan = planned
        self._config = config
        self._console = console
        self._server: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._own_controller = False
        self._restart_seconds = RESTART_SECONDS[0]
        self._restart_at = 0.0
        self._pending: list[int] = []

    def run(self) -> int:
        """Start both, watch them, end both."""
        # What arrives before the server runs is kept for it.
        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        try:
            if self._plan.first_node:
                self._start_controller()
            self._write_candidates()
            # A session of its own: a terminal's Ctrl-C reaches it once, through us.
            self._server = subprocess.Popen(  # noqa: S603 (the operator's own command)
                self._plan.command, env=self._plan.environment, start_new_session=True
            )
            for number in self._pending:
                self._server.send_signal(number)
            return self._watch(self._server)
        finally:
            for process in (self._server, self._controller):
                if process is not None:
                    end(process, STOP_SECONDS)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: Any) -> None:  # noqa: ARG002
        if self._server is None:
            self._pending.append(number)
        elif self._server.poll() is None:
            self._server.send_signal(number)

    def _say(self, text: str) -> None:
        self._console.print(f"specpilot: {text}", highlight=False, soft_wrap=True)

    # -- the controller --

    def _start_controller(self) -> None:
        """Start one, unless one answers at the endpoint; ConfigError if it ends at once."""
        try:
            running = fetch_status(self._plan.endpoint, keys=self._plan.keys)
        except StatusError:
            pass
        else:
            self._say(f"the controller with pid {running.pid} serves {self._plan.endpoint} already, and is used")
            return
        self._own_controller = True
        started = self._spawn_controller()
        if await_controller(self._plan.endpoint, started, CONTROLLER_START_SECONDS, self._plan.keys) is not None:
            return
        if (code := started.poll()) is not None:
            raise ConfigError(f"the controller ended with code {code}; what it said is above")
        self._say(f"the controller does not answer after {CONTROLLER_START_SECONDS:.0f} s; the server starts without")

    def _spawn_controller(self) -> subprocess.Popen[bytes]:
        config = ["--config", str(self._config)] if self._config else []
        command = specpilot_command("controller", *config)
        self._controller = subprocess.Popen(command, start_new_session=True)  # noqa: S603
        return self._controller

    def _tend_controller(self, now: float) -> None:
        if not self._own_controller or self._controller is None:
            return
        code = self._controller.poll()
        if code is None:
            return
        if not self._restart_at:
            self._restart_at = now + self._restart_seconds
            self._say(f"the controller ended with code {code}; it is started again in {self._restart_seconds:.0f} s")
            self._restart_seconds = min(2 * self._restart_seconds, RESTART_SECONDS[1])
        elif now >= self._restart_at:
            self._restart_at = 0.0
            self._spawn_controller()

    # -- the server --

    def _write_candidates(self) -> None:
        file = self._plan.adaptive_config
        if str(file) not in self._plan.command:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_text(json.dumps({"1": {"candidate_steps": self._plan.candidates}}) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written ({error.strerror}): give --speculative-adaptive-config yourself"
            ) from error

    def _watch(self, server: subprocess.Popen[bytes]) -> int:
        begun = time.monotonic()
        said = asked = begun
        ready = False
        while (code := server.poll()) is None:
            now = time.monotonic()
            self._tend_controller(now)
            if not ready and now - asked >= ASK_SECONDS:
                asked = now
                ready = _healthy(self._plan.health)
                if ready:
                    self._say(f"ready after {now - begun:.0f} s: {self._plan.health.removesuffix('/health')}; "
                              "`specpilot status` shows what is decided and why")  # fmt: skip
                elif now - said >= SAY_SECONDS[now - begun > 180]:
                    said = now
                    self._say(
                        f"{now - begun:.0f} s: waiting for {self._plan.health} (the server's pid is {server.pid})"
                    )
            time.sleep(LOOK_SECONDS)
        if not ready:
            self._say(f"the server ended with code {code} before it was ready; what it said is above")
        return code if code >= 0 else 128 - code


def _healthy(url: str) -> bool:
    # A certificate for the public name is not one for loopback; nothing secret is sent.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot launch``."""
    command.add_argument("--config", type=Path, help="the controller's TOML file (default: all defaults)")
    command.add_argument(
        "--candidates", type=_candidates, default=list(CANDIDATES), help="K to choose from, such as 0,1,3 (with 0)"
    )
    command.add_argument("--dry-run", action="store_true", help="print what would be started, and why")
    command.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of SGLang's server")


def run(options: argparse.Namespace, console: Console) -> int:
    """Start the server and its controller; return the server's exit code."""
    return launch(LaunchRequest(options.arguments, options.config, options.candidates, options.dry_run), console)


def _candidates(text: str) -> list[int]:
    steps = sorted({int(part) for part in text.split(",")})
    if steps[0] != 0 or len(steps) < 2:
        raise argparse.ArgumentTypeError("give 0 and at least one K above it, none negative")
    return steps
