"""Everything of the plugin that lives in one scheduler process, whoever drives it.

``step_hooks.py`` drives it from inside SGLang, ``controller/simulation/server.py`` from a simulated
scheduler; both call the same methods at the same places of the loop:

    pull(received)         rank 0, once per receiving pass: table or source changes to broadcast
    apply(update)          every rank, when the broadcast brings one
    launching(batch), launched(batch, decode)      every rank, around each forward pass
    policy.get_steps_for_batch(n), policy.on_verify_complete(...)      SGLang's own calls
    settling(batch), settled(batch, result, ended, quarantined)      every rank, around a decode result

A failure here never reaches the server. What decisions depend on is done on every rank, from
the same inputs, and fails on all or none: then all stop switching. What only rank 0 does, the
recording, can fail alone and then just ends, with one error in the log.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specpilot.sglang_hooks.broadcast import AllGather, Confirmation, PolicyUpdate, UpdateSource, apply_update
from specpilot.sglang_hooks.connection import is_tcp, read_keys
from specpilot.sglang_hooks.context import ContextTracker, ended_rows
from specpilot.sglang_hooks.link import Link, Mailbox, RecordQueue
from specpilot.sglang_hooks.recorder import Recorder
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource, Hello, HookState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerFacts:
    """What a server knows of itself once it has started; the plugin reads it off SGLang."""

    server_id: str
    model: str = ""
    draft_model: str = ""
    algorithm: str = ""
    topk: int = 1
    tree_tokens: int = 0
    """Tokens that a tree verifies per request; 0 for a chain, which verifies K + 1."""
    captured_batch_sizes: tuple[int, ...] = ()
    max_running_requests: int = 0
    kv_tokens: int = 0
    overlap: bool = False
    rank: int = 0
    tp_size: int = 1
    dp_size: int = 1
    dp_rank: int = 0
    gpu: str = ""
    sglang_version: str = ""
    context_length: int = 0
    skip: str = "verify"
    """What a step with K=0 is, where 0 is a candidate: "decode" or "verify"."""


class Agent:
    """The policy, the recorder and, on rank 0, the link of one scheduler process."""

    def __init__(
        self,
        settings: Settings,
        policy: TablePolicy,
        make_link: Callable[..., Link] = Link,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``make_link`` is called on rank 0 with what ``Link`` takes.

        ``wall_clock`` returns seconds since the Unix epoch: the time that records carry.
        """
        self.settings = settings
        self.policy = policy
        self.recorder: Recorder | None = None
        self._context = ContextTracker(policy)
        self.confirmation = Confirmation()
        self.ready = False
        self._instance = uuid.uuid4().hex
        self._settings_hash = settings.decision_hash()
        self._source: UpdateSource | None = None
        self._make_link = make_link
        self._link: Link | None = None
        self._wall_clock = wall_clock
        self._queue = RecordQueue(settings.queue_records)
        self.failures = 0
        self.skips_as_verify = 0

    def start(
        self,
        facts: ServerFacts,
        load: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        all_gather: AllGather = lambda value: [value],
    ) -> None:
        """Begin to record, and on rank 0 to talk to the controller; returns at once.

        Raises EndpointError, on rank 0, for key files that cannot be used.
        """
        if facts.rank == 0 and is_tcp(self.settings.endpoint):
            read_keys(self.settings.key_files)  # the link reads them when it connects: too late to end the start
        self._facts = facts
        self._all_gather = all_gather
        if facts.rank == 0:
            self.recorder = Recorder(
                self.policy,
                self._queue,
                facts.captured_batch_sizes,
                facts.overlap,
                load,
                facts.tree_tokens,
                self._wall_clock,
            )
            mailbox = Mailbox()
            self._source = UpdateSource(self.settings, self.policy, mailbox, facts.tp_size)
            self._link = self._make_link(
                self.settings.endpoint,
                self.settings.key_files,
                self.hello,
                self.state,
                self._queue,
                mailbox,
                self.policy.candidate_steps,
            )
            self._link.start()
        self.ready = True

    def stop(self) -> None:
        """End the link's thread."""
        if self._link is not None:
            self._link.stop()

    # -- the scheduler thread --

    def pull(self, received: list[Any] | None) -> None:
        """Append what the ranks must hear of to the requests about to be broadcast (rank 0)."""
        if received is None or self._source is None:
            return
        try:
            update = self._source.poll(self.policy.clock())
        except Exception:
            # Without its clock a table would stay in force for ever: all ranks fall back, once.
            self._failed("the receiving pass")
            self._source = None
            update = PolicyUpdate(source=DecisionSource.FALLBACK)
        if update is not None:
            received.append(update)

    def apply(self, update: PolicyUpdate) -> None:
        """Carry out one broadcast update; SGLang's dispatcher calls it on every rank."""
        apply_update(update, self.policy, self._settings_hash, self._all_gather, self.confirmation)

    def launching(self, batch: Any) -> None:
        """Before each forward pass, prefill or decode."""
        try:
            self._context.launched(batch)
        except Exception:
            self._halt("reading the batch")

    def launched(self, batch: Any, decode: bool) -> None:
        """After each forward was launched; ``decode`` as it was before, SGLang may leave another mode."""
        if self.recorder is not None:
            try:
                self.recorder.launched(batch, decode)
            except Exception:
                self._failed("recording a launch")

    def skipped_by_verify(self) -> None:
        """A step with K=0 goes SGLang's own way."""
        self.skips_as_verify += 1

    def retracted(self, requests: int) -> None:
        """After requests were put back into the queue for want of KV cache."""
        if self.recorder is not None:
            self.recorder.retracted += requests

    def settling(self, batch: Any) -> list[int]:
        """Before a decode result is processed: rows whose request has ended, for ``settled``."""
        try:
            return ended_rows(batch.reqs)
        except Exception:
            self._halt("reading the batch of a result")
            return []

    def settled(self, batch: Any, result: Any, ended: list[int], quarantined: Sequence[int] = ()) -> None:
        """After a decode result was processed; ``quarantined`` rows drafted from a cache with holes."""
        try:
            self._context.settled(result.num_correct_drafts_per_req_cpu, ended)
        except Exception:
            self._halt("reading a result")
        if self.recorder is not None:
            try:
                self.recorder.settled(batch, result, ended, quarantined)
            except Exception:
                self._failed("recording a step")

    def _halt(self, where: str) -> None:
        """Every rank fails alike here: stop switching, once."""
        if self.policy.source != DecisionSource.HALTED:
            self.failures += 1
            logger.exception("specpilot: %s failed; switching stops until the server restarts", where)
            self.policy.halt(self.policy.halt_steps, f"{where} failed, see the server's log")

    def _failed(self, where: str) -> None:
        self.failures += 1
        self.recorder = None
        logger.exception("specpilot: %s failed; this server records no more steps and goes on serving", where)

    # -- the link's thread, and whoever wants to look --

    def hello(self) -> Hello:
        """Return what the controller must know of this server; after ``start``."""
        facts, policy = self._facts, self.policy
        return Hello(
            server_id=facts.server_id,
            instance=self._instance,
            model=facts.model,
            draft_model=facts.draft_model,
            algorithm=facts.algorithm,
            topk=facts.topk,
            candidate_steps=policy.candidate_steps,
            fallback_steps=policy.fallback_steps,
            skip=facts.skip if 0 in policy.candidate_steps else "none",
            captured_batch_sizes=list(facts.captured_batch_sizes),
            max_running_requests=facts.max_running_requests,
            kv_tokens=facts.kv_tokens,
            overlap=facts.overlap,
            tp_size=facts.tp_size,
            dp_size=facts.dp_size,
            dp_rank=facts.dp_rank,
            gpu=facts.gpu,
            sglang_version=facts.sglang_version,
            context_length=facts.context_length,
            mode=self.settings.mode,
            epoch=self._link.newest_epoch if self._link is not None else 0,
        )

    def state(self) -> HookState:
        """Return what the hooks are doing now, with all their counters; after ``start`` on rank 0."""
        policy, recorder, link = self.policy, self.recorder, self._link
        assert link is not None
        table = policy.table
        return HookState(
            instance=self._instance,
            source=policy.source,
            epoch=table.epoch if table is not None else 0,
            confirmed_epoch=self.confirmation.epoch if self._facts.tp_size > 1 else (table.epoch if table else 0),
            confirmed_ranks=self.confirmation.ranks if self._facts.tp_size > 1 else 1,
            steps=policy.applied_steps,
            forward_iter=policy.forward_iter,
            counters={
                **link.counters,
                "records_dropped": self._queue.dropped,
                "join_misses": recorder.join_misses if recorder is not None else 0,
                "steps_mismatched": recorder.steps_mismatched if recorder is not None else 0,
                "rows_quarantined": recorder.rows_quarantined if recorder is not None else 0,
                "lease_expiries": policy.lease_expiries,
                "fallbacks": policy.fallbacks,
                "rank_mismatches": self.confirmation.mismatches,
                "steps_capped": policy.steps_capped,
                "skips_as_verify": self.skips_as_verify,
                "hook_failures": self.failures,
            },
            halt_reason=policy.halt_reason,
        )


def default_server_id(host: str, port: int) -> str:
    """Name a server that gave itself none: the same after a restart on the same port.

    >>> default_server_id("gpu-7", 30000)
    'gpu-7:30000'
    """
    return f"{host or os.uname().nodename}:{port}"
