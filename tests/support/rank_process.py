"""One tensor-parallel rank for ``test_ranks.py``: the real receiving pass over real gloo.

    python -m tests.support.rank_process RANK WORLD STORE_FILE ENDPOINT OUT_FILE SCENARIO

Writes one line per pass: pass number, epoch in force, source, K chosen.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import zmq
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from specpilot.sglang_hooks import plugin, step_hooks
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.installed import installed
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from tests.support import sglang_rig as rig

CHANGES = 1000


class Group:
    """The parts of SGLang's GroupCoordinator that a receiving pass and the check use."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.ranks = rank, list(range(world))
        self.cpu_group = dist.group.WORLD

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(gathered, value, group=self.cpu_group)
        return gathered


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, endpoint, out, scenario = sys.argv[3:7]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rig.publish_config(tp_size=world)
    group = Group(rank, world)
    fallback = 1 if scenario == "settings" and rank == 1 else 3
    settings = Settings(
        endpoint=endpoint,
        fallback=fallback,
        min_table_interval_seconds=0.0,
        check_steps=100,
        stale_seconds=0.5,
    )
    agent = Agent(settings, TablePolicy(settings, [0, 1, 3], 3))
    agent.start(ServerFacts(server_id="tp", rank=rank, tp_size=world), all_gather=group.all_gather_object)
    installed.agent = agent
    plugin.install(
        [(
            "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
            step_hooks.after_pull_raw_reqs,
            "AFTER",
        )]
    )  # fmt: skip
    scheduler = rig.scheduler_stub(None, overlap=True)
    scheduler._request_dispatcher = TypeBasedDispatcher([(PolicyUpdate, agent.apply)])
    requests, _ = rig.receiver(zmq.Context(), f"rank{rank}")
    delays = random.Random(rank)
    loads = random.Random(7)  # the batch is the same on every rank
    lines = []
    adopted = 0
    with get_parallel().override(pp_rank=0, attn_tp_rank=rank, attn_cp_rank=0, tp_group=group, attn_dp_enabled=False):
        for number in range(200_000):
            time.sleep(delays.random() * 0.002)
            Scheduler.process_input_requests(scheduler, requests.recv_requests())
            policy = agent.policy
            if scenario == "decisions" and rank == 1 and number == 150:
                policy.held_steps, policy.decision_hash = 1, 5  # a rank that went astray
            epoch = policy.table.epoch if policy.table else 0
            adopted += bool(lines) and epoch != lines[-1][1] and epoch != 0
            policy.forward_iter += 1
            lines.append([number, epoch, int(policy.source), policy.get_steps_for_batch(loads.randrange(1, 100))])
            if adopted >= CHANGES or (number >= 600 and scenario != "changes"):
                break
    Path(out).write_text(
        json.dumps({"lines": lines, "confirmed": [agent.confirmation.epoch, agent.confirmation.ranks],
                    "halt_reason": agent.policy.halt_reason})
    )  # fmt: skip
    dist.barrier()
    agent.stop()


if __name__ == "__main__":
    main()
