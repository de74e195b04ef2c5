"""A server that drafts a tree of tokens: at every step its configured tree or K=0.

SGLang's adaptive mode takes chains only (``--speculative-eagle-topk 1``): its states differ in the
number of steps, which for a tree would not say how many tokens it has. Between one tree and the
decode-mode skip nothing needs to be swapped, since a skip brings its own graphs and attention backend
for the time of one forward. So the controller here only tells SGLang's worker whether the next step
drafts. Draft, verify, graphs and the reservation of KV slots stay those of the tree, whose widest
need covers the one slot of a skip.
"""

from __future__ import annotations

from typing import Any

from specpilot.sglang_hooks.table_policy import TablePolicy


class TreeController:
    """Stands where SGLang looks for its ``AdaptiveController``: same calls, no states of its own."""

    def __init__(self, worker: Any, policy: TablePolicy) -> None:
        """``worker`` is an EAGLEWorkerV2 whose attention backends and graphs need not exist yet."""
        self.worker = worker
        self.params = policy

    def register(self, state: Any, steps: int | None = None) -> None:
        """Keep no state: the tree's is in place, and stays there."""

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        """Build no states."""

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Say whether the step about to be launched drafts: SGLang asks its worker for ``speculative_num_steps``."""
        self.worker.speculative_num_steps = self.params.get_steps_for_batch(batch_size)

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Pass on that a step has been completed."""
        self.params.on_verify_complete(num_correct_drafts_per_req, batch_size)


def drafts_a_tree(worker: Any) -> bool:
    """Tell whether ``worker`` is SGLang's EAGLE worker with a tree, which SGLang itself does not adapt."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    return type(worker) is EAGLEWorkerV2 and worker.topk > 1 and worker.adaptive_controller is None
