"""The load of a run: SGLang's load generator, started once, and what it reports."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specpilot.controller.compare.runs import CompareError
from specpilot.controller.processes import interrupts_held, kill_session, last_lines, python_module, start_logged

REQUESTS_PER_CLIENT = 5
LEAST_REQUESTS = 10
GENERATOR = tuple(python_module("sglang.benchmark.serving"))
LOAD = (
    "--backend", "sglang", "--dataset-name", "random-ids", "--random-input-len", "512", "--random-output-len", "256",
    "--random-range-ratio", "0.5",
)  # fmt: skip


class LoadResult(msgspec.Struct):
    """What is read of the load generator's own report."""

    completed: int
    output_throughput: float
    mean_tpot_ms: float
    mean_ttft_ms: float
    duration: float


@dataclass(frozen=True)
class LoadGenerator:
    """How each run of a comparison loads the server."""

    url: str
    command: str
    """Command line; empty: GENERATOR."""
    arguments: Sequence[str]
    """Further arguments."""
    requests: int
    """Requests of each run; 0: REQUESTS_PER_CLIENT times the concurrency."""

    def run(self, clients: int, repetition: int, failure: Callable[[], str]) -> LoadResult:
        """Load the server with ``clients`` requests at a time, and return what was measured.

        Raises CompareError if the generator or a request fails, or as soon as ``failure`` returns a text.
        """
        count = self.requests or max(REQUESTS_PER_CLIENT * clients, LEAST_REQUESTS)
        with tempfile.TemporaryDirectory(prefix="specpilot-compare-") as folder:
            output, log = Path(folder) / "result.jsonl", Path(folder) / "log"
            command = [
                *(shlex.split(self.command) or GENERATOR), *LOAD,
                "--base-url", self.url, "--num-prompts", str(count), "--max-concurrency", str(clients),
                # The same requests for each arm, and none of them in the prefix cache.
                "--seed", str(1 + repetition), "--flush-cache", "--disable-tqdm", *self.arguments,
                "--output-file", str(output),
            ]  # fmt: skip
            with ExitStack() as ending:
                with interrupts_held():
                    process = start_logged(command, log)
                    ending.callback(kill_session, process)
                while process.poll() is None:
                    if failure():
                        raise CompareError(f"the run was ended: {failure()}")
                    time.sleep(0.1)
            if process.returncode or not output.exists():
                text = f"the load generator failed ({shlex.join(command)}); its last lines:{last_lines(log)}"
                raise CompareError(text)
            try:
                # Python's own reader: the report may hold Infinity, which JSON does not know.
                result = msgspec.convert(json.loads(output.read_bytes().splitlines()[-1]), LoadResult)
            except (ValueError, IndexError) as error:
                raise CompareError(f"the load generator's report cannot be read: {error}") from error
        if result.completed < count:
            raise CompareError(
                f"{count - result.completed} of {count} requests failed at {clients} clients: see the server"
            )
        return result
