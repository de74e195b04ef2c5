"""Ranks agree: real processes, real gloo, SGLang's own receiving pass and broadcast."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from specpilot.sglang_hooks.wire import DecisionSource, Lease
from tests.support.messages import table
from tests.support.peers import Peer
from tests.support.warm import program

pytestmark = pytest.mark.sglang


def run_ranks(tmp_path: Path, scenario: str, world: int = 2) -> tuple[list[dict[str, Any]], Peer, list[str]]:
    """Feed tables at random times until the ranks have ended; return what each wrote."""
    outs = [tmp_path / f"rank{rank}.json" for rank in range(world)]
    with Peer(tmp_path) as peer:
        ranks = [
            subprocess.Popen(
                [*program("-m", "tests.support.rank_process"), str(rank), str(world), str(tmp_path / "store"),
                 peer.endpoint, str(outs[rank]), scenario],
                stderr=(tmp_path / f"rank{rank}.log").open("w"),
            )
            for rank in range(world)
        ]  # fmt: skip
        draws = random.Random(3)
        epoch = 0
        try:
            peer.until(lambda: peer.hellos)
            while any(rank.poll() is None for rank in ranks):
                epoch += 1
                edges = sorted(draws.sample(range(1, 100), 3))
                choice = [draws.choice([0, 1, 3]) for _ in range(4)]
                keep = [draws.sample([0, 1, 3], draws.randrange(3)) for _ in range(4)]
                explore = {draws.randrange(4): [(1, 0.3)]} if epoch % 2 else {}
                peer.send(
                    table(
                        epoch=epoch,
                        batch_edges=edges,
                        choice=choice,
                        keep=keep,
                        explore=explore,
                        lease_seconds=0.05,
                    )
                )
                time.sleep(draws.choice([0.0, 0.002, 0.005, 0.02]))
                if epoch % 50 == 0:
                    time.sleep(0.8 if epoch % 500 == 0 else 0.2)  # the lease runs out, and comes back, or too late
                    peer.send(Lease(epoch, 0.05))
                peer.poll(0.0)
        finally:
            for rank in ranks:
                rank.kill()
        logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(world)]
        assert [rank.returncode for rank in ranks] == [0] * world, logs
    return [json.loads(out.read_text()) for out in outs], peer, logs


def test_a_thousand_changes_land_on_the_same_pass_of_every_rank(tmp_path: Path) -> None:
    (first, second), peer, _ = run_ranks(tmp_path, "changes")
    assert first["lines"] == second["lines"]
    epochs = {line[1] for line in first["lines"]}
    assert len(epochs) >= 1000
    sources = {line[2] for line in first["lines"]}
    assert {DecisionSource.FALLBACK, DecisionSource.TABLE, DecisionSource.STALE} <= sources
    assert {line[3] for line in first["lines"]} == {0, 1, 3}
    assert first["confirmed"] == second["confirmed"]
    assert first["confirmed"][1] == 2
    assert first["halt_reason"] == ""
    confirmed = [state for state in peer.states if state.confirmed_epoch]
    assert confirmed
    assert {state.confirmed_ranks for state in confirmed} == {2}


@pytest.mark.parametrize(("scenario", "says"), [("decisions", "decisions"), ("settings", "SPECPILOT_ settings")])
def test_ranks_that_differ_stop_switching_together(scenario: str, says: str, tmp_path: Path) -> None:
    (first, second), _, logs = run_ranks(tmp_path, scenario)
    assert first["halt_reason"] == second["halt_reason"]
    assert says in first["halt_reason"]
    halted = [line[0] for line in first["lines"] if line[2] == DecisionSource.HALTED]
    assert halted
    assert halted == [line[0] for line in second["lines"] if line[2] == DecisionSource.HALTED]
    assert {line[3] for rank in (first, second) for line in rank["lines"][halted[0] :]} == {3}
    if scenario == "settings":
        assert halted[0] == 0  # before the first decode
    assert all("Switching stops at 3 steps" in log for log in logs)
