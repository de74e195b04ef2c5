"""Servers and controllers as processes, for tests that hurt them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import zmq

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from tests.faults import shifted
from tests.faults.command import DECISION, Command
from tests.support.waiting import PATIENCE, until
from tests.support.warm import program

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_PICKLE_IPC": "1",  # so that the harness can speak to rank 0 as a tokenizer does
}
LEASE_SECONDS = 1.5
"""Renewed three times as often: nothing runs out where a busy machine lets the controller wait for a second."""
STALE_SECONDS = 0.6


class Host:
    """The process that forks ranks; one for all servers of a test run, since it imports SGLang."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "host.log").open("w")
        self.process = subprocess.Popen(
            program("-m", "tests.faults.shifted", "tests.faults.ranks"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and line != "ready\n":
            pass

    def fork(self, **spec: Any) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()
        pids: list[int] = json.loads(self.process.stdout.readline())
        return pids

    def stop(self) -> None:
        """End it; its ranks end with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self._log.close()


class Server:
    """The ranks of one server, and what they wrote."""

    def __init__(self, host: Host, folder: Path, endpoint: str, world: int, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.world = folder, world
        chosen = {
            "server_id": folder.name,
            "stale_seconds": STALE_SECONDS,
            "min_table_interval_seconds": 0.05,
            "check_steps": 100,
        } | settings
        self.pids = host.fork(world=world, folder=str(folder), endpoint=endpoint, settings=chosen)
        self._context = zmq.Context()
        self._tokenizer = self._context.socket(zmq.PUSH)
        self._tokenizer.setsockopt(zmq.LINGER, 0)
        self._tokenizer.connect(f"ipc://{folder}/tokenizer")
        self._ended = False
        self._read = 0
        self.decisions = 0
        stats = folder / "stats.json"
        until(lambda: self.died() or (stats.exists() and stats.stat().st_size), what="the ranks' start")
        assert not (died := self.died()), died

    def command(self, name: str, value: Any = None) -> None:
        """Ask all ranks for something, by the way that requests come; see ``ranks.RankServer``."""
        self._tokenizer.send(pickle.dumps(Command(name, value)))

    def stats(self) -> dict[str, Any]:
        while True:
            text = (self.folder / "stats.json").read_text()
            with contextlib.suppress(json.JSONDecodeError):  # read while it is written
                found: dict[str, Any] = json.loads(text)
                return found

    def died(self) -> list[str]:
        """What ended a rank; nothing may."""
        gone = [] if self._ended else [f"process {pid} is gone" for pid in self.pids if not psutil.pid_exists(pid)]
        return [path.read_text() for path in sorted(self.folder.glob("rank*.died"))] + gone

    def errors(self) -> list[str]:
        """Errors that any rank logged."""
        logs = (self.folder / f"rank{rank}.log" for rank in range(self.world))
        return [line for log in logs if log.exists() for line in log.read_text().splitlines() if "ERROR" in line]

    def until(self, done: Callable[[dict[str, Any]], Any], what: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the newest stats are as wanted, and return them; a dead rank ends the wait."""

        def found() -> dict[str, Any] | None:
            stats = self.stats()
            if not done(stats):
                assert not (died := self.died()), died
                return None
            return stats

        return cast(dict[str, Any], until(found, seconds, what=lambda: f"{what}, after {self.stats()}"))

    def fresh(self, passes: int = 3) -> dict[str, Any]:
        """Wait until the scheduler has received ``passes`` more times, and return what is true then."""
        before = self.stats()["passes"]
        return self.until(lambda stats: stats["passes"] >= before + passes, "a pass of the scheduler")

    def source_is(self, *sources: str) -> dict[str, Any]:
        return self.until(lambda stats: stats["source"] in sources, f"source {sources}")

    def compare(self) -> int:
        """Compare the ranks' decisions written since the last call; return in how many they differ."""
        parts = []
        for rank in range(self.world):
            with (self.folder / f"rank{rank}.decisions").open("rb") as file:
                file.seek(self._read)
                parts.append(file.read())
        whole = min(map(len, parts)) // DECISION.size * DECISION.size
        self._read += whole
        self.decisions += whole // DECISION.size
        if all(part[:whole] == parts[0][:whole] for part in parts):
            return 0
        return sum(
            any(part[at : at + DECISION.size] != parts[0][at : at + DECISION.size] for part in parts)
            for at in range(0, whole, DECISION.size)
        )

    def end(self) -> None:
        """Let it end as a server does, its queue flushed."""
        self._ended = True
        self.command("end")
        until(lambda: not any(map(psutil.pid_exists, self.pids)), what="the ranks' end")
        self._context.destroy(linger=0)

    def kill(self) -> None:
        self._ended = True
        for pid in self.pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        self._context.destroy(linger=0)


class Controller:
    """``specpilot controller`` as an operator runs it, but for its clocks, which can be shifted."""

    def __init__(self, folder: Path, policy: str = "", trace: str = "", lease: float = LEASE_SECONDS) -> None:
        self.folder = folder
        self.endpoint = f"ipc://{folder}/c.ipc"
        self.trace = folder / "trace"
        self.config = folder / "controller.toml"
        self.configure(policy, trace, lease)
        self.process: subprocess.Popen[str] | None = None

    def configure(self, policy: str = "", trace: str = "", lease: float = LEASE_SECONDS) -> None:
        policy = policy or 'name = "threshold"\nthreshold = 12\nsteps = 3\nband = 2'
        self.config.write_text(
            f'[controller]\nendpoint = "{self.endpoint}"\nlease_seconds = {lease}\ndecide_seconds = 0.1\n'
            f"[policy]\n{policy}\n"
            f'[prior]\ndirectory = "{self.folder}/prior"\nsave_seconds = 1.0\n'
            f'[trace]\ndirectory = "{self.trace}"\nflush_seconds = 0.1\n{trace}\n'
        )

    def start(self, wait: bool = True) -> Controller:
        with (self.folder / "controller.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.faults.shifted",
                    "specpilot.controller.cli",
                    "controller",
                    "--config",
                    str(self.config),
                ],
                stderr=log,
                env=ENVIRONMENT | {"SHIFT_FILE": str(self.folder / "shift")},
                cwd=ROOT,
            )
        if wait:
            until(lambda: self.answers() or self.process.poll() is not None, what="the controller's start")  # type: ignore[union-attr]
            assert self.process.poll() is None, self.log()[-2000:]
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def answers(self) -> bool:
        try:
            fetch_status(self.endpoint, 0.5)
        except StatusError:
            return False
        return True

    def status(self) -> ControllerStatus:
        return fetch_status(self.endpoint, PATIENCE)

    def server(self, server: Server) -> ServerStatus:
        key = f"{server.folder.name}/0"
        until(lambda: any(s.server == key for s in self.status().servers), what=f"server {key} in the status")
        return next(s for s in self.status().servers if s.server == key)

    def log(self) -> str:
        return (self.folder / "controller.log").read_text()

    def hit(self, number: int) -> None:
        os.kill(self.pid, number)

    def shift(self, clock: str, seconds: float) -> None:
        shifted.shift_other(self.folder / "shift", clock, seconds)

    def end(self, how: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
            self.process.send_signal(signal.SIGCONT)
        return self.process.wait(PATIENCE)


def limit(pid: int, what: int, value: int | None) -> None:
    """Lower a limit (``resource.RLIMIT_…``) of a running process; None: take that back."""
    _, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (hard if value is None else value, hard))
