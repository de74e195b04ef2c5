"""``specpilot evaluate``: what another policy would have earned, judged by the log of the one that ran."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specpilot.controller.evaluate.evaluation import EvaluateError, evaluate
from specpilot.controller.evaluate.report import EFFICIENCY, print_evaluation
from specpilot.controller.files import write_json
from specpilot.controller.replay.policies import ReplayError, split_policies


@dataclass(frozen=True)
class EvaluateRequest:
    """What is to be evaluated, as the command line asks for it."""

    traces: Sequence[Path]
    policies: Sequence[str]
    server: str | None = None
    json: Path | None = None
    replay_seconds: float = 60.0


def evaluate_command(request: EvaluateRequest, console: Console) -> int:
    """Evaluate, print and write; return the exit code: 1 where a per-step estimate was refused.

    Raises TraceError where the traces cannot be read, EvaluateError where the question makes no sense.
    """
    if not 0.0 <= request.replay_seconds < math.inf:
        raise EvaluateError("--replay-seconds must be 0 or above")
    if request.json is not None and not request.json.parent.is_dir():
        raise EvaluateError(f"{request.json}: there is no folder {request.json.parent}")
    try:
        evaluation = evaluate(request.traces, split_policies(request.policies), request.server, request.replay_seconds)
    except ReplayError as error:
        raise EvaluateError(str(error)) from error
    if request.json is not None:
        write_json(request.json, evaluation.rows)
    print_evaluation(evaluation, console)
    return int(any(row.estimate is None and row.kind == EFFICIENCY for row in evaluation.rows))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot evaluate``."""
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument(
        "--policy", action="append", required=True, help="static:K, threshold:N, batch-table:…, goodput, logged"
    )
    command.add_argument("--server", help="server whose records are used, by name or fingerprint, if there are several")
    command.add_argument(
        "--replay-seconds", type=float, default=60.0, help="seconds of virtual time to replay (0: no replay)"
    )
    command.add_argument("--json", type=Path, help="write the rows")


def run(options: argparse.Namespace, console: Console) -> int:
    """Evaluate, print and write; return the exit code."""
    request = EvaluateRequest(options.traces, options.policy, options.server, options.json, options.replay_seconds)
    return evaluate_command(request, console)
