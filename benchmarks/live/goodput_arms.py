"""Inside an SGLang scheduler process: switches between arms without a restart, and writes down every decode step.

A benchmark that imports this module from its main script gets it into the scheduler processes, which
Python spawns by importing that script again: see ``install``. The main process says on a ``Board``
which arm decides, how often a draft is accepted, and the number of the block that this belongs to.

An arm is a fixed K, the plugin's own lookup in the controller's table (``TABLE``), SGLang's adaptive
rule (``SGLANG``), which takes its tiers from SGLang's default, as far as the candidates allow, or the most
drafts up to ``THRESHOLD_REQUESTS`` running requests and none above (``THRESHOLD``). Only steps
that the table decided are recorded for the controller; the first of each such block is not, since the arm
before it is in its time. So a policy learns nothing from the other arms: it sees gaps in the numbers of the records.

Acceptance is drawn for each draft of each request alone: K drafts are accepted in a row with p, p^2, ... p^K. In a
tree it is drawn once a level.

On a server without the plugin only the steps are written down, under the block of the board (``PLAIN``).
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "GOODPUT_LOAD_FOLDER"
"""Environment variable with the folder that the main process and the scheduler share."""

TABLE, SGLANG, THRESHOLD, PLAIN = -1, -2, -3, -4
"""Arms that are no fixed K."""
THRESHOLD_REQUESTS = 5

COLUMNS = ("at", "requests", "steps", "seconds", "tokens", "explored")
"""Of a step: monotonic time of its result, live requests, K, seconds since the step before (0 where a
prefill or an idle spell lies between), tokens that clients get of it, drawn by exploration (0 or 1)."""


class Board:
    """What the main process tells the scheduler, in memory that both map: reading it costs no system call."""

    _LAYOUT = struct.Struct("<dqq")

    def __init__(self, folder: Path) -> None:
        with (folder / "board").open("a+b") as file:
            file.truncate(self._LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), self._LAYOUT.size)

    def write(self, block: int, arm: int, acceptance: float) -> None:
        self._LAYOUT.pack_into(self._memory, 0, acceptance, arm, block)

    def read(self) -> tuple[float, int, int]:
        """Return acceptance, arm, block."""
        return self._LAYOUT.unpack_from(self._memory)


def install() -> None:
    """Have the plugin's agent set this up where it starts; call at import in ``__mp_main__``."""
    if FOLDER not in os.environ:
        return
    from specpilot.sglang_hooks.agent import Agent

    original = Agent.start

    @functools.wraps(original)
    def start(agent: Agent, *args: Any, **kwargs: Any) -> None:
        original(agent, *args, **kwargs)
        Arms(agent, Path(os.environ[FOLDER])).attach()

    Agent.start = start
    if "SPECPILOT_ENDPOINT" in os.environ:
        return
    from specpilot.sglang_hooks import plugin

    activate = plugin.activate

    def activating() -> None:
        activate()
        if "sglang.srt.managers.scheduler" in sys.modules:
            Steps(Path(os.environ[FOLDER])).attach()

    plugin.activate = activating


class Steps:
    """Writes down the decode steps, each under the block of its launch."""

    def __init__(self, folder: Path) -> None:
        self.board = Board(folder)
        self.path = folder / "steps.jsonl"
        _, _, self.block = self.board.read()
        self.rows: dict[int, list[tuple[float, ...]]] = {}
        self.previous = (0, 0.0)

    def attach(self) -> None:
        from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

        settle, steps = SchedulerBatchResultProcessor.process_batch_result_decode, self

        @functools.wraps(settle)
        def settling(processor: Any, batch: Any, result: Any) -> Any:
            if result.copy_done is not None:
                result.copy_done.synchronize()
            now = time.monotonic()
            before = steps.settling(batch)
            value = settle(processor, batch, result)
            steps.settled(batch, result, before, now)
            return value

        SchedulerBatchResultProcessor.process_batch_result_decode = settling

    def settling(self, batch: Any) -> list[int]:
        """Before a result is processed: return every request's tokens so far, -1 if it has ended."""
        return [-1 if req.finished() or req.is_retracted else len(req.output_ids) for req in batch.reqs]

    def settled(self, batch: Any, result: Any, before: list[int], now: float) -> None:
        step, at = self.previous
        self.previous = (batch.forward_iter, now)
        block, explored = self.block_of(batch)
        if block < 0:
            return
        tokens = requests = 0
        for req, had in zip(batch.reqs, before, strict=True):
            if had >= 0:
                requests += 1
                length = req.finished_len
                tokens += (len(req.output_ids) if length is None else length) - had
        seconds = now - at if batch.forward_iter == step + 1 else 0.0
        steps = self.steps_of(result.speculative_num_draft_tokens or 1)
        self.rows.setdefault(block, []).append((now, requests, steps, seconds, tokens, explored))

    def block_of(self, batch: Any) -> tuple[int, int]:  # noqa: ARG002
        """Block of a step that has ended, -1 if it belongs to none; and 1 if exploration drew it."""
        _, _, block = self.board.read()
        if block != self.block:
            self.flush()
            self.block = block
        return block, 0

    def steps_of(self, width: int) -> int:
        """K of a verify of ``width`` tokens."""
        return width - 1

    def flush(self) -> None:
        """Write down the blocks that are over; the results in flight of the last one come with the next."""
        over, self.rows = self.rows, {}
        with self.path.open("a") as file:
            for block, rows in over.items():
                file.write(json.dumps({"block": block, "rows": [[round(x, 7) for x in row] for row in rows]}) + "\n")


class Arms(Steps):
    """Decides for the arms that are not the table, and keeps account of all."""

    def __init__(self, agent: Any, folder: Path) -> None:
        super().__init__(folder)
        self.agent = agent
        self.policy = agent.policy
        self.queue = agent._queue
        self.acceptance, _, _ = self.board.read()
        self.launched: dict[int, tuple[int, int, int]] = {}
        self.settled_arm = SGLANG
        self.recorded = False
        self.rule: Any = None

    def attach(self) -> None:
        from sglang.srt.speculative import spec_utils

        self.rule = sglang_rule(self.policy.candidate_steps, self.agent._facts.captured_batch_sizes)
        spec_utils.generate_simulated_accept_index = self.accept
        self.attach_to_policy()
        super().attach()

    def attach_to_policy(self) -> None:
        policy, decide, verified, put = (
            self.policy, self.policy._decide, self.policy.on_verify_complete, self.queue.put
        )  # fmt: skip

        def deciding(batch_size: int) -> Any:
            return self.decide(decide, batch_size)

        def verifying(accepted: list[int], batch_size: int) -> None:
            if self.settled_arm == SGLANG:
                self.rule.on_verify_complete(accepted, batch_size)
            verified(accepted, batch_size)

        def putting(record: Any) -> None:
            if self.recorded:
                put(record)

        policy._decide, policy.on_verify_complete, self.queue.put = deciding, verifying, putting

    # -- what runs on the scheduler thread --

    def decide(self, lookup: Any, batch_size: int) -> Any:
        from specpilot.sglang_hooks.table_policy import Decision
        from specpilot.sglang_hooks.wire import DecisionSource

        policy = self.policy
        self.acceptance, arm, block = self.board.read()
        if block != self.block:
            self.flush()
            self.block = block
        if arm == TABLE:
            launch = lookup(batch_size)
            explored = int(launch.source == DecisionSource.TABLE and launch.steps != policy.held_steps)
        else:
            if arm == THRESHOLD:
                steps = max(policy.candidate_steps) if batch_size <= THRESHOLD_REQUESTS else 0
            else:
                steps = arm if arm >= 0 else self.rule.get_steps_for_batch(batch_size)
            launch = Decision(policy.forward_iter, steps, steps, steps, DecisionSource.FALLBACK, 0, -1, 1.0, -1)
            explored = 0
        self.launched[policy.forward_iter] = (block, arm, explored)
        return launch

    def settling(self, batch: Any) -> list[int]:
        """Before a result is processed: note whose it is, too."""
        _, arm, _ = self.launched.get(batch.forward_iter, (0, SGLANG, 0))
        self.recorded = arm == TABLE and self.settled_arm == TABLE
        self.settled_arm = arm
        return super().settling(batch)

    def block_of(self, batch: Any) -> tuple[int, int]:
        block, _, explored = self.launched.pop(batch.forward_iter, (-1, 0, 0))
        return block, explored

    def steps_of(self, width: int) -> int:
        # A tree has more tokens than levels.
        return min(width - 1, max(self.policy.candidate_steps))

    def accept(
        self,
        accept_index: Any,
        predict: Any,
        num_correct_drafts: Any,
        candidates: Any,
        target_predict: Any,
        bs: int,
        spec_steps: int,
        **options: Any,  # noqa: ARG002 - the one length for all requests that SGLang simulates
    ) -> Any:
        """Stand in for SGLang's ``generate_simulated_accept_index``: accepted drafts, drawn per request.

        Of a tree the first tokens are accepted, as if they were a chain: what that costs is the same.
        """
        import torch

        places = torch.arange(spec_steps + 1, device=accept_index.device)
        passed = torch.rand((bs, spec_steps), device=accept_index.device) < self.acceptance
        accepted = passed.cumprod(1).sum(1, keepdim=True)
        num_correct_drafts.copy_(accepted[:, 0])
        drafts, bonus = candidates.roll(-1, 1)[:, : spec_steps + 1], target_predict[:, : spec_steps + 1]
        predict.view(candidates.shape)[:, : spec_steps + 1].copy_(torch.where(places < accepted, drafts, bonus))
        return torch.where(places <= accepted, accept_index[:, :1] + places, -1).to(torch.int32)


def sglang_rule(candidates: Sequence[int], captured_batch_sizes: Sequence[int]) -> Any:
    """Return SGLang's adaptive rule with its default tiers; a K that is no candidate becomes the next one below."""
    from sglang.srt.speculative import adaptive_spec_params as own

    tiers = {
        batch: {**tier, "candidate_steps": sorted({max(k for k in candidates if k <= wanted)
                                                   for wanted in tier["candidate_steps"]})}
        for batch, tier in own.DEFAULT_ADAPTIVE_CONFIG.items()
    }  # fmt: skip
    # The plugin has put its own class in the place of SGLang's, whose parts are as they were.
    from specpilot.sglang_hooks.installed import installed
    from specpilot.sglang_hooks.uses import POLICY_CLASS

    rule = next((p.original for p in installed.patches if p.target == POLICY_CLASS),
                own.AdaptiveSpeculativeParams)  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(tiers))
        file.flush()
        built = rule(max(candidates), file.name)
    built.set_cuda_graph_bs(list(captured_batch_sizes))
    return built
