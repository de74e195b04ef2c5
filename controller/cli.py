"""The command line: ``specpilot launch | doctor | controller | status | set | compare | trace | fit | replay | …``."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from specpilot.controller.config import CommandError, ConfigError, default_endpoint, load_config
from specpilot.controller.launch.sglang_arguments import CANDIDATES
from specpilot.sglang_hooks.connection import KeyFiles

FAILED = 1
USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong input."""
    options = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specpilot", description="Adaptive speculative decoding for SGLang.")
    parser.add_argument("--version", action="version", version=version("specpilot"))
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("controller", help="run the controller beside one or more servers")
    command.add_argument("--config", type=Path, help="TOML file (default: all defaults)")
    command.set_defaults(run=_controller)

    command = commands.add_parser("launch", help="an SGLang server with the controller beside it")
    command.add_argument("--config", type=Path, help="the controller's TOML file (default: all defaults)")
    command.add_argument(
        "--candidates", type=_candidates, default=list(CANDIDATES), help="K to choose from, such as 0,1,3 (with 0)"
    )
    command.add_argument("--dry-run", action="store_true", help="print what would be started, and why")
    command.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of SGLang's server")
    command.set_defaults(run=_launch)

    command = commands.add_parser("doctor", help="what keeps a server from being steered, and what to change")
    command.add_argument("--config", type=Path, help="the controller's TOML file (default: all defaults)")
    command.add_argument("--url", type=_url, help="of a running server, such as http://127.0.0.1:30000")
    command.add_argument("--log", type=Path, metavar="FILE", help="a server's log, for the GPU memory that it took")
    _add_controller(command)
    command.add_argument("--json", action="store_true", help="print the checks as JSON")
    command.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of SGLang's server")
    command.set_defaults(run=_doctor)

    command = commands.add_parser("status", help="what every server does now, and who decided it")
    _add_controller(command)
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_status)

    command = commands.add_parser("set", help="change policy, mode or switchback while everything runs, or show them")
    command.add_argument("values", nargs="*", metavar="KEY=VALUE", help="such as policy.max_steps=3; KEY= undoes it")
    command.add_argument("--server", default="", metavar="NAME", help="only of this one (default: of all)")
    command.add_argument("--for", dest="seconds", type=float, default=0.0, metavar="SECONDS", help="and then undo it")
    command.add_argument("--reset", action="store_true", help="first take back everything that was set")
    _add_controller(command)
    command.add_argument("--json", action="store_true", help="print what is in force as JSON")
    command.set_defaults(run=_set)

    command = commands.add_parser("keygen", help="CURVE keys for a controller on tcp://, and what to set where")
    command.add_argument("folder", type=Path, metavar="DIR", help="for the key files, new or of an earlier keygen")
    command.add_argument("--client", default="client", metavar="NAME", help="whose pair is made (default: client)")
    command.set_defaults(run=_keygen)

    trace = commands.add_parser("trace", help="look into trace logs").add_subparsers(required=True, metavar="WHAT")
    command = trace.add_parser("info", help="what a trace holds, what it lost, and whether it is whole")
    command.add_argument("paths", nargs="+", type=Path, help="trace folders or segments")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_trace_info)
    command = trace.add_parser("export", help="a trace as Parquet, CSV or JSON lines, for other programs")
    command.add_argument("paths", nargs="+", type=Path, help="trace folders or segments")
    command.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="what to write")
    command.add_argument("--format", choices=["parquet", "csv", "jsonl"], help="default: what FILE ends in")
    command.add_argument("--force", action="store_true", help="replace FILE if it is there")
    command.set_defaults(run=_trace_export)

    command = commands.add_parser("fit", help="a stored prior from traces, and how well it holds")
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument(
        "-o", dest="output", type=Path, required=True, metavar="FILE", help="of the prior; a folder: one by fingerprint"
    )
    command.add_argument("--engine", choices=["serial", "processes", "ray"], default="serial", help="what reads them")
    command.add_argument("--workers", type=int, help="that read at a time (default: one a core)")
    command.add_argument("--json", type=Path, help="write the report")
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint (default: all)")
    command.set_defaults(run=_fit)

    command = commands.add_parser("fit-neural", help="a net for the policy neural from traces; needs torch")
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="of the model")
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint, if they are of several")
    command.add_argument("--json", type=Path, help="write the report")
    command.set_defaults(run=_fit_neural)

    command = commands.add_parser("replay", help="policies against each other on a simulated server, in virtual time")
    command.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="replay a recorded trace's own load")
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint, if they are of several")
    command.add_argument(
        "--surface", help="what steps cost (default: h200-sglang, or fitted to the trace); a wrong name lists them"
    )
    command.add_argument("--arrivals", default="none", help="CSV file of requests (default: none, they are made up)")
    command.add_argument("--load", type=float, help="1, the default: what saturates the server without speculation")
    command.add_argument("--concurrency", type=int, help="a closed loop of so many requests, instead of a load")
    command.add_argument("--policies", nargs="+", required=True, metavar="POLICY", help="such as none,static:3 sglang")
    command.add_argument("--seeds", type=int, default=1, help="runs of each policy")
    command.add_argument(
        "--seconds", type=float, help="of virtual time, each run (default: 300, or the trace's length)"
    )
    command.add_argument("--workers", type=int, help="processes (default: one a core)")
    command.add_argument("--json", type=Path, help="write the figures of every run")
    command.add_argument("--report", type=Path, metavar="DIR", help="write replay.html there: tables and plots")
    command.set_defaults(run=_replay)

    command = commands.add_parser("evaluate", help="what another policy would have earned, judged by traces")
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument(
        "--policy", action="append", required=True, help="static:K, threshold:N, batch-table:…, goodput, logged"
    )
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint, if they are of several")
    command.add_argument("--replay-seconds", type=float, default=60.0, help="of virtual time (0: no replay)")
    command.add_argument("--json", type=Path, help="write the rows")
    command.set_defaults(run=_evaluate)

    command = commands.add_parser("compare", help="skip, each static K and the learned policy on a live server")
    command.add_argument("url", metavar="URL", type=_url, help="of the server, such as http://127.0.0.1:30000")
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
    _add_controller(command)
    command.set_defaults(run=_compare)

    command = commands.add_parser("demo", help="a simulated server steered by a real controller, and a picture of it")
    command.add_argument("--seconds", type=float, default=30.0)
    command.add_argument("--json", type=Path, help="write a summary for scripts")
    command.add_argument("--png", type=Path, default=Path("demo/specpilot-demo.png"))
    command.add_argument("--keep", type=Path, help="keep the trace and the logs in this folder")
    command.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="measure Specpilot itself").add_subparsers(required=True, metavar="WHAT")
    command = bench.add_parser(
        "hook", help="cost on the scheduler thread, table latency, the controller's share of a core"
    )
    command.add_argument("--json", type=Path, help="write the figures")
    command.add_argument("--steps", type=int, default=20_000, help="per batch size and controller state")
    command.add_argument(
        "--memory-steps", type=int, default=1_000_000, help="steps for the controller's memory (0: skip)"
    )
    command.set_defaults(run=_bench_hook)
    return parser


def _add_controller(command: argparse.ArgumentParser) -> None:
    """Where the controller is that a command asks, and with which keys."""
    command.add_argument(
        "--endpoint", default="", help="of the controller (default: $SPECPILOT_ENDPOINT, or its default)"
    )
    command.add_argument("--client-key", default="", help="key pair for tcp:// (default: $SPECPILOT_CLIENT_KEY)")
    command.add_argument(
        "--controller-key", default="", help="the controller's public key (default: $SPECPILOT_CONTROLLER_KEY)"
    )


def _endpoint_and_keys(options: argparse.Namespace) -> tuple[str, KeyFiles]:
    keys = KeyFiles(
        options.client_key or os.environ.get("SPECPILOT_CLIENT_KEY", ""),
        options.controller_key or os.environ.get("SPECPILOT_CONTROLLER_KEY", ""),
    )
    return options.endpoint or os.environ.get("SPECPILOT_ENDPOINT") or default_endpoint(), keys


def _controller(options: argparse.Namespace, console: Console) -> int:  # noqa: ARG001
    from specpilot.controller.serve.service import Service
    from specpilot.controller.web import Page

    config = load_config(options.config)
    # libzmq ends a process that cannot accept a connection for want of descriptors; the usual limit is 1024.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    page = Page(config.web)
    service = Service(config, file=options.config)
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    signal.signal(signal.SIGINT, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: service.reload())
    logging.getLogger(__name__).info(
        "listening; start servers with SPECPILOT_ENDPOINT=%s in their environment", service.endpoint
    )
    with page.served(service.board):
        service.run()
    return 0


def _candidates(text: str) -> list[int]:
    steps = sorted({int(part) for part in text.split(",")})
    if steps[0] != 0 or len(steps) < 2:
        raise argparse.ArgumentTypeError("give 0 and at least one K above it, none negative")
    return steps


def _launch(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.launch.command import Request, launch

    return launch(Request(options.arguments, options.config, options.candidates, options.dry_run), console)


def _doctor(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.doctor.command import Request, doctor

    _, keys = _endpoint_and_keys(options)
    request = Request(options.arguments, options.config, options.endpoint, keys, options.url or "", options.log)
    return doctor(request, os.environ, console, options.json)


def _status(options: argparse.Namespace, console: Console) -> int:
    import msgspec

    from specpilot.controller.serve.report import fetch_status, print_status

    endpoint, keys = _endpoint_and_keys(options)
    status = fetch_status(endpoint, keys=keys)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(status)).decode() + "\n")
    else:
        print_status(status, console)
    return 0


def _set(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.client.settings import set_command

    endpoint, keys = _endpoint_and_keys(options)
    return set_command(
        endpoint, keys, options.values, options.server, options.seconds, options.reset, options.json, console
    )


def _keygen(options: argparse.Namespace, console: Console) -> int:  # noqa: ARG001
    from specpilot.controller.serve.keys import describe_keys, make_keys

    sys.stdout.write(describe_keys(make_keys(options.folder, options.client), options.client))
    return 0


def _trace_info(options: argparse.Namespace, console: Console) -> int:
    import msgspec

    from specpilot.controller.trace.info import print_trace_info, trace_info

    info = trace_info(options.paths)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(info)).decode() + "\n")
    else:
        print_trace_info(info, console)
    return 0


def _trace_export(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.trace.export import export_trace
    from specpilot.controller.trace.info import print_trace_info

    info = export_trace(options.paths, options.output, options.format, options.force)
    print_trace_info(info, console)
    records = sum(server.records for server in info.values())
    console.print(f"{options.output}: {records:,} records of {len(info)} servers", highlight=False, soft_wrap=True)
    return 0


def _fit(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.fit.command import Request, fit_command

    request = Request(
        traces=options.traces,
        output=options.output,
        engine=options.engine,
        workers=options.workers,
        json=options.json,
        server=options.server,
    )
    return fit_command(request, console)


def _fit_neural(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.fit.neural import fit_neural

    return fit_neural(options.traces, options.output, options.server, options.json, console)


def _replay(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.replay.command import Request, replay

    request = Request(
        surface=options.surface,
        policies=options.policies,
        traces=options.traces,
        server=options.server,
        arrivals=None if options.arrivals == "none" else Path(options.arrivals),
        load=options.load,
        concurrency=options.concurrency,
        seeds=options.seeds,
        seconds=options.seconds,
        workers=options.workers,
        json=options.json,
        report=options.report,
    )
    return replay(request, console)


def _evaluate(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.evaluate.command import Request, evaluate_command

    request = Request(options.traces, options.policy, options.server, options.json, options.replay_seconds)
    return evaluate_command(request, console)


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("use http://HOST:PORT or https://HOST:PORT")
    return text.rstrip("/")


def _compare(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.compare.command import CONCURRENCY, Request, compare

    endpoint, keys = _endpoint_and_keys(options)
    request = Request(
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


def _demo(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.demo.command import run_demo

    return run_demo(options.seconds, options.json, options.png, options.keep, console)


def _bench_hook(options: argparse.Namespace, console: Console) -> int:
    from specpilot.controller.bench import bench_hook

    return bench_hook(options.json, options.steps, options.memory_steps, console)


if __name__ == "__main__":
    sys.exit(main())
