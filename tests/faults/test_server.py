"""What a server itself may be going through, with and without a controller."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest

from specpilot.controller.trace.info import trace_info
from tests.faults.command import DECISION
from tests.faults.conftest import Scene
from tests.faults.rig import LEASE_SECONDS, Controller, Host, Server, limit
from tests.support.waiting import until

pytestmark = pytest.mark.sglang


def test_out_of_file_descriptors(scene: Scene) -> None:
    """The link can make no socket then; once there are descriptors again it is back without a restart."""
    limit(scene.direct.pids[0], resource.RLIMIT_NOFILE, 3)
    scene.controller.end(signal.SIGKILL)
    scene.direct.source_is("FALLBACK")
    scene.controller.start()
    scene.direct.until(lambda s: s["counters"]["link_failures"] > 0, "a count of the link's failures")
    limit(scene.direct.pids[0], resource.RLIMIT_NOFILE, None)
    scene.recovered()


def test_a_hundred_times_the_records(scene: Scene) -> None:
    made = scene.direct.stats()["records_made"]
    scene.direct.command("flood", 100)
    scene.direct.until(lambda s: s["records_made"] > made + 20_000, "many records")
    scene.recovered()
    scene.direct.command("flood", 0)
    scene.recovered()


@pytest.mark.parametrize("interval", [7, 50])
def test_a_receive_interval_above_one(interval: int, scene: Scene) -> None:
    """The fallback is in force at the first decode after the first receiving pass: ``unharmed`` counts passes."""
    scene.direct.command("interval", interval)
    until(lambda: scene.direct.fresh(2), what="passes")
    before = scene.direct.stats()
    scene.controller.hit(signal.SIGSTOP)
    scene.direct.source_is("FALLBACK")
    after = scene.direct.stats()
    scene.controller.hit(signal.SIGCONT)
    scene.direct.command("interval", 1)
    scene.recovered()
    assert after["lease_expiries"] == before["lease_expiries"] + 1
    assert after["decodes"] - before["decodes"] > 3 * (after["passes"] - before["passes"])


def test_an_idle_server_keeps_its_table_and_loses_it_with_the_controller(scene: Scene) -> None:
    for server in scene.servers:
        server.command("clients", 0)
        server.until(lambda s: s["idle"], "an idle server")
    decodes = scene.direct.stats()["decodes"]
    expiries = scene.direct.stats()["lease_expiries"]
    leased_until = scene.direct.stats()["lease_until"]
    scene.direct.until(lambda s: s["lease_until"] > leased_until + 1.5 * LEASE_SECONDS, "leases that are renewed")
    assert scene.direct.stats()["lease_expiries"] == expiries
    scene.controller.hit(signal.SIGSTOP)
    scene.direct.source_is("FALLBACK")
    scene.controller.hit(signal.SIGCONT)
    scene.recovered()
    assert scene.direct.stats()["decodes"] == decodes
    for server in scene.servers:
        server.command("clients", 20)


@pytest.mark.parametrize("killed", [False, True], ids=["controller-lives", "controller-dies"])
def test_a_long_prefill(killed: bool, scene: Scene) -> None:
    """No pass of the loop for several leases: afterwards the table rules if it was renewed, else it does not."""
    scene.direct.compare()
    expiries = scene.direct.stats()["lease_expiries"]
    scene.direct.command("prefill", 2 * LEASE_SECONDS)
    scene.direct.until(lambda s: s["prefilling"], "a prefill")
    scene.direct.command("prefill", 0.0)
    if killed:
        scene.controller.end(signal.SIGKILL)
    passes = scene.direct.stats()["passes"]
    scene.direct.until(lambda s: s["passes"] > passes + 3, "the prefill's end")
    assert scene.direct.stats()["lease_expiries"] == expiries + killed
    if killed:
        scene.controller.start()
    scene.recovered()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still(rank: int, scene: Scene) -> None:
    os.kill(scene.direct.pids[rank], signal.SIGSTOP)
    time.sleep(2 * LEASE_SECONDS)
    os.kill(scene.direct.pids[rank], signal.SIGCONT)
    scene.recovered()


def _recorded(controller: Controller) -> int:
    """How many records the trace has, or says that it has not."""
    found = trace_info([controller.trace])["s/0"]
    return found.records + found.dropped


def _told(controller: Controller, server: Server) -> str:
    return f"the last records in the trace, after {trace_info([controller.trace])} and {server.stats()},"


def test_every_record_is_in_the_trace_or_counted(scene: Scene, host: Host) -> None:
    """A controller and a server of their own, so that all their numbers are known from the first to the last."""
    folder = scene.controller.folder / "counted"
    folder.mkdir()
    controller = Controller(folder).start()
    server = Server(host, folder / "s", controller.endpoint, 2, queue_records=500)
    try:
        server.command("clients", 20)
        server.command("pace", 0.001)
        until(lambda: controller.status().trace_written, what="the first record in the trace")
        for fault in range(6):
            server.source_is("TABLE")
            if fault % 3 == 0:
                controller.end(signal.SIGKILL)
                controller.start()
            elif fault % 3 == 1:
                controller.hit(signal.SIGSTOP)
                server.command("flood", 30)
                server.until(lambda s: s["counters"]["records_dropped"] > 0, "records dropped")
                server.command("flood", 0)
                controller.hit(signal.SIGCONT)
            else:
                controller.end()
                controller.start()
        server.source_is("TABLE")
        server.until(lambda s: s["queued"] < 100, "a queue with room")  # a gap is known by what comes after it
        server.command("clients", 0)
        idle = server.until(lambda s: s["idle"] and not s["queued"], "an empty queue")
        until(lambda: _recorded(controller) == idle["records_made"], what=lambda: _told(controller, server))
        server.end()
        made = server.stats()
        assert controller.status().trace_lost == 0
        assert controller.end() == 0
        assert _recorded(controller) == made["records_made"]
        found = trace_info([controller.trace])["s/0"]
        assert found.unreadable == 0
        assert found.dropped >= made["counters"]["records_dropped"] > 0
        assert server.died() == []
        assert server.compare() == 0
        assert (server.folder / "rank0.decisions").stat().st_size == made["decodes"] * DECISION.size
    finally:
        server.kill()
        if controller.process is not None and controller.process.poll() is None:
            controller.end(signal.SIGKILL)
