"""What the page, the metrics and ``specpilot status`` cost a controller of ten servers.

    python -m benchmarks.web_load --out benchmarks/web_load.json

A real controller with ``goodput`` and ten servers that each send 20 steps a second at batch 16, of 28 captured
sizes and three context regions. Its CPU time is read from the kernel with nobody looking, with a browser on the page,
and with ten readers that poll as the page does. Scrapes and ``specpilot status`` are timed one after the other.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specpilot.controller.simulation.surface import H200_8B
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from tests.support.browser import browser
from tests.support.messages import record
from tests.support.web_rig import Rig, running

SERVERS = 10
STEPS_PER_SECOND = 20.0
BATCH = 16
SCRAPES = 100
STATUSES = 20


class Server:
    """The link of one server, fed with steps; it takes no table, since nothing runs here."""

    def __init__(self, endpoint: str, number: int) -> None:
        settings = Settings(endpoint=endpoint)
        self.agent = Agent(settings, TablePolicy(settings, (0, 1, 3), 3))
        self.agent.start(
            ServerFacts(
                f"gpu-{number}:30000",
                model=f"model {number}",
                captured_batch_sizes=H200_8B.captured_batch_sizes,
                max_running_requests=64,
                context_length=8192,
                overlap=True,
            )
        )
        self.seq = 0

    def step(self) -> None:
        """Send one record; every K in turn, in blocks of eight."""
        steps = (0, 1, 3)[self.seq // 8 % 3]
        one = record(
            record_seq=self.seq,
            step=self.seq + 1,
            time=time.time(),
            batch_size=BATCH,
            padded_batch_size=BATCH,
            context_tokens=500 * BATCH,
            steps=steps,
            proposed_steps=steps,
            draft_tokens=steps + 1,
            accepted_drafts=[(self.seq + row) % (steps + 1) for row in range(BATCH)],
            seconds=H200_8B.decode_seconds(steps, BATCH) * (1.0 + 0.01 * (self.seq % 3)),
        )
        self.agent._queue.put(one)
        self.seq += 1


def feed(servers: list[Server], stopping: threading.Event) -> None:
    while not stopping.wait(1.0 / STEPS_PER_SECOND):
        for server in servers:
            server.step()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(rig: Rig, seconds: float) -> float:
    """Return the share of a core that the controller takes from now on."""
    before, begun = cpu_seconds(rig.controller.pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(rig.controller.pid) - before) / (time.monotonic() - begun)


class Reader(threading.Thread):
    """Polls as the page does, over one connection."""

    def __init__(self, rig: Rig, number: int) -> None:
        super().__init__(daemon=True)
        self._host = rig.url.removeprefix("http://")
        self._path = f"/api/view?server=gpu-{number}:30000/0"
        self.reads = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._host)
        while not self.stopping.wait(0.4):
            connection.request("GET", self._path)
            connection.getresponse().read()
            self.reads += 1


def timed(do: Callable[[], object], times: int) -> dict[str, float]:
    """Return the least, the median and the most, in milliseconds."""
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        do()
        spent.append(1e3 * (time.perf_counter() - begun))
        time.sleep(0.25)  # else one snapshot would answer several
    return {"least": round(min(spent), 1), "median": round(statistics.median(spent), 1), "most": round(max(spent), 1)}


def scrape(rig: Rig) -> int:
    connection = http.client.HTTPConnection(rig.url.removeprefix("http://"))
    connection.request("GET", "/metrics")
    body = connection.getresponse().read()
    connection.close()
    return len(body)


def measured(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), servers=()) as rig:
        servers = [Server(rig.endpoint, number) for number in range(SERVERS)]
        stopping = threading.Event()
        feeder = threading.Thread(target=feed, args=(servers, stopping), daemon=True)
        feeder.start()
        time.sleep(30.0)  # all cells are decided, and what is new is settled
        found: dict[str, Any] = {"servers": SERVERS, "steps_per_second": SERVERS * STEPS_PER_SECOND}
        status = [sys.executable, "-m", "specpilot.controller.cli", "status", "--endpoint", rig.endpoint]
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["status_ms"] = timed(lambda: subprocess.run(status, check=True, stdout=subprocess.DEVNULL), STATUSES)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime
        found["status_cpu_ms"] = round(1e3 * cpu / STATUSES, 1)
        found["scrape_ms"] = timed(lambda: scrape(rig), SCRAPES)
        found["scrape_bytes"] = scrape(rig)
        found["share_nobody"] = round(share(rig, seconds), 4)
        with browser() as chromium:
            page = chromium.new_page()
            page.goto(f"{rig.url}/")
            page.wait_for_selector("[data-cell]")
            updates = "Number(document.documentElement.dataset.updates)"
            before, begun = page.evaluate(updates), time.monotonic()
            found["share_browser"] = round(share(rig, seconds), 4)
            found["updates_per_second"] = round((page.evaluate(updates) - before) / (time.monotonic() - begun), 2)
        readers = [Reader(rig, number) for number in range(SERVERS)]
        for reader in readers:
            reader.start()
        found["share_ten_readers"] = round(share(rig, seconds), 4)
        for reader in readers:
            reader.stopping.set()
        found["share_nobody_again"] = round(share(rig, seconds), 4)
        stopping.set()
        feeder.join()
        for server in servers:
            server.agent.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement of CPU time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average": round(os.getloadavg()[0], 1),
        **measured(options.seconds),
    }
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
