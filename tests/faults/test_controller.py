"""What may happen to the controller's process, while two servers decode."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from specpilot.sglang_hooks.wire import StatusRequest, encode
from tests.faults.conftest import CALM, Scene, unharmed
from tests.faults.rig import ENVIRONMENT, LEASE_SECONDS, Host, Server, limit
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_started_again(how: int, scene: Scene) -> None:
    scene.controller.end(how)
    for server in scene.servers:
        server.source_is("FALLBACK")
        assert server.fresh()["steps"] == 3
    scene.controller.start()
    scene.recovered()


def test_killed_and_started_again_within_the_lease(scene: Scene) -> None:
    epochs = [server.stats()["epoch"] for server in scene.servers]
    scene.controller.end(signal.SIGKILL)
    scene.controller.start()
    scene.recovered()
    assert all(server.stats()["epoch"] > epoch for server, epoch in zip(scene.servers, epochs, strict=True))


@pytest.mark.parametrize("leases", [0.3, 1.5, 4.0], ids=["within-the-lease", "stale", "fallback"])
def test_stopped_and_continued(leases: float, scene: Scene) -> None:
    if 1 < leases < 2:
        scene.direct.command("stale", 1e6)  # so that nobody can look too late
    expiries = scene.direct.fresh()["lease_expiries"]
    scene.controller.hit(signal.SIGSTOP)
    if leases > 1:
        scene.direct.source_is("STALE" if leases < 2 else "FALLBACK")
        assert scene.direct.stats()["lease_expiries"] == expiries + 1
    else:
        time.sleep(leases * LEASE_SECONDS)
    scene.controller.hit(signal.SIGCONT)
    scene.recovered()


def test_restarted_with_another_configuration(scene: Scene) -> None:
    scene.controller.end()
    scene.controller.configure(policy='name = "static"\nsteps = 1', lease=4.0)
    scene.controller.start()
    scene.recovered()
    for server in scene.servers:
        assert server.fresh()["steps"] == 1
    scene.controller.end()
    scene.controller.configure()
    scene.controller.start()
    scene.recovered()
    for server in scene.servers:
        server.until(lambda stats: stats["steps"] == 0, "20 requests at a threshold of 12")


def test_a_configuration_that_is_wrong_is_refused_and_the_servers_wait_at_their_fallback(scene: Scene) -> None:
    scene.controller.end()
    scene.controller.configure(policy='name = "static"\nsteps = -1')
    scene.controller.start(wait=False)
    assert scene.controller.process is not None
    assert scene.controller.process.wait(PATIENCE) == 2
    scene.direct.source_is("FALLBACK")
    scene.controller.configure()
    scene.controller.start()
    scene.recovered()


def test_a_second_controller_on_the_endpoint_is_refused(scene: Scene) -> None:
    epochs = [server.stats()["epoch"] for server in scene.servers]
    second = subprocess.run(
        [sys.executable, "-m", "specpilot.controller.cli", "controller", "--config", str(scene.controller.config)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert second.returncode == 2
    assert "another specpilot controller" in second.stderr
    scene.recovered()
    assert [server.stats()["epoch"] for server in scene.servers] == epochs


@pytest.mark.parametrize("clock", ["wall", "monotonic"])
@pytest.mark.parametrize("seconds", [86_400.0, -86_400.0], ids=["on", "back"])
def test_clocks_jump(clock: str, seconds: float, scene: Scene) -> None:
    """The monotonic one goes on at once by a day where a machine was paused; it never goes back."""
    if clock == "monotonic" and seconds < 0:
        pytest.skip("CLOCK_MONOTONIC never does")
    scene.controller.shift(clock, seconds)
    scene.recovered()
    scene.direct.command("shift", (clock, seconds))
    scene.direct.fresh()
    scene.recovered()
    if clock == "wall":
        scene.controller.shift(clock, -seconds)
        scene.direct.command("shift", (clock, -seconds))
        scene.recovered()


def test_out_of_file_descriptors(scene: Scene) -> None:
    """libzmq ends a process whose ipc:// socket cannot accept for want of descriptors: it must not come to that."""
    soft, hard = resource.prlimit(scene.controller.pid, resource.RLIMIT_NOFILE)
    assert soft == hard  # as many as the system gives; `ulimit -n` is 1024 where nobody thought of it
    limit(scene.controller.pid, resource.RLIMIT_NOFILE, 3)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(context.socket(zmq.DEALER))
            client.setsockopt(zmq.LINGER, 0)
            client.connect(scene.controller.endpoint)
        assert scene.controller.process is not None
        assert scene.controller.process.wait(PATIENCE) == -signal.SIGABRT
    for server in scene.servers:
        server.source_is("FALLBACK")
    scene.controller.start()
    scene.recovered()


def test_clients_that_ask_and_never_read(scene: Scene) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVBUF, 4096)
        client.connect(scene.controller.endpoint)
        for _ in range(3000):
            client.send(encode(StatusRequest()))
        scene.recovered()
    scene.recovered()


# -- the disk --


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a file system; the limit on file sizes is tested all the same")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _trace_fails_and_recovers(scene: Scene, cure: Callable[[], object]) -> None:
    until(lambda: scene.controller.status().trace_error, what="an error of the trace")
    until(lambda: scene.controller.status().trace_lost, what="a count of what is not written")
    scene.recovered()
    cure()
    until(lambda: not scene.controller.status().trace_error, what="the trace's recovery")
    written = scene.controller.status().trace_written
    until(lambda: scene.controller.status().trace_written > written, what="new records in the trace")
    scene.recovered()


def test_a_full_disk(scene: Scene, small_disk: Path) -> None:
    _on_trace(scene, small_disk / "trace")
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    _trace_fails_and_recovers(scene, filler.unlink)
    _on_trace(scene, scene.controller.folder / "trace")


def test_files_may_not_grow(scene: Scene) -> None:
    """The log among them: what the controller wants to say then is lost, and nothing else."""
    limit(scene.controller.pid, resource.RLIMIT_FSIZE, 0)
    _trace_fails_and_recovers(scene, lambda: limit(scene.controller.pid, resource.RLIMIT_FSIZE, None))


def test_a_directory_that_cannot_be_written_any_more(scene: Scene) -> None:
    """Not even by root: /sys takes no folders."""
    trace, away = scene.controller.folder / "trace", scene.controller.folder / "away"

    def cure() -> None:
        if trace.is_symlink():
            trace.unlink()
            away.rename(trace)

    _on_trace(scene, trace, "segment_bytes = 65536")
    trace.rename(away)
    trace.symlink_to("/sys")
    try:
        _trace_fails_and_recovers(scene, cure)
    finally:
        cure()
        _on_trace(scene, trace)


def _on_trace(scene: Scene, trace: Path, options: str = "") -> None:
    scene.controller.end()
    scene.controller.trace = trace
    scene.controller.configure(trace=options)
    scene.controller.start()
    scene.recovered()


# -- four ranks --


def test_four_ranks_agree_through_kills_and_stops(scene: Scene, host: Host, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = Server(host, scene.controller.folder / "four", scene.controller.endpoint, 4)
        stack.callback(server.kill)
        server.command("clients", 20)
        server.command("pace", 0.002)
        for fault in range(4):
            until(lambda: scene.in_command(server), what="command of four ranks")
            if fault % 2:
                scene.controller.end(signal.SIGKILL)
                server.source_is("STALE", "FALLBACK")
                scene.controller.start()
            else:
                scene.controller.hit(signal.SIGSTOP)
                server.command("stale", 1e6 if fault else CALM["stale"])
                server.source_is("STALE" if fault else "FALLBACK")
                scene.controller.hit(signal.SIGCONT)
                server.command("stale", CALM["stale"])
        until(lambda: scene.in_command(server), what="command of four ranks")
        server.until(lambda stats: stats["confirmed_ranks"] == 4, "a comparison of four ranks")
        unharmed(server)
        assert server.decisions > 100
    until(lambda: not any(map(psutil.pid_exists, server.pids)), what="the end of what was killed")
