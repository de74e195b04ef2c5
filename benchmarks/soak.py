"""Random faults, by the thousand, to a controller and the wire to it, while a server of two ranks decodes.

    python benchmarks/soak.py --faults 10000 --json benchmarks/soak.json

The parts are those of ``tests/faults``: the hooks in real processes whose receiving pass, request broadcast and
gloo are SGLang's own (only the GPU takes no time), a proxy that breaks the wire, and ``specpilot controller``.
Steps are paced, so that a server that waits for anything shows in its step rate; every tenth of the faults is
followed by a calm spell with the same load, and ``step_rate_ratio`` compares the two.

Faults come from ``--seed``, in the shares of ``FAULTS``. A process takes about a second to start, so kills and
restarts are 2 % of them. After each that takes the controller out of command, or may, it is waited for until it is
back, from the moment of the cure: for a restart that is when the new process listens.

Exits with 1 if a bound of ``violations`` does not hold, after the figures are written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.trace.info import trace_info
from specpilot.sglang_hooks.wire import MAX_MESSAGE_BYTES, MAX_TABLE_BYTES, WIRE_VERSION, Lease, encode
from tests.faults.proxy import Direction, Proxy
from tests.faults.rig import Controller, Host, Server, limit
from tests.support.messages import record, table
from tests.support.waiting import until

PACE_SECONDS = 0.004
SEGMENTS = 20
"""Stretches of faults, each followed by a calm one."""
CALM_SECONDS = 3.0
HEARD_SECONDS = 0.5
"""A server that decodes is heard every 20 ms."""
CALM_RECORDS_SECONDS = 0.5
"""From the last record of a calm spell to the next fault: by then it is in the trace."""
WAIT_SECONDS = 30.0
LEASE_SECONDS = 0.6
CONFIGURATIONS = (
    'name = "threshold"\nthreshold = 12\nsteps = 3\nband = 2',
    'name = "threshold"\nthreshold = 40\nsteps = 1\nband = 2',
    'name = "static"\nsteps = 1',
    'name = "goodput"',
)


class Soak:
    """One run: a controller, the proxy before it, a server, and what was seen of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draws = random.Random(seed)
        self.controller = Controller(folder, policy=CONFIGURATIONS[0], lease=LEASE_SECONDS).start()
        self.proxy = Proxy(folder / "front.ipc", folder / "c.ipc")
        self.proxy.start()
        self.host = Host(folder)
        self.server = Server(self.host, folder / "s", f"ipc://{folder}/front.ipc", 2, queue_records=2000)
        self.server.command("clients", 20)
        self.server.command("pace", PACE_SECONDS)
        self.recoveries: list[tuple[float, str]] = []
        self.doing = "start"
        self.disagreements = 0
        self.calm_records: list[tuple[int, int]] = []
        """Numbers of those made in calm spells, first and one beyond the last."""
        self.controller_deaths = 0
        until(lambda: self.controller.status().trace_written, WAIT_SECONDS, what="the first record in the trace")

    # -- faults --

    def garbage(self) -> None:
        self._inject(self._direction(), *[self.draws.randbytes(self.draws.randrange(400)) for _ in range(4)])

    def garbage_of_this_version(self) -> None:
        self._inject(self._direction(), bytes((WIRE_VERSION,)) + self.draws.randbytes(self.draws.randrange(400)))

    def truncated(self) -> None:
        share = self.draws.random()
        self._tamper(self._direction(), lambda body: [body[: int(share * len(body))]])

    def flipped_bit(self) -> None:
        at, bit = self.draws.random(), 1 << self.draws.randrange(8)

        def flip(body: bytes) -> list[bytes]:
            changed = bytearray(body)
            if changed:
                changed[int(at * len(changed))] ^= bit
            return [bytes(changed)]

        # Not of records: a number that is wrong but possible would be written, and look like a loss.
        self._tamper("to_hook", flip)

    def lost(self) -> None:
        self._tamper("to_hook", lambda _: [])

    def replayed(self) -> None:
        self._inject("to_hook", *self.proxy.seen["to_hook"])

    def reordered(self) -> None:
        epoch = self._epoch()
        newer = encode(table(epoch + 2, self.draws.choice([0, 1, 3]), lease_seconds=0.3))
        self._inject("to_hook", newer, encode(table(epoch + 1, 1)), encode(Lease(epoch, 5.0)))

    def for_another_server(self) -> None:
        self._inject("to_hook", encode(table(self._epoch() + 1, self.draws.choice([2, 4, 7]))))

    def lie(self) -> None:
        changes: dict[str, Any] = self.draws.choice(
            [
                {"lease_seconds": float("nan")},
                {"lease_seconds": 1e-6},
                {"keep": [[9]]},
                {"batch_edges": [3, 3], "choice": [1] * 3, "keep": [[]] * 3},
                {"explore": {0: [(1, 2.0)]}},
                {"block_steps": 0},
            ]
        )
        self._inject("to_hook", encode(table(self._epoch() + self.draws.choice([1, 1 << 50]), **changes)))

    def valid_lie(self) -> None:
        """Obeyed until the controller, which hears of it, sends a newer one."""
        self._inject("to_hook", encode(table(self._epoch() + self.draws.randrange(1, 50), 1, lease_seconds=0.2)))

    def insane_record(self) -> None:
        self._inject("to_controller", bytes((WIRE_VERSION,)) + encode(record_batch(seconds=float("nan")))[1:])

    def clock(self) -> None:
        seconds = self.draws.choice([-1, 1]) * 10 ** self.draws.uniform(0, 5)
        if self.draws.random() < 0.5:
            self.controller.shift("wall", seconds)
        else:
            self.server.command("shift", ("wall", seconds))

    def pause(self) -> None:
        """The machine stood still: monotonic clocks go on at once by as much."""
        seconds = 10 ** self.draws.uniform(-1, 2)
        self.server.command("shift", ("monotonic", seconds))
        self.controller.shift("monotonic", seconds)
        self.recover()

    def flood_of_records(self) -> None:
        self.server.command("flood", self.draws.choice([10, 100]))
        time.sleep(0.02)
        self.server.command("flood", 0)

    def receive_interval(self) -> None:
        self.server.command("interval", self.draws.choice([1, 1, 2, 5, 20]))

    def prefill(self) -> None:
        self.server.command("prefill", self.draws.choice([0.0, 0.0, 0.01]))

    def idle(self) -> None:
        self.server.command("clients", 0)
        self.server.command("clients", self.draws.choice([4, 12, 20, 20, 64]))

    def no_zmtp(self) -> None:
        connections = self.proxy.connections
        direction = self._direction()
        until(lambda: self.proxy.inject_bytes(direction, b"\xff" * 32), WAIT_SECONDS, what="a connection to break")
        self.recover(connections)

    def oversized(self) -> None:
        connections = self.proxy.connections
        direction = self._direction()
        self._inject(direction, bytes(1 + (MAX_TABLE_BYTES if direction == "to_hook" else MAX_MESSAGE_BYTES)))
        self.recover(connections)

    def cut(self) -> None:
        connections = self.proxy.connections
        self.proxy.cut()
        self.recover(connections)

    def held(self) -> None:
        self.proxy.hold(self._direction())
        time.sleep(self.draws.uniform(0.0, 1.5 * LEASE_SECONDS) * self.draws.random())
        self.recover()

    def stopped(self) -> None:
        self.controller.hit(signal.SIGSTOP)
        time.sleep(3.0 * LEASE_SECONDS * self.draws.random() ** 3)
        self.controller.hit(signal.SIGCONT)
        self.recover()

    def rank_stopped(self) -> None:
        pid = self.draws.choice(self.server.pids)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05 * self.draws.random())
        os.kill(pid, signal.SIGCONT)

    def full_disk(self) -> None:
        limit(self.controller.pid, resource.RLIMIT_FSIZE, 0)
        time.sleep(0.15)
        limit(self.controller.pid, resource.RLIMIT_FSIZE, None)

    def server_without_descriptors(self) -> None:
        connections = self.proxy.connections
        limit(self.server.pids[0], resource.RLIMIT_NOFILE, 3)
        self.proxy.cut()
        time.sleep(0.3 * self.draws.random())
        limit(self.server.pids[0], resource.RLIMIT_NOFILE, None)
        self.recover(connections)

    def killed(self) -> None:
        self.controller.end(signal.SIGKILL)
        time.sleep(2.0 * LEASE_SECONDS * self.draws.random() ** 2)
        self._start()

    def restarted_otherwise(self) -> None:
        self.controller.end(signal.SIGTERM)
        self.controller.configure(policy=self.draws.choice(CONFIGURATIONS), lease=LEASE_SECONDS)
        self._start()

    def second_controller(self) -> None:
        second = Controller.__new__(Controller)
        second.__dict__.update(self.controller.__dict__)
        second.start(wait=False)
        assert second.process is not None
        if second.process.wait(WAIT_SECONDS) != 2:
            raise AssertionError("a second controller was not refused")

    # -- what they have in common --

    def _direction(self) -> Direction:
        return self.draws.choice(["to_hook", "to_controller"])  # type: ignore[return-value]

    def _inject(self, direction: Direction, *bodies: bytes) -> None:
        until(lambda: self.proxy.inject(direction, *bodies), WAIT_SECONDS, what="a connection to inject into")

    def _tamper(self, direction: Direction, change: Callable[[bytes], list[bytes]]) -> None:
        self.proxy.tamper(direction, change)
        until(lambda: not self.proxy.waiting(), WAIT_SECONDS, what="a message to tamper with")

    def _epoch(self) -> int:
        return int(self.server.stats()["epoch"])

    def _start(self) -> None:
        self.controller.start()
        self.recover()

    def in_command(self) -> bool:
        """Does the server obey a table of the controller that runs now?"""
        try:
            status = fetch_status(self.controller.endpoint, 1.0)
        except StatusError:
            return False
        stats = self.server.stats()
        return any(
            s.source == "TABLE"
            and s.silent_seconds < HEARD_SECONDS
            and s.table is not None
            and s.table.epoch == stats["epoch"]
            and stats["source"] == "TABLE"
            for s in status.servers
        )

    def recover(self, connections: int = -1) -> None:
        """Wait until the controller is back in command, over a newer connection than there were before."""
        self.proxy.release()
        begun = time.perf_counter()
        back = lambda: self.proxy.connections > connections and self.in_command()  # noqa: E731
        until(back, WAIT_SECONDS, what="the controller's command")
        self.recoveries.append((round(time.perf_counter() - begun, 3), self.doing))

    def check(self) -> None:
        """What must hold at every moment."""
        self.disagreements += self.server.compare()
        if died := self.server.died():
            raise AssertionError(f"a rank ended: {died}")
        process = self.controller.process
        if process is not None and process.poll() is not None:
            self.controller_deaths += 1
            self._start()

    def rate(self, during: Callable[[], None]) -> tuple[int, float]:
        """Decode steps and seconds while ``during`` runs, without pauses that are part of a fault to the ranks."""
        before = self.server.fresh()
        during()
        after = self.server.fresh()
        return after["decodes"] - before["decodes"], after["at"] - before["at"]

    def calm(self) -> None:
        for name, value in (("interval", 1), ("prefill", 0.0), ("flood", 0), ("clients", 20), ("pace", PACE_SECONDS)):
            self.server.command(name, value)
        self.recover()
        # What a full disk has cost is counted, but it would look like a loss in the calm.
        until(lambda: not self.controller.status().trace_error, WAIT_SECONDS, what="the trace's recovery")
        time.sleep(CALM_RECORDS_SECONDS)

    def processes(self) -> dict[str, dict[str, float]]:
        """Resident memory and descriptors."""
        found = {}
        pids = {"rank0": self.server.pids[0], "rank1": self.server.pids[1], "controller": self.controller.pid}
        for name, pid in pids.items():
            process = psutil.Process(pid)
            found[name] = {"rss_mb": process.memory_info().rss / 1e6, "descriptors": process.num_fds()}
        return found

    def stop(self) -> None:
        self.server.kill()
        self.host.stop()
        if self.controller.process is not None and self.controller.process.poll() is None:
            self.controller.end(signal.SIGKILL)
        self.proxy.stop()


def record_batch(**changes: Any) -> Any:
    from specpilot.sglang_hooks.wire import StepBatch

    return StepBatch([record(record_seq=0, **changes)], 0)


FAULTS: dict[str, float] = {
    "garbage": 16,
    "garbage_of_this_version": 11,
    "truncated": 6,
    "flipped_bit": 4,
    "lost": 3,
    "replayed": 8,
    "reordered": 5,
    "for_another_server": 5,
    "lie": 6,
    "valid_lie": 3,
    "insane_record": 3,
    "clock": 5,
    "flood_of_records": 3,
    "receive_interval": 3,
    "prefill": 2,
    "idle": 2,
    "rank_stopped": 2,
    "pause": 1,
    "no_zmtp": 1,
    "oversized": 1,
    "cut": 2,
    "held": 1.5,
    "stopped": 1.5,
    "full_disk": 1,
    "server_without_descriptors": 1,
    "killed": 1,
    "restarted_otherwise": 0.7,
    "second_controller": 0.3,
}
"""Share of each, in percent."""


def violations(figures: dict[str, Any]) -> list[str]:
    """Return which bounds do not hold."""
    bounds = (
        ("scheduler_exceptions", 0),
        ("rank_disagreements", 0),
        ("lost_uncounted", 0),
        ("worst_fallback_passes", 1),
        ("recovery_seconds_max", 2.0),
        ("controller_deaths", 0),
    )
    broken = [f"{name} is {figures[name]}, at most {most}" for name, most in bounds if figures[name] > most]
    if figures["step_rate_ratio"] < 0.9:
        broken.append(f"step_rate_ratio is {figures['step_rate_ratio']}, at least 0.9")
    for name, growth in figures["growth"].items():
        if growth["rss_mb"] > 30 or growth["descriptors"] > 8:
            broken.append(f"{name} grew by {growth['rss_mb']} MB and {growth['descriptors']} descriptors")
    return broken


def run(soak: Soak, faults: int, seconds: float, note: Callable[[str], None]) -> dict[str, Any]:
    """Do the faults, and return the figures but for those of the trace."""
    names, weights = list(FAULTS), list(FAULTS.values())
    done: Counter[str] = Counter()
    steps: dict[str, list[int]] = {"faulty": [], "calm": []}
    spent: dict[str, list[float]] = {"faulty": [], "calm": []}
    hook_us: dict[str, list[float]] = {"faulty": [], "calm": []}
    begun = time.monotonic()
    first: dict[str, dict[str, float]] = {}

    def measure(kind: str, during: Callable[[], None]) -> None:
        soak.server.command("meter")
        count, elapsed = soak.rate(during)
        steps[kind].append(count)
        spent[kind].append(elapsed)
        hook_us[kind].append(soak.server.stats()["hook_us_median"])

    def stretch() -> None:
        for _ in range(faults // SEGMENTS):
            if time.monotonic() - begun > seconds:
                return
            name = soak.draws.choices(names, weights)[0]
            soak.doing = name
            getattr(soak, name)()
            done[name] += 1
            if done.total() % 10 == 0:
                soak.check()

    for number in range(SEGMENTS):
        soak.calm()
        made = soak.server.stats()["records_made"]
        measure("calm", lambda: time.sleep(CALM_SECONDS))
        soak.calm_records.append((made, soak.server.stats()["records_made"]))
        time.sleep(CALM_RECORDS_SECONDS)
        if number == SEGMENTS // 5:
            first = soak.processes()
        measure("faulty", stretch)
        soak.check()
        note(
            f"{done.total():,} faults, {time.monotonic() - begun:.0f} s, {soak.server.decisions:,} decisions, "
            f"{soak.disagreements} disagreements, slowest recovery {max(soak.recoveries)}"
        )
        if time.monotonic() - begun > seconds:
            break
    soak.calm()
    last = soak.processes()
    stats = soak.server.stats()
    ratios = [
        (a / b) / (c / d)
        for a, b, c, d in zip(steps["faulty"], spent["faulty"], steps["calm"], spent["calm"], strict=True)
    ]
    return {
        "faults": done.total(),
        "faults_by_kind": dict(sorted(done.items())),
        "seconds": round(time.monotonic() - begun, 1),
        "decisions": soak.server.decisions,
        "scheduler_exceptions": stats["counters"]["hook_failures"] + len(soak.server.errors()),
        "rank_disagreements": soak.disagreements,
        "controller_deaths": soak.controller_deaths,
        "worst_fallback_passes": stats["worst_fallback_passes"],
        "lease_expiries": stats["lease_expiries"],
        "recovery_seconds_median": round(float(np.median([spent for spent, _ in soak.recoveries])), 3),
        "recovery_seconds_max": max(soak.recoveries)[0],
        "slowest_recoveries": sorted(soak.recoveries, reverse=True)[:10],
        "step_rate_ratio": round(float(np.median(ratios)), 4),
        "steps_per_second_calm": round(sum(steps["calm"]) / sum(spent["calm"]), 1),
        "hook_us_calm": round(float(np.median(hook_us["calm"])), 1),
        "hook_us_faulty": round(float(np.median(hook_us["faulty"])), 1),
        "growth": {
            name: {key: round(last[name][key] - value, 1) for key, value in figures.items()}
            for name, figures in (first or last).items()
        },
        "counters": stats["counters"],
    }


def account(soak: Soak) -> dict[str, int]:
    """End the server and the controller in peace, and compare what was made with what the trace holds."""
    soak.server.until(lambda s: s["queued"] < 100, "an empty queue", WAIT_SECONDS)
    soak.server.end()
    stats = soak.server.stats()
    time.sleep(2.0)
    soak.controller.end()
    seen: list[Any] = []
    found = trace_info([soak.controller.trace], lambda *taken: seen.append(taken[2]["record_seq"].to_numpy()))
    info = found["s/0"]
    numbers = np.concatenate(seen)
    in_calm = sum(
        end - begin - np.count_nonzero((numbers >= begin) & (numbers < end)) for begin, end in soak.calm_records
    )
    return {
        "records_made": stats["records_made"],
        "records_in_trace": len(np.unique(numbers)),
        "records_missing": info.dropped,
        "records_dropped_by_server": stats["counters"]["records_dropped"],
        "lost_uncounted": stats["records_made"] - len(np.unique(numbers)) - info.dropped + int(abs(in_calm)),
        "lost_in_calm": int(in_calm),
        "written_twice": len(numbers) - len(np.unique(numbers)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1200.0, help="ends sooner, with what was done by then")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options.seed)
        try:
            figures = run(soak, options.faults, options.seconds, lambda text: print(text, flush=True))
            figures |= account(soak)
        except AssertionError:
            os.kill(soak.server.pids[0], signal.SIGUSR1)
            time.sleep(0.5)
            print(soak.doing, soak.controller.log()[-1500:], (Path(folder) / "s" / "rank0.log").read_text()[-2500:])
            print(soak.server.stats(), soak.proxy.connections, soak.proxy.waiting())
            raise
        finally:
            soak.stop()
    figures |= {
        "seed": options.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "date": datetime.now(tz=UTC).date().isoformat(),
    }
    broken = violations(figures)
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    for text in broken:
        print("VIOLATED:", text)
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
