"""``specpilot launch``: what it adds to a command line, and how it treats the two processes.

The arguments are read by SGLang's own parser; the controller is a real one; the server is tests/support/fake_server.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.errors import ConfigError
from specpilot.controller.launch.command import LaunchRequest, plan
from specpilot.controller.launch.sglang_arguments import additions, given, health_url, unsteerable
from tests.support.ports import own_port
from tests.support.waiting import PATIENCE, until
from tests.support.warm import program

ROOT = Path(__file__).parents[2]
EAGLE = ["--model-path", "m", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d"]
TREE = [*EAGLE, "--speculative-eagle-topk", "4", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "16"]
LAUNCH = """
import sys
from specpilot.controller import cli
from specpilot.controller.launch import command as launch
launch.SERVER = (sys.executable, sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""


def added(arguments: list[str], candidates: list[int] | None = None) -> dict[str, str]:
    found = additions(given(arguments), candidates or [0, 1, 3], Path("adaptive.json"))
    assert all(item.why for item in found)
    return {item.arguments[0]: " ".join(item.arguments[1:]) for item in found}


def test_a_chain_gets_what_makes_it_steerable() -> None:
    assert added(EAGLE) == {
        "--speculative-adaptive": "",
        "--speculative-adaptive-config": "adaptive.json",
        "--speculative-eagle-topk": "1",
        "--speculative-num-steps": "3",
        "--speculative-num-draft-tokens": "4",
        "--max-running-requests": "256",
    }


def test_what_is_given_stays(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text('{"1": {"candidate_steps": [0, 2]}, "8": {"candidate_steps": [0, 1]}}')
    arguments = ["--speculative-adaptive", f"--speculative-adaptive-config={file}", "--max-running-requests", "9",
                 "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"]  # fmt: skip
    assert added([*EAGLE, *arguments]) == {"--speculative-num-draft-tokens": "2"}


def test_a_tree_gets_no_chain() -> None:
    assert added(TREE) == {"--max-running-requests": "256"}


def test_sglangs_short_names_and_abbreviations_count_as_given() -> None:
    assert given(["--model", "m", "--tp", "8", "--speculative-algo", "EAGLE3"]) == {
        "model_path": "m",
        "tp_size": 8,
        "speculative_algorithm": "EAGLE3",
    }


def test_a_file_of_arguments_counts_as_given(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model-path: m\nmax-running-requests: 32\n")
    assert given(["--config", str(file)])["max_running_requests"] == 32


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--model-path", "m"], "no --speculative-algorithm"),
        (["--model-path", "m", "--speculative-algorithm", "NGRAM"], "--speculative-algorithm NGRAM"),
        ([*EAGLE, "--dp-size", "2", "--enable-dp-attention"], "attention data parallelism"),
        ([*EAGLE, "--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
        ([*EAGLE, "--enable-pdmux"], "--enable-pdmux"),
    ],
)
def test_what_sglang_would_not_adapt_is_refused_by_name(arguments: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        plan(LaunchRequest(arguments, candidates=[0, 1, 3]), {})


@pytest.mark.parametrize("arguments", [EAGLE, TREE])
def test_what_sglang_would_adapt_is_not_refused(arguments: list[str]) -> None:
    assert unsteerable(given(arguments)) == []


@pytest.mark.parametrize(
    ("steps", "arguments", "names"),
    [
        ('{"1": {"candidate_steps": [1, 3]}}', [], "0 is not among"),
        ('{"1": {"candidate_steps": [0, 3]}}', ["--speculative-num-steps", "2"], "--speculative-num-steps 2"),
        ('{"1": [0, 3]}', [], "cannot be used"),
        ("nonsense", [], "cannot be used"),
    ],
)
def test_candidates_that_cannot_work_are_refused(tmp_path: Path, steps: str, arguments: list[str], names: str) -> None:
    file = tmp_path / "steps.json"
    file.write_text(steps)
    with pytest.raises(ConfigError, match=names):
        added([*EAGLE, "--speculative-adaptive-config", str(file), *arguments])


def test_an_argument_that_sglang_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="--bogus"):
        given([*EAGLE, "--bogus"])


def test_a_misspelt_option_of_the_plugin_is_refused() -> None:
    with pytest.raises(ConfigError, match="SPECPILOT_MODUS"):
        plan(LaunchRequest(EAGLE, candidates=[0, 1]), {"SPECPILOT_MODUS": "shadow"})


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:30000/health"),
        ({"host": "::", "port": 1}, "http://[::1]:1/health"),
        ({"host": "10.0.0.1", "ssl_certfile": "c"}, "https://10.0.0.1:30000/health"),
    ],
)
def test_where_the_server_is_asked(options: dict[str, Any], url: str) -> None:
    assert health_url(options) == url


# -- the processes --


class Rig:
    """A launch in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.log, self.output = folder / "server.log", folder / "output"
        self.endpoint = f"ipc://{folder}/socket/controller.ipc"
        self.port = own_port()
        config = folder / "controller.toml"
        self.config = ["--config", str(config)]
        config.write_text(
            f'[controller]\nendpoint = "{self.endpoint}"\n[trace]\ndirectory = ""\n[prior]\ndirectory = ""\n'
        )
        self.command = [*program("-c", LAUNCH), str(ROOT / "tests/support/fake_server.py"), "launch", *self.config,
                        "--", *EAGLE, "--port", str(self.port)]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        root = str(ROOT)
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, cwd=root,
                env={**os.environ, "PYTHONPATH": paths, "FAKE_SERVER_LOG": str(self.log), **environment},
            )  # fmt: skip
        return self.process

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait(self, condition: Callable[[], Any]) -> Any:
        return until(condition, what=lambda: f"after {self.output.read_text()}{self.lines()}: what was waited for")

    def says(self, text: str) -> bool:
        return text in self.output.read_text()

    def controller_pid(self) -> int:
        try:
            return fetch_status(self.endpoint).pid
        except StatusError:
            return 0


@pytest.fixture
def rig() -> Iterator[Rig]:
    folder = Path(tempfile.mkdtemp(prefix="sp-"))  # a socket's path is short
    made = Rig(folder)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.terminate()
        made.process.wait(PATIENCE)
    shutil.rmtree(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_run_until_a_signal_ends_the_server(rig: Rig, number: signal.Signals) -> None:
    process = rig.start(FAKE_SERVER_EXIT_CODE="7")
    rig.wait(lambda: rig.says("ready after"))
    controller = rig.controller_pid()
    assert controller
    begun = rig.lines()[0]
    assert begun["endpoint"] == rig.endpoint
    steps = Path(begun["arguments"][begun["arguments"].index("--speculative-adaptive-config") + 1])
    assert json.loads(steps.read_text()) == {"1": {"candidate_steps": [0, 1, 2, 3, 5]}}
    process.send_signal(signal.SIGUSR1)
    rig.wait(lambda: {"signal": "SIGUSR1"} in rig.lines())
    process.send_signal(number)
    assert process.wait(PATIENCE) == 7
    assert [line["signal"] for line in rig.lines() if "signal" in line] == ["SIGUSR1", number.name]
    assert not Path(f"/proc/{controller}").exists()


def test_a_controller_that_is_killed_comes_back_beside_the_same_server(rig: Rig) -> None:
    rig.start()
    first = rig.wait(rig.controller_pid)
    rig.wait(lambda: {"up": True} in rig.lines())
    os.kill(first, signal.SIGKILL)
    second = rig.wait(lambda: (found := rig.controller_pid()) != first and found)
    assert second != first
    assert sum("arguments" in line for line in rig.lines()) == 1
    assert rig.says("the controller ended with code -9; it is started again in 1 s")


def test_a_server_that_ends_at_once_ends_the_launch_with_its_code(rig: Rig) -> None:
    process = rig.start(FAKE_SERVER_ENDS="1", FAKE_SERVER_EXIT_CODE="3")
    assert process.wait(PATIENCE) == 3
    assert rig.says("ended with code 3 before it was ready")
    assert not rig.controller_pid()


def test_a_controller_that_cannot_start_ends_the_launch_before_the_server_runs(rig: Rig) -> None:
    Path(rig.endpoint.removeprefix("ipc://")).parent.mkdir(mode=0o777)
    Path(rig.endpoint.removeprefix("ipc://")).parent.chmod(0o777)
    assert rig.start().wait(PATIENCE) == 2
    assert rig.says("the controller ended with code 2")
    assert rig.lines() == []


def test_a_controller_that_runs_already_is_used_and_left_alone(rig: Rig) -> None:
    own = subprocess.Popen([sys.executable, "-m", "specpilot.controller.cli", "controller", *rig.config])
    try:
        rig.wait(rig.controller_pid)
        process = rig.start()
        rig.wait(lambda: rig.says("ready after"))
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert rig.says(f"the controller with pid {own.pid}")
        assert rig.controller_pid() == own.pid
    finally:
        own.terminate()
        own.wait(PATIENCE)
