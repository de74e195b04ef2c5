"""``specpilot compare`` against a server with an HTTP interface, steered by a real controller."""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from specpilot.controller.client.settings import change_settings
from specpilot.controller.compare import load
from specpilot.controller.compare.arms import orders
from specpilot.controller.compare.load import GENERATOR
from specpilot.controller.compare.report import arm_results
from specpilot.controller.compare.runs import ComparisonRun
from specpilot.controller.processes import start_logged, terminable
from specpilot.controller.trace.format import records
from specpilot.controller.trace.reader import Segment, segments
from specpilot.sglang_hooks.wire import SetRequest, StepRecord
from tests.controller.test_service import Controller
from tests.support.waiting import PATIENCE, until
from tests.support.warm import program

ROOT = Path(__file__).parents[2]
COMMAND = ("-m", "specpilot.controller.cli")
RENEWING = """
import sys
from specpilot.controller import cli
from specpilot.controller.compare import command
command.RENEW_SECONDS = 0.5
sys.exit(cli.main(sys.argv[1:]))
"""
"""The same, but a controller that is gone is missed sooner."""
SMALL = f"{sys.executable} -m tests.support.load_generator"


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        policy = f'[policy]\nname = "static"\nsteps = 1\n[prior]\ndirectory = "{folder}/prior"\n'
        self.controller = Controller(folder, policy=policy).start()
        port = folder / "port"
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.http_server", self.controller.endpoint, str(port)], cwd=ROOT
        )
        until(lambda: port.exists() and port.read_text())
        self.url = f"http://127.0.0.1:{port.read_text()}"
        self.controller.server("sim/0")

    def start(self, *arguments: str, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command, "compare", self.url,
             "--endpoint", self.controller.endpoint, "--json", str(self.folder / "out.json"), *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def set_now(self) -> list[Any]:
        report = change_settings(self.controller.endpoint, SetRequest({}))
        return [one for one in report.settings if one.origin.startswith("set")]

    def steps(self) -> list[StepRecord]:
        found: list[StepRecord] = []
        for path in segments([self.folder / "trace"]):
            for batch in Segment(path):
                found += records(batch)
        return found

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
        if self.controller.process is not None and self.controller.process.poll() is None:
            self.controller.end(signal.SIGKILL)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_every_arm_is_in_force_in_its_runs_and_the_configured_one_afterwards(rig: Rig) -> None:
    png = rig.folder / "plot.png"
    done = rig.start(
        "--arms", "skip", "static:3", "goodput", "--concurrency", "1", "4", "--repetitions", "2", "--requests", "6",
        "--generator", SMALL, "--load", "--random-output-len 64", "--png", str(png),
    )  # fmt: skip
    output, _ = done.communicate(timeout=4 * PATIENCE)
    assert done.returncode == 0, output
    out = json.loads((rig.folder / "out.json").read_text())
    runs = out["runs"]
    assert Counter((run["concurrency"], run["arm"]) for run in runs) == {
        (clients, arm): 2 for clients in (1, 4) for arm in ("skip", "static:3", "goodput")
    }
    for clients in (1, 4):
        orders_there = [
            [run["arm"] for run in runs if (run["concurrency"], run["repetition"]) == (clients, repetition)]
            for repetition in (0, 1)
        ]
        assert orders_there[0] != orders_there[1]
    newest = max(run["started_at"] for run in runs)
    until(lambda: any(step.time > newest for step in rig.steps()))  # flushed by the controller
    steps = rig.steps()
    # Nothing else is asked of the server, so all steps until the next run begins are this one's, however long the
    # generator took to start: a run's own seconds begin with its first request.
    starts = [*(run["started_at"] for run in runs), math.inf]
    for run, start, end in zip(runs, starts, starts[1:], strict=False):
        within = [step for step in steps if start <= step.time < end]
        assert within
        ran = {step.draft_tokens - 1 for step in within}
        assert ran == {"skip": {0}, "static:3": {3}}.get(run["arm"], ran)
        assert max(step.batch_size for step in within) <= run["concurrency"]
    # With drafts accepted at 0.8, one request alone is served faster with them.
    (fast,) = [cell for cell in out["cells"] if (cell["concurrency"], cell["arm"]) == (1, "static:3")]
    assert fast["gain"] > 0.2
    assert fast["low"] < fast["gain"] < fast["high"]
    assert png.stat().st_size > 10_000
    assert "static:3" in output
    assert not rig.set_now()
    until(lambda: rig.controller.server("sim/0").table.choice == [1])  # type: ignore[union-attr]


def test_an_interrupted_comparison_puts_the_server_back(rig: Rig) -> None:
    for how, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130)):
        done = rig.start("--arms", "skip", "static:3", "--concurrency", "1", "--requests", "1000", "--generator", SMALL)
        until(lambda: rig.set_now())
        generators = until(lambda done=done: _generators(done))
        done.send_signal(how)
        output, _ = done.communicate(timeout=PATIENCE)
        assert done.returncode == code, output
        assert "interrupted" in output
        assert not rig.set_now()
        psutil.wait_procs(generators, PATIENCE)
        assert not any(generator.is_running() for generator in generators)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_program_starts_leaves_none_running(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start_logged(*arguments))
        signal.raise_signal(number)  # before the caller knows of the process
        return started[0]

    monkeypatch.setattr(load, "start_logged", start)
    generator = load.LoadGenerator(
        "http://127.0.0.1:1", shlex.join([sys.executable, "-c", "import time; time.sleep(1000)"]), (), 10
    )
    with pytest.raises(KeyboardInterrupt), terminable():
        generator.run(1, 0, lambda: "")
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def _generators(comparison: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(comparison.pid).children()
    return [child for child in children if "tests.support.load_generator" in child.cmdline()]


def test_a_killed_comparison_leaves_a_pin_that_ends(rig: Rig) -> None:
    done = rig.start("--arms", "skip", "static:3", "--concurrency", "1", "--requests", "1000", "--generator", SMALL)
    until(lambda: rig.set_now())
    done.kill()
    done.wait()
    assert all(0 < one.seconds <= 60 and one.origin == "set for a time" for one in rig.set_now())


def test_a_dead_controller_ends_the_comparison_with_a_word(rig: Rig) -> None:
    done = rig.start("--arms", "skip", "static:3", "--concurrency", "1", "--requests", "1000", "--generator", SMALL,
                     command=["-c", RENEWING])  # fmt: skip
    until(lambda: rig.set_now())
    rig.controller.end(signal.SIGKILL)
    output, _ = done.communicate(timeout=PATIENCE)
    assert done.returncode == 1
    assert "did not answer" in output or "no controller" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--arms", "static:7", "skip"], 1, "policy.steps = 7 is not among the candidate steps"),
        (["--arms", "fast"], 2, "arm 'fast'"),
        (["--server", "other"], 1, "which server? Give --server, one of: sim/0"),
        (["--generator", "false"], 1, "the load generator failed"),
        (["--repetitions", "0"], 2, "whole numbers above 0"),
    ],
)
def test_what_cannot_be_compared_is_named(arguments: list[str], code: int, says: str, shared: Rig) -> None:
    done = shared.start(*arguments)
    output, _ = done.communicate(timeout=PATIENCE)
    assert says in output
    assert done.returncode == code
    assert "Traceback" not in output
    assert not shared.set_now()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("compare"))
    yield made
    made.close()


@pytest.mark.sglang
def test_the_load_generator_of_sglang(shared: Rig) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i + 1 for i in range(999)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = shared.folder / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    load = f"--tokenizer {folder} --random-input-len 32 --random-output-len 32 --tokenize-prompt"
    assert (sys.executable, "-P", "-m", "sglang.benchmark.serving") == GENERATOR
    done = shared.start("--arms", "static:3", "--concurrency", "2", "--repetitions", "1", "--requests", "4",
                        "--load", load, "--generator", shlex.join(program(*GENERATOR[2:])))  # fmt: skip
    output, _ = done.communicate(timeout=4 * PATIENCE)
    assert done.returncode == 0, output
    runs = json.loads((shared.folder / "out.json").read_text())["runs"]
    assert [run["requests"] for run in runs] == [4]
    assert all(run["tokens_per_second"] > 0 and run["time_per_output_token"] > 0 for run in runs)
    assert not shared.set_now()


# -- design and statistics --


@pytest.mark.parametrize("count", range(1, 8))
def test_orders_are_balanced(count: int) -> None:
    arms = [f"arm{i}" for i in range(count)]
    rows = orders(arms)
    assert all(sorted(row) == arms for row in rows)
    places = Counter((place, arm) for row in rows for place, arm in enumerate(row))
    assert set(places.values()) == {len(rows) // count}
    follows = Counter(pair for row in rows for pair in pairwise(row))
    if count > 1:
        assert len(follows) == count * (count - 1)
        assert len(set(follows.values())) == 1


def run_of(arm: str, repetition: int, rate: float) -> ComparisonRun:
    return ComparisonRun(
        repetition=repetition, concurrency=4, arm=arm, place=0, requests=1, tokens_per_second=rate,
        time_per_output_token=1.0 / rate, time_to_first_token=0.1, seconds=1.0, started_at=0.0,
    )  # fmt: skip


def test_gains_are_of_pairs() -> None:
    """The load of the repetitions differs by a factor of ten; the gain in each is 10 %."""
    runs = [run_of(arm, i, 10.0**i * (1.1 if arm == "b" else 1.0)) for i in range(3) for arm in ("a", "b")]
    runs.append(run_of("b", 3, 5.0))  # its partner is missing
    first, second = arm_results(runs, ["a", "b"])
    assert first.gain == 0.0
    assert second.gain is not None
    assert second.low is not None
    assert math.isclose(second.gain, 0.1)
    assert math.isclose(second.low, 0.1)
    assert second.runs == 4
    (alone,) = arm_results(runs[:1], ["a", "b"])
    assert alone.low is None
    assert alone.tokens_per_second_interval is None


def test_the_interval_covers_the_gain() -> None:
    """Student's t on paired log ratios: 95 % of intervals hold the truth, within Monte Carlo error."""
    import numpy as np

    rng = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        runs = []
        for i in range(4):
            load = math.exp(rng.normal(0, 1))
            runs += [run_of("a", i, load * math.exp(rng.normal(0, 0.03)))]
            runs += [run_of("b", i, 1.2 * load * math.exp(rng.normal(0, 0.03)))]
        _, cell = arm_results(runs, ["a", "b"])
        assert cell.low is not None
        assert cell.high is not None
        held += cell.low <= 0.2 <= cell.high
    assert 0.92 <= held / 400 <= 0.98
