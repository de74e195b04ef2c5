"""Inside an SGLang scheduler process: chooses K of every decode step by a plan, and writes down what came of it.

A benchmark that imports this module from its main script gets it into the scheduler processes, which
Python spawns by importing that script again: see ``install``. The main process says what to do in
``plan.json`` of a folder, which is read at every prefill:

    name     of this plan; what is written carries it
    batch    running requests from which the steps are counted
    before   K until then
    blocks   [[K, steps], ...], one after the other, the last for ever; or
    cycle    the same, round and round; or
    random   a seed: K is drawn anew at every step, of ``candidates``
    rows     write down every request's accepted drafts
    dump_at  index of the step after which the draft's KV of all running requests is saved

It finds in that folder ``steps.jsonl`` (one object a step), ``state.jsonl`` (memory and counters, at
each change of plan) and ``kv-NAME.pt``. K is chosen through the policy's fallback, which is in force
while no controller has sent a table; without the plugin the plan only labels what is written.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "SKIP_STEPS_FOLDER"
"""Environment variable with the folder that the main process and the schedulers share."""


def install() -> None:
    """Have SGLang's plugin loader set this up in the process; call at import in ``__mp_main__``."""
    if FOLDER not in os.environ:
        return
    from specpilot.sglang_hooks import plugin

    original = plugin.activate

    def activate() -> None:
        original()
        if "sglang.srt.managers.scheduler" in sys.modules:
            Conductor(Path(os.environ[FOLDER])).attach()

    plugin.activate = activate


class Conductor:
    """Counts the decode steps of a plan and sets their K."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = {"name": "none", "batch": 1, "before": 0, "blocks": [[0, 1]]}
        self.index = -1
        self.steps = -1
        self.switches = 0
        self.dice = random.Random(0)
        self.launched: dict[int, tuple[int, int]] = {}
        self.lines: list[str] = []
        self.previous = (0, 0.0)

    def attach(self) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

        run_batch, settle = Scheduler.run_batch, SchedulerBatchResultProcessor.process_batch_result_decode
        conductor = self

        @functools.wraps(run_batch)
        def launching(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not batch.forward_mode.is_decode():
                conductor.between(scheduler)
                return run_batch(scheduler, batch, *args, **kwargs)
            index = conductor.before_launch(len(batch.reqs))
            result = run_batch(scheduler, batch, *args, **kwargs)
            conductor.launched[batch.forward_iter] = (index, conductor.steps)
            if index >= 0 and index == conductor.plan.get("dump_at"):
                conductor.dump(scheduler, batch)
            return result

        @functools.wraps(settle)
        def settling(processor: Any, batch: Any, result: Any) -> Any:
            if result.copy_done is not None:
                result.copy_done.synchronize()
            now = time.perf_counter()
            value = settle(processor, batch, result)
            conductor.completed(batch, result, now)
            return value

        Scheduler.run_batch = launching
        SchedulerBatchResultProcessor.process_batch_result_decode = settling

    # -- what runs on the scheduler thread --

    def between(self, scheduler: Any) -> None:
        """A prefill: a new plan may begin with it."""
        try:
            plan = json.loads((self.folder / "plan.json").read_text())
        except (OSError, ValueError):
            return
        if plan["name"] != self.plan["name"]:
            self.flush()
            self.state(scheduler)
            self.plan, self.index = plan, -1
            self.dice = random.Random(plan.get("random", 0))
            self.state(scheduler)
            self.flush()

    def before_launch(self, batch_size: int) -> int:
        plan = self.plan
        if self.index >= 0 or batch_size >= plan["batch"]:
            self.index += 1
        steps = self.chosen(plan)
        if steps != self.steps:
            self.switches += 1
            self.steps = steps
            self.choose(steps)
        return self.index

    def chosen(self, plan: dict[str, Any]) -> int:
        if self.index < 0:
            return int(plan["before"])
        if "random" in plan:
            # Often enough to stay: some skips should be longer than a step.
            others = [k for k in plan["candidates"] if k != self.steps]
            return int(self.dice.choice(others)) if self.dice.random() < plan.get("switch", 0.7) else self.steps
        blocks = plan.get("cycle") or plan["blocks"]
        index = self.index % sum(n for _, n in blocks) if "cycle" in plan else self.index
        for steps, length in blocks:
            if index < length:
                return int(steps)
            index -= length
        return int(blocks[-1][0])

    def choose(self, steps: int) -> None:
        from specpilot.sglang_hooks.installed import installed

        if installed.agent is not None:
            installed.agent.policy.fallback_steps = steps

    def completed(self, batch: Any, result: Any, now: float) -> None:
        before, at = self.previous
        self.previous = (batch.forward_iter, now)
        index, steps = self.launched.pop(batch.forward_iter, (-1, -1))
        plan = self.plan
        if index < 0:
            return
        width = result.speculative_num_draft_tokens
        line = {"plan": plan["name"], "index": index, "steps": steps, "batch": len(batch.reqs), "width": width,
                "seconds": round(now - at, 7) if batch.forward_iter == before + 1 else None}  # fmt: skip
        if plan.get("rows"):
            line["rows"] = [
                [req.rid, len(req.origin_input_ids) + len(req.output_ids) - accepted - 1, accepted]
                for req, accepted in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True)
                if not req.finished()
            ]
        self.lines.append(json.dumps(line))
        if len(self.lines) >= 512:
            self.flush()

    def flush(self) -> None:
        if self.lines:
            with (self.folder / "steps.jsonl").open("a") as file:
                file.writelines(line + "\n" for line in self.lines)
            self.lines = []

    def state(self, scheduler: Any) -> None:
        import torch

        from specpilot.sglang_hooks.installed import installed

        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        found = {
            "plan": self.plan["name"], "switches": self.switches, "resident_mb": resident_mb(),
            "allocated_mb": torch.cuda.memory_allocated() >> 20, "reserved_mb": torch.cuda.memory_reserved() >> 20,
            "free_mb": free >> 20, "kv_slots": scheduler.token_to_kv_pool_allocator.available_size(),
        }  # fmt: skip
        agent, skip = installed.agent, installed.skip
        if agent is not None and agent.recorder is not None:
            found |= {
                "rows_quarantined": agent.recorder.rows_quarantined,
                "failures": agent.failures,
                "mismatched": agent.recorder.steps_mismatched,
            }
        if skip is not None:
            found |= {"ring": skip.resume.ring.positions, "open_gaps": len(skip.resume.gaps._entries)}
        with (self.folder / "state.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")

    def dump(self, scheduler: Any, batch: Any) -> None:
        """Save the draft's KV of every running request: what it has up to the length before this step."""
        import torch

        torch.cuda.synchronize()
        pool = scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
        keys, values = pool.get_kv_buffer(getattr(pool, "start_layer", 0) or 0)
        table = scheduler.req_to_token_pool.req_to_token
        lengths, rows = batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
        found = {}
        for req, row, length in zip(batch.reqs, rows, lengths, strict=True):
            slots = table[row, :length].long()
            parts = [keys[slots], values[slots]]
            # With MLA the values are a part of the keys.
            kept = parts if keys.shape == values.shape else parts[:1]
            found[req.rid] = torch.stack(kept).float().cpu()
        torch.save(found, self.folder / f"kv-{self.plan['name']}.pt")


def resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
