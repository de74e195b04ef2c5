"""Requests, batches and results as the hooks see them: what they read of SGLang's, and no more.

SimRequest    Req
SimBatch      ScheduleBatch
ForwardMode   ForwardMode
SimResult     GenerationBatchResult
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field


class ForwardMode(enum.Enum):
    """Kind of a forward pass, with the methods of SGLang's ``ForwardMode``."""

    DECODE = enum.auto()
    EXTEND = enum.auto()

    def is_decode(self) -> bool:
        """Is it a decode, speculative or not?"""
        return self is ForwardMode.DECODE

    def is_extend(self) -> bool:
        """Is it a prefill?"""
        return self is ForwardMode.EXTEND

    def is_mixed(self) -> bool:
        """Does a chunked prefill carry decode rows? None is simulated."""
        return False


@dataclass(eq=False, slots=True)
class SimRequest:
    """A request; it ends at ``output_tokens``, which the scheduler does not foresee, as at a stop token."""

    prompt_tokens: int
    output_tokens: int
    index: int = 0
    """Place of the request in the order of arrival."""
    position: int = 0
    """Output tokens decided so far, those in flight included; it goes on past the end."""
    acceptance: float | None = None
    """Probability that a draft of this request is accepted given those before it; None: the workload's at the time."""
    first_token_at: float = 0.0
    """Time of the first output token, in seconds since the start of the server."""
    output_ids: list[int] = field(default_factory=list)
    finished_reason: str | None = None
    finished_len: int | None = None
    """Output length at the end; ``output_ids`` may go on past it."""
    is_retracted: bool = False

    @property
    def seqlen(self) -> int:
        """Tokens in its KV cache."""
        return self.prompt_tokens + len(self.output_ids)


@dataclass(eq=False, slots=True)
class SimBatch:
    """The requests of a forward pass: ``reqs`` is replaced, never changed, when its members change."""

    reqs: list[SimRequest]
    forward_mode: ForwardMode
    forward_iter: int = 0
    launch_ts: float = 0.0
    """Time of the launch, in seconds of the server's clock."""
    extend_num_tokens: int | None = None
    """Prompt tokens of a prefill."""
    has_grammar: bool = False
    after_idle_gap: bool = False

    def copy(self) -> SimBatch:
        """Return what stays as it was at the launch until the result is settled."""
        return dataclasses.replace(self, reqs=self.reqs[:])

    def drop_finished(self) -> list[SimRequest]:
        """Keep the live requests, and return the others."""
        live = [req for req in self.reqs if req.finished_reason is None]
        if len(live) == len(self.reqs):
            return []
        ended = [req for req in self.reqs if req.finished_reason is not None]
        self.reqs = live
        return ended


@dataclass(eq=False, slots=True)
class SimResult:
    """The result of a forward pass, and the moment at which the GPU will have it."""

    done_at: float
    """Seconds of the server's clock."""
    accepted: list[int]
    """Accepted drafts of each request, bonus tokens not counted."""
    speculative_num_draft_tokens: int
    """K + 1 for a decode step, 0 for a prefill."""
    can_run_cuda_graph: bool
    num_correct_drafts_per_req_cpu: list[int] | None = None
