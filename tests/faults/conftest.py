"""Two servers of two ranks each and one controller, which all fault tests of a run share, and which end with them.

That they are shared is part of the test: whatever was done to them, nothing may need a server's restart.
"""

from __future__ import annotations

import resource
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.proxy import Proxy
from tests.faults.rig import STALE_SECONDS, Controller, Host, Server, limit
from tests.support.waiting import until

MAX_CALLS = 200
"""Functions that the hooks call in one pass, Python's and C's: about 50, and a few for each request that ends
in it, of which there are 20 at most. No load of the machine changes them, as it does the time they take."""

CALM = {"clients": 20, "pace": 0.005, "prefill": 0.0, "interval": 1, "flood": 0, "stale": STALE_SECONDS}
"""What the ranks are told, see ``ranks.RankServer``, where nothing is done to them."""

ALLOWED = frozenset(
    [
        "<string>",
        "agent.py",
        "batch.py",
        "broadcast.py",
        "command.py",
        "context.py",
        "link.py",
        "ranks.py",
        "recorder.py",
        "server.py",
        "shifted.py",
        "table_policy.py",
        "Struct.unpack_from",
        "_bisect.bisect_left",
        "builtins.getattr",
        "builtins.len",
        "builtins.max",
        "builtins.min",
        "builtins.round",
        "builtins.sorted",
        "builtins.sum",
        "deque.append",
        "deque.popleft",
        "dict.get",
        "dict.pop",
        "list.append",
        "set.difference",
        "set.union",
        "time.monotonic",
        "type.__new__",
    ]
)
"""What the hooks may call on the scheduler thread: nothing that locks, waits, allocates much or does I/O."""


@dataclass
class Scene:
    """What a fault is done to."""

    controller: Controller
    direct: Server
    proxied: Server
    proxy: Proxy

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.direct, self.proxied

    def in_command(self, server: Server) -> bool:
        """Does this server obey a table of the controller that runs now?"""
        if not self.controller.answers():
            return False
        found = [s for s in self.controller.status().servers if s.server == f"{server.folder.name}/0"]
        return bool(
            found
            and found[0].source == "TABLE"
            and found[0].table is not None
            and server.stats()["source"] == "TABLE"
            and server.stats()["epoch"] == found[0].table.epoch
        )

    def recovered(self) -> None:
        """Wait until the controller is back in command of both servers; how soon, benchmarks/soak.py measures."""
        for server in self.servers:
            until(lambda server=server: self.in_command(server), what=f"command of {server.folder.name}")

    def calm(self) -> None:
        """Undo whatever a fault that failed has left."""
        for server in self.servers:
            for name, value in CALM.items():
                server.command(name, value)
        self.proxy.release()
        process = self.controller.process
        if process is None or process.poll() is not None:
            self.controller.configure()
            self.controller.start()
        self.controller.hit(signal.SIGCONT)
        limit(self.controller.pid, resource.RLIMIT_FSIZE, None)


@pytest.fixture(scope="package")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="faults-") as path:  # short: the path of a socket holds 107 bytes
        yield Path(path)


@pytest.fixture(scope="package")
def host(folder: Path) -> Iterator[Host]:
    made = Host(folder)
    yield made
    made.stop()


@pytest.fixture(scope="package")
def shared(folder: Path, host: Host) -> Iterator[Scene]:
    controller = Controller(folder).start()
    proxy = Proxy(folder / "front.ipc", folder / "c.ipc")
    proxy.start()
    direct = Server(host, folder / "direct", controller.endpoint, 2)
    proxied = Server(host, folder / "proxied", f"ipc://{folder}/front.ipc", 2)
    scene = Scene(controller, direct, proxied, proxy)
    yield scene
    controller.end(signal.SIGKILL)
    for server in scene.servers:
        server.kill()
    proxy.stop()


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    """Both servers decode under the controller's command; afterwards all that may never happen has not."""
    shared.calm()
    shared.recovered()
    for server in shared.servers:
        server.command("meter")
    yield shared
    for server in shared.servers:
        unharmed(server)


def unharmed(server: Server) -> None:
    """No exception, no disagreement, no late fallback, and no more work on the scheduler thread than ever."""
    stats = server.until(lambda s: s["calls_turns"], "a turn whose calls are counted")
    assert server.died() == []
    assert server.errors() == []
    assert stats["counters"]["hook_failures"] == 0
    assert stats["halt_reason"] == ""
    assert server.compare() == 0
    assert stats["worst_fallback_passes"] <= 1
    assert stats["calls_max"] <= MAX_CALLS
    assert set(stats["called"]) <= ALLOWED
