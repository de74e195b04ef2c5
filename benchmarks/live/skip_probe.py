"""Inside an SGLang scheduler process: labels decode steps with the arm they run, and takes their time.

A benchmark that imports this module from its main script gets it into the scheduler processes, which
Python spawns by importing that script again: see ``install``. It works with the plugin in place, where
arms are kinds of K=0, and without it, where there is only "none". The main process says what to
measure in ``cell.json`` of a folder, and reads ``steps.jsonl`` and ``profile.jsonl`` there.

    skip           the plugin's decode-mode skip
    k0_warm        SGLang's K=0: a verify of width 1, then a draft-extend
    k0_cold        the same without the draft-extend (SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND)
    k0_cold_event  the same, with the event that lets the scheduler prepare the next step early
    none           a server without speculation
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = "SKIP_PROBE_FOLDER"
"""Environment variable with the folder that the main process and the schedulers share."""

PROFILED = range(6, 26)
"""Steps of a block that a profile covers."""
TOP_KERNELS = 12


def install() -> None:
    """Have SGLang's plugin loader set the probe up in this process; call at import in ``__mp_main__``."""
    if FOLDER not in os.environ:
        return
    from specpilot.sglang_hooks import plugin

    original = plugin.activate

    def activate() -> None:
        original()
        if "sglang.srt.managers.scheduler" in sys.modules:
            Probe(Path(os.environ[FOLDER])).attach()

    plugin.activate = activate


class Probe:
    """Counts the decode steps of a cell's full batch, sets their arm and writes down their seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = {"cell": -1, "batch": 0, "arms": ["none"], "block": 32, "profile": False}
        self.index = 0
        self.arm = ""
        self.context = 0
        self.launched: dict[int, tuple[int, str, float]] = {}
        self.rows: list[list[Any]] = []
        self.previous = (0, 0.0)
        self.skip: Any = None
        self.draft_runner: Any = None
        self.profiler: Any = None

    def attach(self) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

        run_batch, settle = Scheduler.run_batch, SchedulerBatchResultProcessor.process_batch_result_decode
        probe = self

        @functools.wraps(run_batch)
        def launching(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            decode = batch.forward_mode.is_decode()
            index = probe.before_launch(scheduler, batch) if decode else probe.between()
            result = run_batch(scheduler, batch, *args, **kwargs)
            if decode:
                probe.launched[batch.forward_iter] = (index, probe.arm, probe.context)
            return result

        @functools.wraps(settle)
        def settling(processor: Any, batch: Any, result: Any) -> Any:
            waited = result.copy_done is not None
            if waited:
                result.copy_done.synchronize()
                probe.completed(batch.forward_iter, time.perf_counter())
            value = settle(processor, batch, result)
            if not waited:
                probe.completed(batch.forward_iter, time.perf_counter())
            return value

        Scheduler.run_batch = launching
        SchedulerBatchResultProcessor.process_batch_result_decode = settling
        if os.environ.get("SPECPILOT_ENDPOINT"):
            self.attach_to_verify()

    def attach_to_verify(self) -> None:
        from sglang.srt.speculative import eagle_worker_common

        probe, prepare = self, eagle_worker_common.eagle_prepare_for_verify

        @functools.wraps(prepare)
        def preparing(*args: Any, **kwargs: Any) -> Any:
            forward_batch, graph = prepare(*args, **kwargs)
            if probe.arm == "k0_cold_event" and graph:
                probe.publish_read_done()
            return forward_batch, graph

        eagle_worker_common.eagle_prepare_for_verify = preparing

    # -- what runs on the scheduler thread --

    def between(self) -> int:
        """A prefill: a new cell may begin with it."""
        self.flush()
        try:
            plan = json.loads((self.folder / "cell.json").read_text())
        except (OSError, ValueError):
            return -1
        if plan["cell"] != self.plan["cell"]:
            self.plan, self.index = plan, 0
        return -1

    def before_launch(self, scheduler: Any, batch: Any) -> int:
        plan = self.plan
        if len(batch.reqs) != plan["batch"]:
            self.choose(scheduler, plan["arms"][0])
            return -1
        index, self.index = self.index, self.index + 1
        block, within = divmod(index, plan["block"])
        arms = plan["arms"]
        if within == 0:
            self.context = sum(req.seqlen for req in batch.reqs) / len(batch.reqs)
        else:
            self.context += 1
        self.choose(scheduler, arms[block % len(arms)])
        if plan["profile"] and block < len(arms):
            self.profile(within)
        return index

    def choose(self, scheduler: Any, arm: str) -> None:
        if arm == self.arm:
            return
        self.arm = arm
        if arm == "none":
            return
        from specpilot.sglang_hooks.installed import installed

        if self.skip is None:
            self.skip = installed.skip
            self.draft_runner = scheduler.draft_worker.draft_worker.draft_runner
            (self.folder / "skip.txt").write_text("verify" if self.skip is None else "decode")
        installed.skip = self.skip if arm == "skip" else None
        os.environ["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "0" if arm == "k0_warm" else "1"

    def publish_read_done(self) -> None:
        import torch

        name = "war_fastpath_read_done_event"
        if not hasattr(self.draft_runner, name):
            name = "shared_read_done_event"
        event = torch.cuda.Event()
        event.record()
        setattr(self.draft_runner, name, event)

    def completed(self, forward_iter: int, now: float) -> None:
        before, at = self.previous
        self.previous = (forward_iter, now)
        index, arm, context = self.launched.pop(forward_iter, (-1, "", 0.0))
        if index >= 0 and forward_iter == before + 1:
            self.rows.append([self.plan["cell"], index, arm, context, now - at])
        if len(self.rows) >= 512:
            self.flush()

    def flush(self) -> None:
        if self.rows:
            with (self.folder / "steps.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self.rows)
            self.rows = []

    def profile(self, within: int) -> None:
        import torch

        if within == PROFILED.start:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()
        elif within == PROFILED.stop and self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                self.profiler.export_chrome_trace(f"{folder}/trace.json")
                events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
            self.profiler = None
            summary = {"cell": self.plan["cell"], "arm": self.arm, **summarise(events, len(PROFILED))}
            with (self.folder / "profile.jsonl").open("a") as file:
                file.write(json.dumps(summary) + "\n")


def summarise(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Of a trace's events: GPU time and gaps per step, the largest kernels, and the calls that launch or wait.

    Times in microseconds per step. ``busy`` counts a moment once, however many streams work in it.
    """
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e.get("ph") == "X"]
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in device)
    busy, end = 0.0, float("-inf")
    gaps = []
    for start, stop in spans:
        if start > end and end > float("-inf"):
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    wall = end - spans[0][0] if spans else 0.0

    def per_name(chosen: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
        totals: dict[str, list[float]] = {}
        for event in chosen:
            total = totals.setdefault(event["name"][:120], [0.0, 0.0])
            total[0] += float(event["dur"])
            total[1] += 1
        ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:top]
        return [{"name": n, "us": round(t / steps, 2), "calls": round(c / steps, 2)} for n, (t, c) in ranked]

    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and e.get("ph") == "X"]
    return {
        "steps": steps,
        "wall_us": round(wall / steps, 1),
        "busy_us": round(busy / steps, 1),
        "gap_us": round((wall - busy) / steps, 1),
        "longest_gaps_us": [round(g, 1) for g in sorted(gaps, reverse=True)[:5]],
        "kernels_per_step": round(len(device) / steps, 1),
        "kernels": per_name(device, TOP_KERNELS),
        "calls": per_name(calls, 8),
    }
