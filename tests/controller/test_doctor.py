"""``specpilot doctor``: every check, driven to every outcome.

Real parts: SGLang's own parser and resolution, a controller process, sockets, key files, an HTTP server that answers
with what SGLang made of its arguments, and Python environments in which SGLang is missing, broken or changed.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import specpilot.controller.cli as cli
from specpilot.controller.config import Config, ControllerConfig, GoodputPolicy, PriorConfig, StaticPolicy, TraceConfig
from specpilot.controller.doctor.command import DoctorRequest, examine
from specpilot.controller.doctor.configuration import check_configuration, check_settings, check_storage
from specpilot.controller.doctor.endpoint import Address, check_socket, check_socket_folder
from specpilot.controller.doctor.gpus import Gpu, check_gpus, judge_gpu, read_gpus, visible
from specpilot.controller.doctor.installation import check_plugin, check_sglang
from specpilot.controller.doctor.report import COLOURS, Check, print_checks
from specpilot.controller.doctor.running_controller import TROUBLE, check_controller, judge_controller, judge_server
from specpilot.controller.doctor.server_arguments import (
    DECODE_SKIP_BACKENDS,
    KINDS,
    check_server,
    read_arguments,
    read_running,
    server_of,
)
from specpilot.controller.doctor.server_log import check_log, open_log, read_log
from specpilot.controller.serve.counters import CONTROLLER_COUNTERS, SERVER_COUNTERS
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.keys import make_keys
from specpilot.sglang_hooks import skip_hooks, step_hooks
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.connection import KeyFiles
from specpilot.sglang_hooks.counters import COUNTERS
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.skip import ATTENTION_BACKENDS, SkipMemory
from specpilot.sglang_hooks.table_policy import TablePolicy
from tests.controller.test_service import Controller, in_command
from tests.support.ports import own_port
from tests.support.waiting import PATIENCE, until
from tests.support.warm import program

ROOT = Path(__file__).parents[2]
EAGLE = ["--model-path", "m", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d"]
TREE = [*EAGLE, "--speculative-eagle-topk", "4", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "16"]
NO_KEYS = KeyFiles()


def only(checks: Any, text: str) -> Check:
    """The one check that says ``text``; every warning and problem says what to change."""
    checks = list(checks)
    assert all(check.outcome in COLOURS for check in checks)
    assert all(bool(check.change) == (check.outcome in ("warning", "problem")) for check in checks), checks
    found = [check for check in checks if text in check.found]
    assert len(found) == 1, (text, checks)
    return found[0]


def outcomes(checks: Any) -> set[str]:
    return {check.outcome for check in checks}


# -- versions --


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Check]]:
    """Run the doctor in a Python environment of a kind.

    absent: without SGLang. broken: SGLang fails, specpilot has no entry point. hollow: SGLang without its code, and an
    entry point that leads nowhere. changed: a function that skips use has another name.
    """
    import sglang

    assert sglang.__file__ is not None
    real = Path(sglang.__file__).parent
    packages = real.parent

    def run(kind: str) -> list[Check]:
        folder = tmp_path_factory.mktemp(kind)
        for path in packages.iterdir():
            if not path.name.startswith(("sglang", "specpilot", "__editable__")):
                (folder / path.name).symlink_to(path)
        made = folder / "specpilot-0.1.0.dist-info"
        made.mkdir()
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: specpilot\nVersion: {version('specpilot')}\n")
        points = {"broken": "", "hollow": "[sglang.srt.plugins]\nspecpilot = sglang_hooks.nothing:activate\n"}
        usual = "[sglang.srt.plugins]\nspecpilot = sglang_hooks.plugin:activate\n"
        (made / "entry_points.txt").write_text(points.get(kind, usual))
        if kind != "absent":
            info = next(packages.glob("sglang-*.dist-info"))
            (folder / info.name).symlink_to(info)
        if kind == "broken":
            (folder / "sglang").mkdir()
            (folder / "sglang" / "__init__.py").write_text("raise ImportError('half of it is missing')\n")
        elif kind == "hollow":
            (folder / "sglang").mkdir()
            (folder / "sglang" / "__init__.py").write_text(f"__version__ = {sglang.__version__!r}\n")
        elif kind == "changed":
            name = Path("srt/model_executor/forward_context.py")
            copy_but_for(real, folder / "sglang", name)
            text = (real / name).read_text().replace("def has_forward_context(", "def has_another_context(")
            (folder / "sglang" / name).write_text(text)
        elif kind != "absent":
            (folder / "sglang").symlink_to(real)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECPILOT_")}
        paths = os.pathsep.join([str(ROOT), str(folder)])
        words = ["--", *EAGLE] if kind == "absent" else []
        ran = subprocess.run(
            [sys.executable, "-S", "-m", "specpilot.controller.cli", "doctor", "--json", *words],
            env={**environment, "PYTHONPATH": paths}, cwd=folder, capture_output=True, text=True, timeout=4 * PATIENCE,
        )  # fmt: skip
        assert ran.stdout, ran.stderr
        checks = msgspec.json.decode(ran.stdout, type=list[Check])
        assert ran.returncode == int("problem" in outcomes(checks))
        return checks

    return run


def copy_but_for(real: Path, copy: Path, name: Path) -> None:
    """Link everything of ``real`` except the file ``name``."""
    copy.mkdir()
    for path in real.iterdir():
        if path.name != name.parts[0]:
            (copy / path.name).symlink_to(path)
        elif path.is_dir():
            copy_but_for(path, copy / path.name, Path(*name.parts[1:]))


def test_without_sglang_the_host_is_one_for_a_controller(environments: Callable[[str], list[Check]]) -> None:
    checks = environments("absent")
    assert only(checks, "SGLang is not installed here: enough for a controller").outcome == "not checked"
    assert only(checks, "only it can read its arguments").outcome == "not checked"
    assert "SPECPILOT_ENDPOINT" not in str(checks)
    assert "problem" not in outcomes(checks)


@pytest.mark.parametrize(
    ("kind", "outcome", "texts"),
    [
        ("broken", "problem", ["cannot be imported: half of it is missing", "SGLang finds no plugin specpilot"]),
        ("hollow", "problem", ["SGLang's code is not what the hooks know", "the plugin sglang_hooks.nothing:activate"]),
        ("changed", "warning", ["forward_context.has_forward_context"]),
    ],
)
def test_an_environment_that_is_not_whole(
    environments: Callable[[str], list[Check]], kind: str, outcome: str, texts: list[str]
) -> None:
    checks = environments(kind)
    assert [only(checks, text).outcome for text in texts] == [outcome for _ in texts]


@pytest.mark.sglang
def test_this_environment_is_whole() -> None:
    found = [*check_sglang(version("sglang"), {}), *check_plugin({})]
    assert outcomes(found) == {"ok"}
    assert len(found) == 3


@pytest.mark.parametrize(("allowed", "outcome"), [({}, "problem"), ({"SPECPILOT_ALLOW_UNTESTED": "1"}, "warning")])
def test_a_version_that_was_not_tested(allowed: dict[str, str], outcome: str) -> None:
    assert only(check_sglang("0.4.1", allowed), "0.4.1 is not a tested version").outcome == outcome


@pytest.mark.parametrize(
    ("plugins", "outcome"), [("", "ok"), ("other, specpilot", "ok"), ("other", "problem"), ("specpilot2", "problem")]
)
def test_sglangs_list_of_plugins(plugins: str, outcome: str) -> None:
    (check,) = check_plugin({"SGLANG_PLUGINS": plugins})
    assert check.outcome == outcome
    assert outcome == "ok" or f"SGLANG_PLUGINS={plugins},specpilot" in check.change


# -- settings and configuration --


@pytest.mark.parametrize(
    ("environment", "outcome", "text"),
    [
        pytest.param({}, "warning", "SPECPILOT_ENDPOINT is not set", marks=pytest.mark.sglang),
        ({"SPECPILOT_ENDPOINT": "ipc:///run/c.ipc"}, "ok", "SPECPILOT_ENDPOINT"),
        ({"SPECPILOT_ENDPOINT": "ipc:///run/c.ipc", "SPECPILOT_MODE": "shadow"}, "warning", "tables are recorded"),
        ({"SPECPILOT_MODUS": "shadow"}, "problem", "SPECPILOT_MODUS is not an option"),
        ({"SPECPILOT_SKIP_RING_MB": "-1"}, "problem", "SPECPILOT_SKIP_RING_MB='-1'"),
        ({"SPECPILOT_ENDPOINT": "tcp://h:1"}, "problem", "needs SPECPILOT_CLIENT_KEY"),
    ],
)
def test_variables(environment: dict[str, str], outcome: str, text: str) -> None:
    parsed, checks = check_settings(environment)
    assert only(checks, text).outcome == outcome
    assert (parsed is None) == (outcome == "problem")


@pytest.mark.parametrize(
    ("text", "outcome", "says"),
    [
        ("", "ok", "policy goodput, mode control"),
        ('[policy]\nname = "goodput"\n', "ok", "policy goodput"),
        ("[polizy]\n", "problem", "polizy"),
        ('[policy]\nname = "neural"\nmodel = "/nonexistent.npz"\n', "problem", "/nonexistent.npz"),
        ('[web]\ntoken_file = "/nonexistent-token"\n', "problem", "/nonexistent-token"),
    ],
)
def test_configuration_file(tmp_path: Path, text: str, outcome: str, says: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    config, checks = check_configuration(file)
    assert only(checks, says).outcome == outcome
    assert (config is None) == (outcome == "problem")


def test_a_configuration_file_that_is_not_there() -> None:
    assert only(check_configuration(Path("/nonexistent.toml"))[1], "No such file").outcome == "problem"


# -- the socket --


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, since a socket's path is short, that other users may look into."""
    folder = Path(tempfile.mkdtemp(prefix="sp-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(check: Callable[[], list[Check]]) -> list[Check]:
    """Run a check as a user without rights; root may do everything."""
    if os.getuid() != 0:
        return check()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(write, msgspec.json.encode(check()))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = msgspec.json.decode(answer.read(), type=list[Check])
    os.waitpid(child, 0)
    return found


def test_the_folder_of_the_socket(short: Path) -> None:
    folder = short / "a" / "b"
    assert only([check_socket_folder(folder)], "is not there yet").outcome == "ok"
    folder.mkdir(parents=True, mode=0o700)
    assert only([check_socket_folder(folder)], "mode 0700").outcome == "ok"
    folder.chmod(0o777)
    assert only([check_socket_folder(folder)], "others may write").outcome == "problem"
    (short / "file").write_text("")
    assert only([check_socket_folder(short / "file")], "is no folder").outcome == "problem"


def test_the_folder_of_the_socket_of_another_user(short: Path) -> None:
    folder = short / "a"
    assert only(as_nobody(lambda: [check_socket_folder(folder)]), "may not make it").outcome == (
        "problem" if os.getuid() == 0 else "ok"
    )
    folder.mkdir(mode=0o500)
    folder.chmod(0o555)
    assert only(as_nobody(lambda: [check_socket_folder(folder)]), "may not write into it").outcome == "problem"


def test_two_endpoints(short: Path) -> None:
    config = Config(controller=ControllerConfig(endpoint=f"ipc://{short}/a.ipc"))
    other = check_socket(Address(f"ipc://{short}/b.ipc", NO_KEYS), config)
    assert only(other, "and servers look for it at").outcome == "warning"
    (short / "link").symlink_to(short)
    assert outcomes(check_socket(Address(f"ipc://{short}/link/a.ipc", NO_KEYS), config)) == {"ok"}


@pytest.mark.parametrize("endpoint", ["ipc://@name", "ipc:///" + 120 * "a", "tcp://h:99999", "http://h"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    assert only(check_socket(Address(endpoint, NO_KEYS), None), endpoint).outcome == "problem"
    assert check_controller(Address(endpoint, NO_KEYS))[1][0].outcome == "not checked"


def test_keys(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys", "gpu-7")
    keys = KeyFiles(str(made.client_pair), str(made.controller_public))
    own = ControllerConfig(endpoint="tcp://*:5757", key=str(made.controller_pair), authorized_keys=str(made.authorized))
    config = Config(controller=own)
    at = Address("tcp://127.0.0.1:5757", keys)
    assert outcomes(check_socket(at, config)) == {"ok"}
    assert only(check_socket(at, config), "may connect: gpu-7").outcome == "ok"
    assert only(check_socket(Address(at.endpoint, NO_KEYS), None), "needs SPECPILOT_CLIENT_KEY").outcome == "problem"
    stranger = make_keys(tmp_path / "other", "s")
    refused = Address(at.endpoint, KeyFiles(str(stranger.client_pair), str(made.controller_public)))
    assert only(check_socket(refused, config), "is not among the keys").outcome == "problem"
    (made.authorized / "bad.key").write_text("nothing")
    assert only(check_socket(at, config), "bad.key").outcome == "problem"
    for file in made.authorized.iterdir():
        file.unlink()
    assert only(check_socket(at, config), "nobody can connect").outcome == "warning"
    made.controller_pair.chmod(0o644)
    made.client_pair.chmod(0o644)
    assert only(check_socket(at, None), "others may read key file").outcome == "problem"
    assert only(check_socket(Address("ipc:///run/x/c.ipc", NO_KEYS), config), "others may read").outcome == "problem"


# -- the controller --


@pytest.fixture
def steered(tmp_path: Path) -> Iterator[tuple[Controller, Agent]]:
    """A controller and a server that it steers."""
    controller = Controller(tmp_path).start()
    of_server = Settings(endpoint=controller.endpoint, min_table_interval_seconds=0.0)
    agent = Agent(of_server, TablePolicy(of_server, [0, 1, 3], 3))
    agent.start(ServerFacts("s", model="target-8b"))
    until(lambda: in_command(agent))
    until(lambda: controller.server().source == "TABLE")
    yield controller, agent
    agent.stop()
    controller.end(signal.SIGKILL)


def test_all_is_well(steered: tuple[Controller, Agent], capsys: pytest.CaptureFixture[str]) -> None:
    controller, _ = steered
    file = controller.folder / "adaptive.json"
    file.write_text('{"1": {"candidate_steps": [0, 1, 3]}}')
    arguments = [*EAGLE, "--speculative-adaptive", "--speculative-adaptive-config", str(file), "--attention-backend",
                 "fa3", "--max-running-requests", "64"]  # fmt: skip
    request = DoctorRequest(arguments, controller.config)
    checks = examine(request, {"SPECPILOT_ENDPOINT": controller.endpoint})
    assert outcomes(check for check in checks if check.area != "memory") == {"ok"}
    assert only(checks, "s/0 is steered: K=").area == "controller"
    areas = list(dict.fromkeys(check.area for check in checks))
    assert areas == ["versions", "configuration", "socket", "controller", "storage", "arguments", "memory"]
    assert cli.main(["doctor", "--config", str(controller.config), "--", *arguments]) == 0
    assert "s/0 is steered" in capsys.readouterr().out


def test_what_a_controller_says(steered: tuple[Controller, Agent]) -> None:
    controller, _ = steered
    status, checks = check_controller(Address(controller.endpoint, NO_KEYS))
    assert status is not None
    assert outcomes(checks) == {"ok"}
    for change, outcome, text in (
        ({"version": "9.9"}, "problem", "the controller is specpilot 9.9"),
        ({"config_error": "no such key"}, "problem", "no such key"),
        ({"trace_error": "disk full"}, "problem", "disk full"),
        ({"prior_error": "read only"}, "problem", "read only"),
        ({"trace_lost": 7}, "warning", "7 records were not written"),
        ({"refused_messages": 7}, "warning", "7 messages were refused"),
        ({"handshakes_failed": 7}, "warning", "7 connections were refused"),
        ({"page": "is not served: in use"}, "warning", "the web page is not served"),
        ({"servers": []}, "warning", "no server has connected"),
        ({"counters": {"trace_failures": 3}}, "warning", "trace_failures 3"),
    ):
        changed = judge_controller(msgspec.structs.replace(status, **change))
        assert only(changed, text).outcome == outcome, change


def test_what_a_server_says(steered: tuple[Controller, Agent]) -> None:
    server = steered[0].server()
    for change, outcome, text in (
        ({}, "ok", "s/0 is steered"),
        ({"silent_seconds": 9.0}, "problem", "silent for 9 s"),
        ({"source": "HALTED"}, "problem", "halted"),
        ({"source": "STALE"}, "warning", "lease ran out"),
        ({"source": "FALLBACK"}, "warning", "own fallback"),
        ({"source": "FALLBACK", "mode": "shadow"}, "ok", "mode shadow"),
        ({"candidate_steps": [1, 3]}, "problem", "can never skip"),
        ({"note": "look here"}, "warning", "look here"),
        ({"records_lost": 5}, "warning", "5 of its records"),
        ({"counters": {"hook_failures": 2, "tables_received": 9}}, "warning", "hook_failures 2"),
    ):
        assert only(judge_server(msgspec.structs.replace(server, **change)), text).outcome == outcome, change


def test_every_counter_is_trouble_or_usual() -> None:
    usual = {"tables_received", "tables_replayed", "leases_ignored", "link_rebuilds", "steps_capped",
             "tables_resent", "messages_unclaimed"}  # fmt: skip
    assert {*TROUBLE} | usual == {*COUNTERS, *SERVER_COUNTERS, *CONTROLLER_COUNTERS}
    assert not {*TROUBLE} & usual


def test_a_controller_that_is_not_there_or_does_not_answer(steered: tuple[Controller, Agent], short: Path) -> None:
    controller, _ = steered
    assert controller.process is not None
    assert only(check_controller(Address(f"ipc://{short}/c.ipc", NO_KEYS))[1], "none at").outcome == "warning"
    controller.process.send_signal(signal.SIGSTOP)
    status, checks = check_controller(Address(controller.endpoint, NO_KEYS))
    assert status is None
    assert only(checks, "did not answer").outcome == "problem"
    assert check_controller(Address("tcp://*:5757", NO_KEYS))[1][0].outcome == "not checked"


def test_a_controller_over_tcp_that_refuses_the_key(tmp_path: Path) -> None:
    made, stranger = make_keys(tmp_path / "keys"), make_keys(tmp_path / "other")
    endpoint = Endpoint(f"tcp://127.0.0.1:{own_port()}", str(made.controller_pair), str(made.authorized))
    try:
        keys = KeyFiles(str(stranger.client_pair), str(made.controller_public))
        checks = check_controller(Address(endpoint.endpoint, keys))[1]
        assert only(checks, "refuses this client's key").outcome == "problem"
    finally:
        endpoint.close()


# -- disk --


def storage(folder: Path, **options: Any) -> list[Check]:
    own = {"trace": TraceConfig(directory=str(folder / "trace")), "prior": PriorConfig(directory=str(folder / "prior"))}
    return list(check_storage(Config(**{**own, **options})))


def test_storage(short: Path) -> None:
    unlearned = storage(short, policy=StaticPolicy(steps=1))
    assert outcomes(unlearned) == {"ok"}
    assert "prior" not in str(unlearned)  # this policy learns nothing
    assert only(storage(short, policy=GoodputPolicy()), "prior.directory").outcome == "ok"
    nothing = storage(short, trace=TraceConfig(directory=""), policy=GoodputPolicy(), prior=PriorConfig(directory=""))
    assert only(nothing, "no trace is written").outcome == only(nothing, "is not kept").outcome == "warning"
    large = storage(short, trace=TraceConfig(directory=str(short), total_bytes=1 << 62))
    assert only(large, "are free").outcome == "warning"
    (short / "000001.arrows").write_bytes(bytes(200_000_000))
    assert "the trace has 0.2 of" in only(storage(short, trace=TraceConfig(directory=str(short))), "are free").found
    (short / "trace").write_text("")
    assert only(storage(short), "is no folder").outcome == "problem"


def test_storage_of_defaults_is_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    checks = list(check_storage(Config()))
    assert only(checks, f"trace.directory {tmp_path}/specpilot/trace can be made").outcome == "ok"
    assert only(checks, f"prior.directory {tmp_path}/specpilot/prior can be made").outcome == "ok"

    def nobody() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    (check,) = check_storage(Config())
    assert check.outcome == "problem"
    assert "no home directory" in check.found


def test_storage_that_this_user_may_not_write(short: Path) -> None:
    short.chmod(0o555)
    checks = as_nobody(lambda: storage(short, policy=StaticPolicy(steps=1)))
    assert only(checks, "may not write").outcome == "problem"
    short.chmod(0o755)


# -- arguments --


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    file = tmp_path / "steps.json"
    file.write_text('{"1": {"candidate_steps": [0, 1, 3]}}')
    return file


def arguments(words: list[str], **environment: str) -> list[Check]:
    server, checks = read_arguments(words)
    parsed = Settings.from_environment({f"SPECPILOT_{name.upper()}": value for name, value in environment.items()})
    return [*checks, *(check_server(server, parsed) if server is not None else ())]


def test_nothing_given_is_not_checked() -> None:
    assert outcomes(arguments([])) == {"not checked"}


@pytest.mark.parametrize(
    ("more", "outcome", "text"),
    [
        (["--bogus"], "problem", "--bogus"),
        ([], "warning", "--speculative-adaptive is not given"),
        (["--speculative-adaptive"], "ok", "SGLang's own set"),
        (["--speculative-algorithm", "NGRAM"], "problem", "--speculative-algorithm NGRAM"),
        (["--speculative-algorithm", "nextn", "--speculative-adaptive"], "ok", "--speculative-adaptive"),
        (["--enable-pdmux"], "problem", "--enable-pdmux"),
        (["--dp-size", "2", "--enable-dp-attention"], "problem", "attention data parallelism"),
        (["--speculative-num-steps", "2", "--speculative-adaptive"], "problem", "--speculative-num-steps 2"),
        (["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"], "warning", "silently takes 4"),
        ([], "not checked", "K=0 as a decode step"),
        (["--attention-backend", "fa3"], "ok", "keeps K=0 from being"),
        (["--attention-backend", "flashinfer"], "warning", "attention backend flashinfer"),
        (["--attention-backend", "triton", "--prefill-attention-backend", "fa3"], "warning", "two attention backends"),
        (["--attention-backend", "triton", "--enable-lora"], "warning", "--enable-lora"),
        (["--attention-backend", "triton", "--speculative-use-rejection-sampling"], "warning", "rejection sampling"),
        (["--attention-backend", "triton", "--device", "cpu"], "warning", "--device cpu"),
        ([], "warning", "--max-running-requests is not given"),
        (["--max-running-requests", "64"], "ok", "--max-running-requests 64"),
        (["--max-running-requests", "64", "--cuda-graph-max-bs-decode", "32"], "warning", "up to batch size 32"),
        (["--scheduler-recv-interval", "4"], "warning", "--scheduler-recv-interval 4"),
        (["--sleep-on-idle"], "warning", "--sleep-on-idle"),
        (["--enable-mixed-chunk"], "warning", "--enable-mixed-chunk"),
    ],
)
def test_arguments(more: list[str], outcome: str, text: str) -> None:
    assert only(arguments([*EAGLE, *more]), text).outcome == outcome


def test_the_radix_cache_is_nobodys_business() -> None:
    assert arguments([*EAGLE, "--disable-radix-cache"]) == arguments(EAGLE)


@pytest.mark.parametrize(
    ("text", "outcome", "says"),
    [
        ('{"1": {"candidate_steps": [0, 1, 3]}}', "ok", "candidates 0, 1, 3"),
        ('{"1": {"candidate_steps": [1, 3]}}', "problem", "0 is not among"),
        ('{"1": {"candidate_steps": [0]}}', "problem", "0 is the only candidate"),
        ("nonsense", "problem", "cannot be used"),
    ],
)
def test_candidates(steps: Path, text: str, outcome: str, says: str) -> None:
    steps.write_text(text)
    words = [*EAGLE, "--speculative-adaptive", "--speculative-adaptive-config", str(steps)]
    assert only(arguments(words), says).outcome == outcome


def test_the_fallback_is_a_candidate(steps: Path) -> None:
    words = [*EAGLE, "--speculative-adaptive", "--speculative-adaptive-config", str(steps)]
    assert only(arguments(words, fallback="2"), "SPECPILOT_FALLBACK=2").outcome == "problem"
    assert "FALLBACK" not in str(arguments(words, fallback="1"))


def test_a_tree(steps: Path) -> None:
    assert only(arguments([*TREE, "--attention-backend", "triton"]), "a tree of drafts (topk 4, 16").outcome == "ok"
    paged = arguments([*TREE, "--attention-backend", "triton", "--page-size", "16"])
    assert only(paged, "the tree cannot be skipped").outcome == "problem"
    assert only(arguments(TREE, skip="verify"), "SPECPILOT_SKIP=verify with a tree").outcome == "problem"
    assert only(arguments([*TREE, "--speculative-adaptive"]), "adaptive with a tree").outcome == "warning"
    assert only(arguments(TREE, fallback="1"), "SPECPILOT_FALLBACK=1").outcome == "problem"


def test_verify_as_asked_for() -> None:
    words = [*EAGLE, "--attention-backend", "flashinfer"]
    assert only(arguments(words, skip="verify"), "as SPECPILOT_SKIP asks for").outcome == "ok"


def test_what_is_read_is_what_sglang_has() -> None:
    import argparse

    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as MAKERS
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert {*KINDS} <= {action.dest for action in parser._actions}
    classes = {name for name in MAKERS if any(known in inspect.getsource(MAKERS[name]).split("(")
               or f"return {known}(" in inspect.getsource(MAKERS[name]) for known in ATTENTION_BACKENDS)}  # fmt: skip
    assert {*DECODE_SKIP_BACKENDS} == classes


# -- a running server --

RESOLVED = """
import json, logging, sys
from sglang.srt.entrypoints.engine import _server_args_for_logging
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.common import build_server_info
from sglang.srt.utils.msgspec_utils import msgspec_to_builtins
found = {}
logging.basicConfig(level="INFO", force=True)
for name, words in json.loads(sys.argv[1]).items():
    print("begin", name, file=sys.stderr, flush=True)
    arguments = prepare_server_args(words)
    arguments.resolve_once()
    logging.info(f"server_args={_server_args_for_logging(arguments)}")  # as its engine does, at this very point
    found[name] = {**build_server_info(arguments, {}), "version": "0.5.23"}
print(json.dumps(msgspec_to_builtins(found), default=str))
"""
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SGLang itself makes of arguments, as ``/server_info`` gives it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    steps = folder / "steps.json"
    steps.write_text('{"1": {"candidate_steps": [0, 1, 3]}}')
    base = ["--model-path", str(folder), "--device", "cpu", "--speculative-algorithm", "NEXTN",
            "--speculative-draft-model-path", str(folder), "--speculative-adaptive"]  # fmt: skip
    wanted = {
        "plain": [*base, "--speculative-adaptive-config", str(steps), "--max-running-requests", "256"],
        "default": base,
        "two-batch": [*base, "--enable-two-batch-overlap", "--moe-a2a-backend", "deepep"],
        "elsewhere": [*base, "--speculative-adaptive-config", str(steps)],
    }
    ran = subprocess.run(
        [*program("-c", RESOLVED), json.dumps(wanted)], capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    for part in ran.stderr.split("begin ")[1:]:
        name, _, log = part.partition("\n")
        found[name]["log"] = log
    found["elsewhere"]["speculative_adaptive_config"] = "/in/a/container/steps.json"
    return found


class Info(ThreadingHTTPServer):
    """Answers one path with one body."""

    def __init__(self, path: str, body: object, api_key: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                denied = api_key and self.headers.get("Authorization") != f"Bearer {api_key}"
                self.send_response(401 if denied else 200 if self.path == path else 404)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)


def running(info: object, path: str = "/server_info") -> list[Check]:
    with Info(path, info) as server:
        found, checks = read_running(server.url)
        return [*checks, *(check_server(found, Settings()) if found is not None else ())]


def test_what_sglang_made_of_good_arguments(resolved: dict[str, dict[str, Any]]) -> None:
    checks = running(resolved["plain"])
    assert only(checks, "--speculative-adaptive is in force").outcome == "ok"
    assert only(checks, "candidates 0, 1, 3").outcome == "ok"
    assert only(checks, "--max-running-requests 256").outcome == "ok"
    assert only(checks, "attention backend torch_native").outcome == "warning"  # what SGLang takes on a CPU
    assert "problem" not in outcomes(checks)


def test_an_adaptation_that_sglang_switched_off(resolved: dict[str, dict[str, Any]]) -> None:
    assert resolved["two-batch"]["speculative_adaptive"] is False
    assert resolved["two-batch"]["speculative_eagle_topk"] == 4  # and so it drafts trees, which nobody asked for
    assert only(running(resolved["two-batch"]), "--enable-two-batch-overlap").outcome == "problem"
    other = {**resolved["two-batch"], "enable_two_batch_overlap": False}  # for a reason that is not known here
    assert only(running(other), "SGLang has switched it off").outcome == "problem"
    other["launch_command"] = "--model-path m"
    assert only(running(other), "a tree of drafts (topk 4, 8 tokens)").outcome == "ok"
    other["speculative_eagle_topk"] = 1
    assert only(running(other), "--speculative-adaptive is not in force").outcome == "problem"


def test_a_capacity_that_sglang_lowered(resolved: dict[str, dict[str, Any]]) -> None:
    assert only(running(resolved["default"]), "SGLang takes 48").outcome == "warning"
    assert "takes 48" not in str(running({**resolved["plain"], "max_running_requests": 48}))  # as it was asked for
    states = [{"effective_max_running_requests_per_dp": 100}, {"effective_max_running_requests_per_dp": 128}]
    lowered = running({**resolved["plain"], "dp_size": 2, "internal_states": states})
    assert only(lowered, "runs 100 requests at a time, not 128").outcome == "warning"


def test_candidates_that_cannot_be_read_from_here(resolved: dict[str, dict[str, Any]]) -> None:
    assert only(running(resolved["elsewhere"]), "cannot be read from here").outcome == "not checked"


def test_an_untested_server(resolved: dict[str, dict[str, Any]]) -> None:
    assert only(running({**resolved["plain"], "version": "0.9"}), "0.9 is not a tested").outcome == "warning"


def test_an_older_path(resolved: dict[str, dict[str, Any]]) -> None:
    assert only(running(resolved["plain"], "/get_server_info"), "answers:").outcome == "ok"


@pytest.mark.parametrize("body", [b"not json", [1, 2], b"\xff", b"[" * 100_000])
def test_an_answer_that_is_none(body: object) -> None:
    assert only(running(body), "cannot be asked").outcome == "problem"


def test_a_url_where_nobody_is() -> None:
    assert only(read_running("http://127.0.0.1:9")[1], "cannot be asked").outcome == "problem"
    assert only(running({}, "/elsewhere"), "neither").outcome == "problem"


def test_a_server_with_an_api_key() -> None:
    with Info("/server_info", {"model_path": "m"}, api_key="secret") as server:
        denied = only(read_running(server.url)[1], "answers 401")
        assert denied.outcome == "problem"
        assert "OPENAI_API_KEY" in denied.change
        assert only(read_running(server.url, "secret")[1], "answers: m").outcome == "ok"


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.text(max_size=5), LEAF, max_size=3)
NAMES = [*KINDS, "internal_states", "launch_command", "version"]


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(NAMES), JSON), st.lists(st.dictionaries(st.text(), JSON), max_size=2))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_answer_is_judged_or_passed_over(info: dict[str, Any], states: list[Any]) -> None:
    """Whatever a server says of itself: no check fails, and each that is not well says what to change."""
    info.setdefault("internal_states", states)
    info["speculative_adaptive_config"] = "/nonexistent"
    for check in check_server(server_of(info), Settings()):
        assert check.outcome in COLOURS
        assert bool(check.change) == (check.outcome in ("warning", "problem"))


def test_a_running_server_is_looked_for_at_the_controller(steered: tuple[Controller, Agent]) -> None:
    environment = {"SPECPILOT_ENDPOINT": steered[0].endpoint}
    for model, outcome, text in (
        ("target-8b", "ok", "a server of target-8b is connected"),
        ("other", "problem", "no server of other is connected"),
    ):
        with Info("/server_info", {"model_path": model}) as server:
            checks = examine(DoctorRequest(config=steered[0].config, url=server.url), environment)
        assert only(checks, text).outcome == outcome
        assert "none given" not in str(checks)


# -- a server's log --

START = "[2026-11-30 00:13:26] server_args={'model_path': 'm', 'speculative_adaptive': False}\n"
STATES = (
    "[2026-11-30 00:13:40 TP0] Built adaptive runtime state steps=0: elapsed=3.25s, mem=0.40GB\n"
    "[2026-11-30 00:13:50 TP0] Built adaptive runtime state steps=5: elapsed=9.00s, mem=1.10GB\n"
)
IN_PLACE = "[2026-11-30 00:14:00 TP0] specpilot: plugin active on rank 0 (control, candidate steps [0, 3, 5])\n"


def logged(function: Any, begins: str) -> str:
    """A literal of ours, as the source has it."""
    source = inspect.getsource(function)
    literal = "".join(part.split('"')[1] for part in source[source.index(f'"{begins}') :].split("\n") if '"' in part)
    return literal.partition("*")[0]


def skip_line(memory: SkipMemory) -> str:
    text = logged(skip_hooks.after_init_cuda_graphs, "specpilot: K=0 is a plain decode step")
    return "[2026-11-30 00:13:58 TP0] " + text % memory + "\n"


def look(folder: Path, text: str) -> list[Check]:
    file = folder / "server.log"
    file.write_text(text)
    log, checks = open_log(file)
    return [*checks, *(check_log(log) if log is not None else ())]


def test_a_log_of_a_good_start(tmp_path: Path) -> None:
    text = START + STATES + skip_line(SkipMemory(1.25, 6.5, 4.0, 0.5, 1024)) + IN_PLACE
    checks = look(tmp_path, "an older start\n" + STATES.replace("steps=5", "steps=7") + text)
    taken = only(checks, "states beside the first took 1.50 GB (K=0 0.40, K=5 1.10)")
    assert "K=0 as a decode step 1.25 GB, 0.50 of it the ring; 6.50 GB are left" in taken.found
    assert outcomes(checks) == {"ok"}


@pytest.mark.parametrize(
    ("memory", "change"),
    [
        (SkipMemory(1.0, 0.4, 4.0, 0.5, 1024), "--speculative-adaptive-config"),
        (SkipMemory(4.0, 0.4, 4.0, 0.5, 1024), "--cuda-graph-max-bs-decode"),
        (SkipMemory(4.0, 0.4, 4.0, 3.5, 1024), "SPECPILOT_SKIP_RING_MB"),
    ],
)
def test_little_memory_names_the_option_that_gives_most_back(tmp_path: Path, memory: SkipMemory, change: str) -> None:
    other = skip_line(SkipMemory(1.0, 9.0, 4.0, 0.1, 1024)).replace("TP0", "TP1")
    check = only(look(tmp_path, START + STATES + skip_line(memory) + other + IN_PLACE), "0.40 GB are left")
    assert check.outcome == "warning"
    assert change in check.change


@pytest.mark.parametrize(
    ("text", "outcome", "says"),
    [
        (STATES + IN_PLACE, "ok", "states beside the first took 1.50"),
        (IN_PLACE, "not checked", "the log has no line"),
        (IN_PLACE, "ok", "the plugin is active"),
        ("", "problem", "does not say that the plugin is active"),
        ("speculative_adaptive disabled: enable_pdmux=True is not supported (a). Falling back to static speculative "
         "params.\n", "problem", "switched --speculative-adaptive off: enable_pdmux=True"),
        ("specpilot: K=0 stays SGLang's own verify of width 1 on this server: the model uses MLA attention\n",
         "warning", "the model uses MLA attention"),
        ("specpilot: this server does not adapt its speculation, so nothing could be steered: x\n", "problem",
         "ended the start: this server does not adapt"),
        ("specpilot: no GPU memory left for the decode graphs of K=0 (CUDA out of memory): lower x\n", "problem",
         "ended the start: no GPU memory left"),
    ],
)  # fmt: skip
def test_what_a_log_says(tmp_path: Path, text: str, outcome: str, says: str) -> None:
    assert only(look(tmp_path, START + text), says).outcome == outcome


def test_a_log_that_is_missing_or_no_text(tmp_path: Path) -> None:
    assert only(open_log(None)[1], "name one with --log").outcome == "not checked"
    assert only(open_log(tmp_path)[1], "Is a directory").outcome == "problem"
    (tmp_path / "server.log").write_bytes(os.urandom(100_000))
    log = read_log(tmp_path / "server.log")
    assert only(check_log(log), "does not say").outcome == "problem"


def test_what_sglang_logs_of_its_arguments(tmp_path: Path, resolved: dict[str, dict[str, Any]]) -> None:
    """The newest start counts, with what SGLang had said just before its arguments."""
    file = tmp_path / "server.log"
    switched_off, plain, default = (resolved[name]["log"] for name in ("two-batch", "plain", "default"))
    file.write_text(plain + switched_off)
    log = read_log(file)
    assert log.disabled.startswith("enable_two_batch_overlap=True")
    assert log.capacity_is_default
    assert only(check_log(log), "switched --speculative-adaptive off").outcome == "problem"
    assert only(check_log(log), "SGLang takes 48").outcome == "warning"
    file.write_text(switched_off + plain + IN_PLACE)
    log = read_log(file)
    assert (log.disabled, log.capacity_is_default) == ("", False)
    checks = examine(DoctorRequest(log=file), {})
    assert only(checks, "--max-running-requests 256").area == "running server"
    assert only(checks, "--speculative-adaptive is in force").outcome == "ok"
    file.write_text(switched_off + default)
    assert read_log(file).disabled == ""
    assert read_log(file).capacity_is_default


def test_the_lines_are_those_of_this_sglang() -> None:
    import sglang

    assert sglang.__file__ is not None
    srt = Path(sglang.__file__).parent / "srt"
    worker = (srt / "speculative" / "eagle_worker_v2.py").read_text()
    for piece in ("Built adaptive runtime state steps={speculative_num_steps}: ", "elapsed={time.perf_counter() - tic:",
                  "mem={(before_mem - after_mem):.2f}GB"):  # fmt: skip
        assert piece in worker
    hook = (srt / "arg_groups" / "speculative_hook.py").read_text()
    assert "speculative_adaptive disabled: {reason}. " in hook
    assert '"Falling back to static' in hook
    assert "max_running_requests=48" in hook
    assert 'logger.info(f"server_args={' in (srt / "entrypoints" / "engine.py").read_text()
    assert "specpilot: plugin active on rank" in inspect.getsource(step_hooks)


# -- GPU memory --

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("used", "ring", "fraction", "started", "outcome", "text"),
    [
        (1 * GB, GB // 2, None, False, "ok", "1.0 of 80.0 GB are used; the ring may take 0.5 GB"),
        (1 * GB, GB // 2, 0.9, False, "ok", "leaves 8.0 GB"),
        (1 * GB, 9 * GB, 0.9, False, "problem", "leaves 8.0 GB"),
        (79 * GB, 2 * GB, None, False, "warning", "less is free than SPECPILOT_SKIP_RING_MB"),
        (1 * GB, 0, None, False, "ok", "1.0 of 80.0 GB"),
        (70 * GB, GB // 2, 0.9, True, "ok", "70.0 of 80.0 GB are used"),
        (80 * GB, GB // 2, 0.9, True, "warning", "80.0 of 80.0 GB are used"),
    ],
)
def test_a_gpu(used: int, ring: int, fraction: float | None, started: bool, outcome: str, text: str) -> None:
    check = judge_gpu(Gpu(0, "H200", "GPU-7f", 80 * GB, used), ring, fraction, started)
    assert only([check], text).outcome == outcome


@pytest.mark.parametrize(
    ("devices", "indices"),
    [(None, [0, 1, 2]), ("0, 2", [0, 2]), ("GPU-b", [1]), ("", []), ("9,x", [])],
)
def test_the_gpus_that_are_visible(devices: str | None, indices: list[int]) -> None:
    gpus = [Gpu(index, "H200", f"GPU-{letter}1", 80 * GB, 0) for index, letter in enumerate("abc")]
    assert [gpu.index for gpu in visible(gpus, devices)] == indices


@pytest.mark.sglang
def test_the_gpus_of_this_machine() -> None:
    checks = list(check_gpus(Settings(), None, started=False, devices=None))
    if not Path("/proc/driver/nvidia").exists():
        with pytest.raises(OSError, match="NVML"):
            read_gpus()
        assert only(checks, "no NVIDIA driver answers here").outcome == "not checked"
        return
    gpus = read_gpus()
    assert all(0 <= gpu.used < gpu.total for gpu in gpus)
    assert [check.found.partition(":")[0] for check in checks] == [f"GPU {gpu.index} ({gpu.name})" for gpu in gpus]


# -- the command --


def test_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("SPECPILOT_ENDPOINT", raising=False)
    assert cli.main(["doctor", "--json", "--", *EAGLE]) == 0
    assert cli.main(["doctor", "--json", "--", *EAGLE, "--bogus"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_json_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--url", "http://127.0.0.1:9"]) == 1
    checks = msgspec.json.decode(capsys.readouterr().out, type=list[Check])
    assert only(checks, "http://127.0.0.1:9").outcome == "problem"


def test_what_is_printed_is_what_was_found() -> None:
    console = Console(width=20)
    checks = [Check("a", "ok", "[red]x[/]"), Check("a", "problem", "long " * 20, "do [it]"), Check("b", "ok", "y")]
    with console.capture() as captured:
        print_checks(checks, console)
    assert captured.get().splitlines() == [
        "a",
        "  ok          [red]x[/]",
        "  problem     " + "long " * 20,
        "              → do [it]",
        "b",
        "  ok          y",
        "2 ok, 1 problem",
    ]
