"""The command line: ``specpilot controller | status | trace info | replay | demo | bench hook``."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from controller.config import ConfigError, default_endpoint, load_config

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specpilot", description="Adaptive speculative decoding for SGLang.")
    parser.add_argument("--version", action="version", version=version("specpilot"))
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("controller", help="run the controller beside one or more servers")
    command.add_argument("--config", type=Path, help="TOML file (default: all defaults)")
    command.set_defaults(run=_controller)

    command = commands.add_parser("status", help="what every server does now, and who decided it")
    command.add_argument(
        "--endpoint", default="", help="of the controller (default: $SPECPILOT_ENDPOINT, or its default)"
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_status)

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


def _controller(options: argparse.Namespace, console: Console) -> int:  # noqa: ARG001
    from controller.service import Service

    config = load_config(options.config)
    # libzmq ends a process that cannot accept a connection for want of descriptors; the usual limit is 1024.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    service = Service(config)
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    signal.signal(signal.SIGINT, lambda *_: service.stop())
    logging.getLogger(__name__).info(
        "listening; start servers with SPECPILOT_ENDPOINT=%s in their environment", service.endpoint
    )
    service.run()
    return 0


def _status(options: argparse.Namespace, console: Console) -> int:
    import msgspec

    from controller.status import StatusError, fetch_status, print_status

    endpoint = options.endpoint or os.environ.get("SPECPILOT_ENDPOINT") or default_endpoint()
    try:
        status = fetch_status(endpoint)
    except StatusError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return FAILED
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(status)).decode() + "\n")
    else:
        print_status(status, console)
    return 0


def _trace_info(options: argparse.Namespace, console: Console) -> int:
    import msgspec

    from controller.trace_info import print_trace_info, trace_info
    from controller.trace_reader import TraceError

    try:
        info = trace_info(options.paths)
    except TraceError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return FAILED
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(info)).decode() + "\n")
    else:
        print_trace_info(info, console)
    return 0


def _trace_export(options: argparse.Namespace, console: Console) -> int:
    from controller.trace_export import ExportError, export_trace
    from controller.trace_info import print_trace_info
    from controller.trace_reader import TraceError

    try:
        info = export_trace(options.paths, options.output, options.format, options.force)
    except (ExportError, TraceError) as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return FAILED
    print_trace_info(info, console)
    records = sum(server.records for server in info.values())
    console.print(f"{options.output}: {records:,} records of {len(info)} servers", highlight=False, soft_wrap=True)
    return 0


def _fit(options: argparse.Namespace, console: Console) -> int:
    from controller.fit import Request, fit_command
    from controller.trace_reader import TraceError

    request = Request(
        traces=options.traces,
        output=options.output,
        engine=options.engine,
        workers=options.workers,
        json=options.json,
        server=options.server,
    )
    try:
        return fit_command(request, console)
    except TraceError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return FAILED


def _fit_neural(options: argparse.Namespace, console: Console) -> int:
    from controller.neural_fit import fit_neural

    return fit_neural(options.traces, options.output, options.server, options.json, console)


def _replay(options: argparse.Namespace, console: Console) -> int:
    from controller.replay_command import Request, replay

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
    from controller.evaluate import Request, evaluate_command

    request = Request(options.traces, options.policy, options.server, options.json, options.replay_seconds)
    return evaluate_command(request, console)


def _demo(options: argparse.Namespace, console: Console) -> int:
    from controller.demo import run_demo

    return run_demo(options.seconds, options.json, options.png, options.keep, console)


def _bench_hook(options: argparse.Namespace, console: Console) -> int:
    from controller.bench import bench_hook

    return bench_hook(options.json, options.steps, options.memory_steps, console)


if __name__ == "__main__":
    sys.exit(main())
