"""``specpilot compare``: arms against each other on a live server, which is not restarted.

    for each repetition, for each concurrency (a block):
        for each arm, in balanced order:
            pin the arm (``set --for``)  ──►  its table is in force  ──►  SGLang's load generator  ──►  one run

Within a block every arm gets the same requests, so arms are compared in pairs; over the blocks every arm comes at
every place, and follows every other, equally often (Williams 1949), so that what drifts or lingers falls on all alike.

The pin is renewed while a run lasts. However this ends, the server goes back to what was configured: at once where
this process can still say so, else when the pin runs out.
"""

from __future__ import annotations

import argparse
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specpilot.controller.client.arguments import add_controller, endpoint_and_keys, server_url
from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.compare.arms import default_arms, orders, values_of
from specpilot.controller.compare.load import LoadGenerator
from specpilot.controller.compare.pin import PinnedServer, replicas_of
from specpilot.controller.compare.report import draw, print_table, write_comparison
from specpilot.controller.compare.runs import CompareError, ComparisonRun
from specpilot.controller.errors import ConfigError
from specpilot.controller.processes import terminable
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.sglang_hooks.connection import KeyFiles

CONCURRENCY = (1, 2, 5, 10, 30, 70, 100, 250)
URL_SECONDS = 5.0
INTERRUPTED = 130


@dataclass(frozen=True)
class CompareRequest:
    """What is to be compared, as the command line asks for it."""

    url: str
    endpoint: str
    keys: KeyFiles
    """Keys for a tcp:// endpoint."""
    server: str
    concurrency: Sequence[int]
    arms: Sequence[str]
    """Arms by name; empty: skip, each other static K that the server declares, and goodput."""
    repetitions: int
    requests: int
    """Requests of each run; 0: REQUESTS_PER_CLIENT times the concurrency."""
    generator: str
    """Command line of the load generator; empty: GENERATOR."""
    load: Sequence[str]
    """Further arguments of the load generator."""
    json: Path | None
    png: Path | None


def compare(request: CompareRequest, console: Console) -> int:
    """Run the comparison, print its table and write what was asked for; 0, 1 for a failure, 130 if interrupted."""
    if request.png is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError("--png needs matplotlib: pip install '.[demo]' in Specpilot's checkout") from error
    if min((*request.concurrency, request.repetitions, request.requests + 1)) < 1:
        raise ConfigError("--concurrency, --repetitions and --requests: use whole numbers above 0")
    runs: list[ComparisonRun] = []
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
            write_comparison(request.json, runs, arms, server)
        if request.png is not None:
            draw(request.png, runs, arms, server)
    return code


def _find(request: CompareRequest) -> tuple[ControllerStatus, ServerStatus]:
    """Return the controller's report, and the server in it that is meant."""
    status = fetch_status(request.endpoint, keys=request.keys)
    names = sorted({server.server for server in status.servers})
    wanted = replicas_of(status, request.server) if request.server else status.servers
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
    runs: list[ComparisonRun],
    console: Console,
) -> None:
    pinned = PinnedServer(request.endpoint, request.keys, request.server or server.server.rpartition("/")[0])
    generator = LoadGenerator(request.url, request.generator, request.load, request.requests)
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
                    pinned.pin(arm)
                    started_at = time.time()
                    with pinned.renewed(arm) as failure:
                        result = generator.run(clients, repetition, failure)
                    if fetch_status(request.endpoint, keys=request.keys).pid != status.pid:
                        raise CompareError("the controller was restarted within a run, which is left out: start again")
                    run = ComparisonRun(
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
            pinned.restore()


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot compare``."""
    command.add_argument(
        "url", metavar="URL", type=server_url, help="URL of the server, such as http://127.0.0.1:30000"
    )
    command.add_argument("--server", default="", metavar="NAME", help="the server's name, if several are connected")
    command.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of concurrent requests (default: 1 2 5 10 30 70 100 250)",
    )
    command.add_argument(
        "--requests", type=int, default=0, help="requests of each run (default: 5 times N, at least 10)"
    )
    command.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="such as skip static:3 goodput configured"
    )
    command.add_argument("--repetitions", type=int, default=3, help="repetitions of everything, for the intervals")
    command.add_argument(
        "--generator",
        default="",
        metavar="COMMAND",
        help="load generator (default: python -P -m sglang.benchmark.serving)",
    )
    command.add_argument(
        "--load", default="", metavar="ARGUMENTS", help="further arguments of the load generator, in one quoted text"
    )
    command.add_argument("--json", type=Path, help="write every run, and each arm's results")
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
