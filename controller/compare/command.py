"""``specpilot compare``: arms against each other on a live server, which is not restarted.

    for each repetition, for each concurrency (a block):
        for each arm, in balanced order:
            pin the arm (``set --for``)  ──►  its table is in force  ──►  SGLang's load generator  ──►  one Run

Within a block every arm gets the same requests, so arms are compared in pairs; over the blocks every arm comes at
every place, and follows every other, equally often (Williams 1949), so that what drifts or lingers falls on all alike.

The pin is renewed while a run lasts. However this ends, the server goes back to what was configured: at once where
this process can still say so, else when the pin runs out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specpilot.controller.client.arguments import add_controller, endpoint_and_keys, server_url
from specpilot.controller.client.settings import change_settings
from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.errors import ConfigError
from specpilot.controller.processes import terminable
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.sglang_hooks.connection import KeyFiles
from specpilot.sglang_hooks.wire import DecisionSource, SetRequest

logger = logging.getLogger(__name__)

CONCURRENCY = (1, 2, 5, 10, 30, 70, 100, 250)
REPETITIONS = 3
REQUESTS_PER_CLIENT = 5
LEAST_REQUESTS = 10
GENERATOR = (sys.executable, "-m", "sglang.benchmark.serving")
LOAD = (
    "--backend", "sglang", "--dataset-name", "random-ids", "--random-input-len", "512", "--random-output-len", "256",
    "--random-range-ratio", "0.5",
)  # fmt: skip
PIN_SECONDS = 60.0
"""A pin that nobody renews ends by then."""
RENEW_SECONDS = 15.0
IN_FORCE_SECONDS = 15.0
"""For a pinned table to get to the server; an idle one looks for it at its next receiving pass."""
URL_SECONDS = 5.0
LOG_LINES = 15
INTERRUPTED = 130


class CompareError(RuntimeError):
    """A comparison that cannot be made, or go on; the text says why and what to do."""


@dataclass(frozen=True)
class CompareRequest:
    """What the command was given."""

    url: str
    endpoint: str
    keys: KeyFiles
    """For a tcp:// endpoint."""
    server: str
    concurrency: Sequence[int]
    arms: Sequence[str]
    """Empty: skip, each other static K that the server declares, and goodput."""
    repetitions: int
    requests: int
    """Of each run; 0: REQUESTS_PER_CLIENT times the concurrency."""
    generator: str
    """Command line; empty: GENERATOR."""
    load: Sequence[str]
    """Further arguments of the load generator."""
    json: Path | None
    png: Path | None


class Run(msgspec.Struct, frozen=True):
    """One run of the load generator; time in seconds."""

    repetition: int
    concurrency: int
    arm: str
    place: int
    """In its block's order, from 0."""
    requests: int
    tokens_per_second: float
    """Output tokens of all requests over the run's time."""
    time_per_output_token: float
    """Mean over requests, without their first token."""
    time_to_first_token: float
    seconds: float
    started_at: float
    """Since the Unix epoch."""


class _Result(msgspec.Struct):
    """What is read of the load generator's own report."""

    completed: int
    output_throughput: float
    mean_tpot_ms: float
    mean_ttft_ms: float
    duration: float


def values_of(arm: str) -> dict[str, str]:
    """Return what ``specpilot set`` must be told for an arm; ConfigError for an unknown one.

    >>> values_of("static:3")["policy.steps"], values_of("threshold:8")["policy.threshold"]
    ('3', '8')
    >>> values_of("configured")
    {'switchback.share': '0'}
    """
    name, _, argument = arm.partition(":")
    values = {"switchback.share": "0"}
    if arm == "configured":
        return values
    values["mode"] = "control"
    if arm == "skip" or (name == "static" and argument.isdecimal()):
        return {**values, "policy.name": "static", "policy.steps": "0" if arm == "skip" else argument}
    if name == "threshold" and argument.isdecimal():
        return {**values, "policy.name": "threshold", "policy.threshold": argument}
    if arm == "goodput":
        return {**values, "policy.name": "goodput"}
    raise ConfigError(f"arm {arm!r}: use skip, static:K, threshold:N, goodput or configured")


def orders(arms: Sequence[str]) -> list[list[str]]:
    """Return a Williams design: in its rows each arm is once at each place, and follows each other equally often.

    An even number of arms takes as many rows, an odd one twice as many.

    >>> orders(["a", "b", "c", "d"])
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]
    """
    count = len(arms)
    first = [0, *((i + 1) // 2 if i % 2 else count - i // 2 for i in range(1, count))]
    rows = [[arms[(place + row) % count] for place in first] for row in range(count)]
    return rows if count % 2 == 0 else [*rows, *(row[::-1] for row in rows)]


def compare(request: CompareRequest, console: Console) -> int:
    """Run the comparison, print its table and write what was asked for; 0, 1 for a failure, 130 if interrupted."""
    from specpilot.controller.compare.report import draw, print_table, write_json

    if request.png is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError("--png needs matplotlib: pip install '.[demo]' in Specpilot's checkout") from error
    if min((*request.concurrency, request.repetitions, request.requests + 1)) < 1:
        raise ConfigError("--concurrency, --repetitions and --requests: use whole numbers above 0")
    runs: list[Run] = []
    code = 0
    try:
        with terminable():
            status, server = _find(request)
            arms = list(dict.fromkeys(request.arms)) or default_arms(server)
            for arm in arms:
                values_of(arm)
            _check_url(request.url)
            _run_all(request, status, server, arms, runs, console)
    except KeyboardInterrupt:
        console.print("interrupted; the server is back at what was configured", style="yellow")
        code = INTERRUPTED
    except (CompareError, StatusError) as error:
        console.print(f"[red]specpilot: {error}[/]", highlight=False, soft_wrap=True)
        code = 1
    if runs:
        print_table(runs, arms, console)
        if request.json is not None:
            write_json(request.json, runs, arms, server)
        if request.png is not None:
            draw(request.png, runs, arms, server)
    return code


def default_arms(server: ServerStatus) -> list[str]:
    """Return every K that the server declares, and the learned policy."""
    return [*("skip" if k == 0 else f"static:{k}" for k in sorted(server.candidate_steps)), "goodput"]


def _find(request: CompareRequest) -> tuple[ControllerStatus, ServerStatus]:
    """Return the controller's report, and the server in it that is meant."""
    status = fetch_status(request.endpoint, keys=request.keys)
    names = sorted({one.server for one in status.servers})
    wanted = [one for one in status.servers if request.server in (one.server, one.server.rpartition("/")[0], "")]
    if not wanted or (not request.server and len({name.rpartition("/")[0] for name in names}) > 1):
        raise CompareError(f"which server? Give --server, one of: {', '.join(names) or 'none is connected'}")
    return status, wanted[0]


def _check_url(url: str) -> None:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=URL_SECONDS):  # noqa: S310 - checked by the parser
            pass
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CompareError(f"the server does not answer at {url}/health: {error}") from error


def _run_all(
    request: CompareRequest,
    status: ControllerStatus,
    server: ServerStatus,
    arms: list[str],
    runs: list[Run],
    console: Console,
) -> None:
    name = request.server or server.server.rpartition("/")[0]
    design = orders(arms)
    # The next row with each repetition, so that an arm's place changes at each concurrency, too.
    blocks = [
        (repetition, clients, design[(repetition + index) % len(design)])
        for repetition in range(request.repetitions)
        for index, clients in enumerate(request.concurrency)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compare", total=len(blocks) * len(arms))
        try:
            for repetition, clients, order in blocks:
                for place, arm in enumerate(order):
                    progress.update(task, description=f"{clients} clients, {arm}")
                    pin = SetRequest(values_of(arm), name, PIN_SECONDS)
                    _pin(request, pin, arm)
                    started_at = time.time()
                    with _renewed(request, pin) as failure:
                        result = _generate(request, clients, repetition, failure)
                    if fetch_status(request.endpoint, keys=request.keys).pid != status.pid:
                        raise CompareError("the controller was restarted within a run, which is left out: start again")
                    run = Run(
                        repetition=repetition,
                        concurrency=clients,
                        arm=arm,
                        place=place,
                        requests=result.completed,
                        tokens_per_second=result.output_throughput,
                        time_per_output_token=result.mean_tpot_ms / 1e3,
                        time_to_first_token=result.mean_ttft_ms / 1e3,
                        seconds=result.duration,
                        started_at=started_at,
                    )
                    runs.append(run)
                    progress.advance(task)
                    if not console.is_terminal:
                        text = f"{len(runs)} of {len(blocks) * len(arms)}: {clients} clients, {arm}: "
                        console.print(f"{text}{run.tokens_per_second:,.0f} tokens/s", highlight=False)
        finally:
            _restore(request, name)


# -- the pin --


def _pin(request: CompareRequest, pin: SetRequest, arm: str) -> None:
    """Put an arm in force, and wait until the server (all its replicas) says that its table is."""
    try:
        change_settings(request.endpoint, pin, request.keys)
    except ConfigError as error:
        raise CompareError(f"arm {arm} cannot be put in force: {error}") from error
    deadline = time.monotonic() + IN_FORCE_SECONDS
    while True:
        status = fetch_status(request.endpoint, keys=request.keys)
        servers = [one for one in status.servers if pin.server in (one.server, one.server.rpartition("/")[0])]
        waiting = [one for one in servers if one.pending_epoch or one.source != DecisionSource.TABLE.name]
        if servers and not waiting:
            break
        if time.monotonic() > deadline:
            notes = "; ".join(filter(None, (one.note for one in waiting))) or "see `specpilot status`"
            raise CompareError(f"arm {arm} did not come in force at {pin.server} in {IN_FORCE_SECONDS:g} s: {notes}")
        time.sleep(0.1)
    if arm != "configured" and any(one.mode == "shadow" for one in servers):
        raise CompareError(f"{pin.server} was started with SPECPILOT_MODE=shadow and applies nothing: restart it")


@contextmanager
def _renewed(request: CompareRequest, pin: SetRequest) -> Iterator[Callable[[], str]]:
    """Renew a pin until the block ends; what is yielded tells why that failed, if it did."""
    ended = threading.Event()
    failures: list[str] = []

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                change_settings(request.endpoint, pin, request.keys)
            except (StatusError, ConfigError) as error:
                failures.append(str(error))
                return

    thread = threading.Thread(target=renew, name="specpilot-pin", daemon=True)
    thread.start()
    try:
        yield lambda: "; ".join(failures)
    finally:
        ended.set()
        thread.join()


def _restore(request: CompareRequest, server: str) -> None:
    try:
        change_settings(request.endpoint, SetRequest({}, server, seconds=1.0, reset=True), request.keys)
    except (StatusError, ConfigError) as error:
        logger.warning(
            "%s; what was set for the comparison ends with the controller, or by itself within %.0f s",
            error,
            PIN_SECONDS,
        )


# -- the load --


def _generate(request: CompareRequest, clients: int, repetition: int, failure: Callable[[], str]) -> _Result:
    """Run the load generator once; CompareError if it, a request or the controller fails."""
    count = request.requests or max(REQUESTS_PER_CLIENT * clients, LEAST_REQUESTS)
    with tempfile.TemporaryDirectory(prefix="specpilot-compare-") as folder:
        output, log = Path(folder) / "result.jsonl", Path(folder) / "log"
        command = [
            *(shlex.split(request.generator) or GENERATOR), *LOAD,
            "--base-url", request.url, "--num-prompts", str(count), "--max-concurrency", str(clients),
            # The same requests for each arm, and none of them in the prefix cache.
            "--seed", str(1 + repetition), "--flush-cache", "--disable-tqdm", *request.load,
            "--output-file", str(output),
        ]  # fmt: skip
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)  # noqa: S603
        try:
            while process.poll() is None:
                if failure():
                    raise CompareError(f"the run was ended: {failure()}")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode or not output.exists():
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            text = "\n  ".join(lines)
            raise CompareError(f"the load generator failed ({shlex.join(command)}); its last lines:\n  {text}")
        try:
            # Python's own reader: the report may hold Infinity, which JSON does not know.
            result = msgspec.convert(json.loads(output.read_bytes().splitlines()[-1]), _Result)
        except (ValueError, IndexError) as error:
            raise CompareError(f"the load generator's report cannot be read: {error}") from error
    if result.completed < count:
        raise CompareError(
            f"{count - result.completed} of {count} requests failed at {clients} clients: see the server"
        )
    return result


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot compare``."""
    command.add_argument("url", metavar="URL", type=server_url, help="of the server, such as http://127.0.0.1:30000")
    command.add_argument("--server", default="", metavar="NAME", help="its name here, if several are connected")
    command.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="(default: 1 2 5 10 30 70 100 250)")
    command.add_argument("--requests", type=int, default=0, help="of each run (default: 5 times N, at least 10)")
    command.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="such as skip static:3 goodput configured"
    )
    command.add_argument("--repetitions", type=int, default=3, help="of everything, for the intervals")
    command.add_argument(
        "--generator", default="", metavar="COMMAND", help="(default: python -m sglang.benchmark.serving)"
    )
    command.add_argument("--load", default="", metavar="ARGUMENTS", help="more of the generator's, in one quoted text")
    command.add_argument("--json", type=Path, help="write every run and what comes of them")
    command.add_argument("--png", type=Path, help="write a plot; needs matplotlib")
    add_controller(command)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the comparison; return 0, 1 for a failure, 130 if interrupted."""
    endpoint, keys = endpoint_and_keys(options)
    request = CompareRequest(
        url=options.url,
        endpoint=endpoint,
        keys=keys,
        server=options.server,
        concurrency=options.concurrency or CONCURRENCY,
        arms=options.arms,
        repetitions=options.repetitions,
        requests=options.requests,
        generator=options.generator,
        load=shlex.split(options.load),
        json=options.json,
        png=options.png,
    )
    return compare(request, console)
