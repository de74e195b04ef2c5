"""From a trace's rows to the steps that are judged: what was drawn and held, what a time means.

Each record says what its own table held. A cell's number means something within one table only, and so does a run
of steps of one K: it ends with its table, such as at the fallback's in a switchback.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specpilot.controller.trace.checked_reader import Chunk
from specpilot.controller.trace.step_seconds import why_not_own
from specpilot.policies.offpolicy.logged_steps import BoolArray, FloatArray, IntArray, LoggedSteps
from specpilot.sglang_hooks.wire import MASKED, Hello

FOLD_STEPS = 2048
"""Consecutive steps of one fold: folds alternate, so that both see the whole time, and rarely touch."""

CALM_BLOCK_STEPS = 8
"""Steps that are resampled together where nothing is explored, as there is no block."""


def size_of(batch_size: IntArray, captured: IntArray) -> IntArray:
    """Return the captured size that each batch is padded to; above the largest, where steps run eagerly, its own.

    >>> size_of(np.array([1, 3, 9]), np.array([2, 4])).tolist()
    [2, 4, 9]
    """
    if not len(captured):
        return batch_size
    row = np.searchsorted(captured, batch_size)
    return np.where(row < len(captured), captured[np.minimum(row, len(captured) - 1)], batch_size)


@dataclass
class StepReader:
    """Makes ``LoggedSteps`` of the chunks of one server, in order; remembers the row before."""

    hello: Hello
    unusable: int = 0
    """Steps left out because their K is no candidate."""
    block_steps: int = 0
    """Steps of the longest block that ran without interruption."""
    _rows: int = 0
    _blocks: int = 0
    _run: int = 0
    _before: IntArray = field(default_factory=lambda: np.full(4, -1, np.int64))
    """Arm, cell, epoch and draw of the step before."""
    _probability: float = 1.0
    _ended: int = 0
    _instance: str = ""

    def __post_init__(self) -> None:
        self.arms = np.array(sorted(self.hello.candidate_steps), np.int64)
        self._captured = np.array(sorted(self.hello.captured_batch_sizes), np.int64)

    def steps(self, chunk: Chunk) -> tuple[LoggedSteps, FloatArray, FloatArray]:
        """Return a chunk's steps; and trials and accepted drafts by position, (steps, largest K) each."""
        if chunk.hello.instance != self._instance:
            self._instance = chunk.hello.instance
            self._before = np.full(4, -1, np.int64)
        columns, follows = chunk.columns, chunk.follows
        count = len(chunk.rows)
        batch = columns["batch_size"].astype(np.int64)
        applied = self._applied(chunk)
        arm = self._arm(applied)
        # What ran otherwise than by the table, as in shadow mode, was certain.
        drawn = (columns["proposed_steps"] == applied) & (chunk.hello.mode != "shadow")
        probability = np.where(drawn, columns["probability"], 1.0)
        draw = np.where(drawn, columns["block"], -1)
        held = np.where(drawn, self._arm(columns["held_steps"]), arm)

        keys = np.stack([arm, columns["cell"], columns["epoch"], draw])
        shifted = np.concatenate((self._before[:, None], keys[:, :-1]), axis=1)
        same_cell = (keys[1:3] == shifted[1:3]).all(axis=0) & follows
        previous_probability = np.concatenate(([self._probability], probability[:-1]))
        # The first step after a switch of K counts here: what switching takes is judged with it.
        timed = why_not_own(columns, follows) == 0

        live, informative, tokens, trials, passed = self._tokens(chunk, applied)
        steps = LoggedSteps(
            batch_size=batch,
            size=size_of(batch, self._captured),
            mean_context=columns["context_tokens"] / np.maximum(batch, 1),
            arm=arm,
            held=held,
            probability=probability,
            explorable=draw >= 0,
            block=self._numbered(draw, follows),
            tokens=tokens,
            live=live,
            informative=informative,
            seconds=columns["seconds"],
            timed=timed,
            same_cell=same_cell,
            same_block=same_cell & (keys[3] == shifted[3]),
            previous_probability=previous_probability,
            previous_arm=np.where(follows, shifted[0], -1),
            fold=(np.arange(self._rows, self._rows + count) // FOLD_STEPS) % 2,
        )
        self._rows += count
        if count:
            self._before, self._probability = keys[:, -1], float(probability[-1])
            self._ended = int(columns.ragged("truncated").lengths[-1])
        usable = (arm >= 0) & (held >= 0)
        if usable.all():
            return steps, trials, passed
        self.unusable += int(count - usable.sum())
        return steps.taken(usable), trials[usable], passed[usable]

    def _arm(self, steps: IntArray) -> IntArray:
        """Return the index of each K among the candidates; -1 where it is none."""
        arm = np.minimum(np.searchsorted(self.arms, steps), len(self.arms) - 1)
        return np.where(self.arms[arm] == steps, arm, -1)

    def _applied(self, chunk: Chunk) -> IntArray:
        """In a chain the width tells K; a tree has one width and K=0."""
        drafts = chunk.columns.drafts
        if self.hello.topk <= 1:
            return drafts
        return np.where(drafts > 0, chunk.columns["steps"].astype(np.int64), 0)

    def _numbered(self, draw: IntArray, follows: BoolArray) -> IntArray:
        """Return the number of each step's block; where nothing is explored, every few steps are one."""
        count = len(draw)
        if not count:
            return np.empty(0, np.int64)
        begins = np.ones(count, bool)
        begins[1:] = (draw[1:] != draw[:-1]) | ~follows[1:]
        begins[0] = self._before[3] != draw[0] or not follows[0]
        places = np.arange(count)
        start = np.maximum.accumulate(np.where(begins, places, -1))
        within = np.where(start >= 0, places - start, places + self._run)
        explored = draw >= 0
        if explored.any():
            self.block_steps = max(self.block_steps, int(within[explored].max()) + 1)
        begins |= ~explored & (within % CALM_BLOCK_STEPS == 0)
        numbers = self._blocks + np.cumsum(begins)
        self._blocks, self._run = int(numbers[-1]), int(within[-1]) + 1
        return np.asarray(numbers, np.int64)

    def _tokens(
        self, chunk: Chunk, applied: IntArray
    ) -> tuple[FloatArray, BoolArray, FloatArray, FloatArray, FloatArray]:
        """Return live requests, whether their tokens are known, tokens by K, trials and accepted by position."""
        count, most = len(chunk.rows), int(self.arms[-1])
        accepted, truncated = chunk.columns.ragged("accepted_drafts"), chunk.columns.ragged("truncated")
        owners = accepted.owners
        seen = accepted.values != MASKED
        at_depth = _histogram(owners[seen], np.minimum(accepted.values[seen], most), count, most)
        # (steps, most + 1): rows that accepted at least j.
        reached = np.cumsum(at_depth[:, ::-1], axis=1)[:, ::-1]
        known = reached[:, 0]
        ended_rows = truncated.values + accepted.offsets[truncated.owners]
        ended = np.minimum(accepted.values[ended_rows], most)
        ended_at = _histogram(truncated.owners[ended >= 0], ended[ended >= 0], count, most)
        # Under overlap a request that ended is in flight once more: its row is masked, and gives no token.
        ended_before = np.zeros(count)
        if count:
            ended_before[1:] = truncated.lengths[:-1]
            ended_before[0] = self._ended
        gone = np.where(chunk.columns["overlap"] & chunk.follows, ended_before, 0.0)
        batch = chunk.columns["batch_size"].astype(np.float64)
        live = batch - np.minimum(batch - known, gone)
        informative = (known > 0.0) | (live == 0.0)
        scale = live / np.maximum(known, 1.0)
        tokens = np.cumsum(reached, axis=1) * scale[:, None]
        drafted = np.arange(most) < applied[:, None]
        trials = np.where(drafted, reached[:, :-1] - ended_at[:, :-1], 0.0)
        passed = np.where(drafted, reached[:, 1:], 0.0)
        return live, np.asarray(informative, np.bool_), tokens, trials, passed


def _histogram(rows: IntArray, values: NDArray[np.int16] | IntArray, count: int, most: int) -> FloatArray:
    """Return how often each row has each value, (count, most + 1)."""
    code = rows * (most + 1) + values
    return np.bincount(code, minlength=count * (most + 1)).reshape(count, most + 1).astype(np.float64)
