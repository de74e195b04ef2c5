"""Logs with the record structure of the real hooks, made by the million, and what is true of them.

What a server would have run, drawn block by block with the hooks' own counter-based draws; steps that
cost a staircase in the batch size, more where they switch; drafts accepted one after the other, and
requests that end. Everything is vectorised, and a log is a function of its seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from specpilot.controller.trace.checked_reader import Chunk
from specpilot.controller.trace.columns import Columns
from specpilot.controller.trace.format import FORMAT_VERSION, SCHEMA
from specpilot.policies.interface import Grid, Plan
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.policies.offpolicy.overlap import RELATIONS, Strata
from specpilot.sglang_hooks.wire import MASKED, WIRE_VERSION, ForwardKind, Hello
from tests.support.messages import hello

CAPTURED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
ARMS = (0, 1, 3)
CHUNK = 16384


def table(*rows: tuple[int, int], context_edges: tuple[int, ...] = ()) -> Plan:
    """K from each batch size on: ``table((1, 3), (9, 0))``."""
    edges = tuple(start - 1 for start, _ in rows[1:])
    columns = len(context_edges) + 1
    choice = tuple(steps for _, steps in rows for _ in range(columns))
    return Plan(Grid(edges, context_edges), choice, (frozenset[int](),) * len(choice), "")


LOGGED = table((1, 3), (9, 1), (33, 0))


@dataclass(frozen=True)
class Log:
    """A server's steps to be made up, and the policy that ran them."""

    steps: int
    seed: int
    logged: Plan = LOGGED
    exploration: float = 0.01
    """Probability of the alternatives together."""
    block_steps: int = 4
    acceptance: float = 0.7
    drift: float = 0.0
    """How far acceptance swings to both sides, in a slow wave."""
    tie: bool = False
    """Every K costs and brings the same."""
    noise: float = 0.03
    mean_batch: float = 8.0
    ending: float = 0.01
    """Of requests have only a few tokens to go in a step."""
    prefills: float = 0.05
    """Of steps come after a prefill."""

    @property
    def hello(self) -> Hello:
        return hello(
            candidate_steps=list(ARMS), captured_batch_sizes=list(CAPTURED), max_running_requests=64, fallback_steps=3
        )

    def rng(self, part: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, part, what])

    # -- the world --

    def mean_seconds(self, arm: np.ndarray, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Of a settled step."""
        size = np.array(CAPTURED)[np.searchsorted(CAPTURED, batch)]
        k = np.array(ARMS)[arm] if not self.tie else np.zeros(len(arm))
        return 0.006 + 0.0006 * k + 55e-6 * size * (k + 1.0) + 2e-8 * batch * context

    def switch_seconds(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        if self.tie:
            return np.zeros(len(before))
        up, down = (before == 0) & (after > 0), (before > 0) & (after == 0)
        return np.where(before == after, 0.0, np.where(up, 0.004, np.where(down, 0.001, 0.002)))

    def acceptances(self, index: np.ndarray) -> np.ndarray:
        return self.acceptance + self.drift * np.sin(2.0 * np.pi * index / 20_000.0)

    def tokens_to_expect(self, arm: np.ndarray, live: np.ndarray, acceptance: np.ndarray) -> np.ndarray:
        k = np.array(ARMS)[arm] if not self.tie else np.zeros(len(arm), int)
        total = np.ones(len(arm))
        for j in range(1, max(ARMS) + 1):
            # Those about to end have 1 to 8 tokens to go, and reach draft j if it is among them.
            reach = 1.0 - 0.5 * self.ending + 0.5 * self.ending * (8.0 - j) / 8.0
            total += np.where(k >= j, acceptance**j * reach, 0.0)
        return live * total

    # -- the log --

    def parts(self) -> Iterator[tuple[pa.RecordBatch, dict[str, np.ndarray]]]:
        """Record batches in order, each with its states, also those that nobody logs."""
        carry: dict[str, Any] = {"arm": -1, "ended": 0, "time": 1.7e9, "forward": 0, "logs": np.zeros(2)}
        seed = int(self.rng(0, 9).integers(1 << 61))
        for part, begin in enumerate(range(0, self.steps, CHUNK)):
            yield self._part(part, begin, min(CHUNK, self.steps - begin), carry, seed)

    def _states(self, part: int, count: int, carry: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Batch and context: they move slowly, and stay for a dozen steps."""
        rng = self.rng(part, 0)
        moves = count // 12 + 1
        noise = rng.normal(size=(moves, 2)) * [0.35, 0.3]
        logs = np.empty((moves, 2))
        at = carry["logs"]
        for i in range(moves):
            at = 0.95 * at + noise[i]
            logs[i] = at
        carry["logs"] = at
        stay = np.repeat(np.arange(moves), 12)[:count]
        batch = np.clip(np.rint(self.mean_batch * np.exp(logs[stay, 0])), 1, 64).astype(np.int64)
        return batch, np.clip(900.0 * np.exp(logs[stay, 1]), 32.0, 12000.0)

    def _part(
        self, part: int, begin: int, count: int, carry: dict[str, Any], seed: int
    ) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
        batch, context = self._states(part, count, carry)
        index = np.arange(begin, begin + count)
        rng = self.rng(part, 1)
        prefilled = rng.random(count) < self.prefills
        forward = carry["forward"] + np.cumsum(1 + prefilled)
        cell = np.searchsorted(self.logged.grid.batch_edges, batch) * self.logged.grid.shape[1]
        context_tokens = np.rint(context * batch).astype(np.int64)
        cell += np.searchsorted(self.logged.grid.context_edges, context_tokens / batch)
        held = np.searchsorted(ARMS, np.array(self.logged.choice)[cell])
        draw = draws(seed, forward // self.block_steps)
        each = self.exploration / (len(ARMS) - 1)
        arm, probability = held.copy(), np.full(count, 1.0 - self.exploration)
        for place in range(len(ARMS) - 1):
            drawn = (draw >= place * each) & (draw < (place + 1) * each)
            arm[drawn] = np.where(place < held[drawn], place, place + 1)
            probability[drawn] = each
        k = np.array(ARMS)[arm]

        acceptance = self.acceptances(index)
        rows = np.repeat(np.arange(count), batch)
        offsets = np.concatenate(([0], np.cumsum(batch)))
        place = np.arange(len(rows)) - offsets[rows]
        rng = self.rng(part, 2)
        run = np.floor(np.log(rng.random(len(rows))) / np.log(acceptance[rows])).astype(np.int64)
        # The later half of the rows may end, the first of the next step's are those in flight once more.
        ending = (rng.random(len(rows)) < self.ending) & (place >= (batch[rows] + 1) // 2)
        left = np.where(ending, rng.integers(1, 9, len(rows)), 99)
        within = np.minimum(run, k[rows])
        accepted = np.minimum(within, left - 1)
        truncated = left - 1 <= within
        if self.tie:
            accepted[:] = 0
            truncated = left == 1
        ended = np.bincount(rows[truncated], minlength=count)
        gone = np.minimum(np.concatenate(([carry["ended"]], ended[:-1])), batch // 2)
        gone[prefilled] = 0
        accepted[place < gone[rows]] = MASKED

        before = np.concatenate(([carry["arm"]], arm[:-1]))
        rng = self.rng(part, 3)
        seconds = self.mean_seconds(arm, batch, context_tokens / batch)
        seconds = seconds * np.exp(rng.normal(size=count) * self.noise - 0.5 * self.noise**2)
        seconds += np.where(before >= 0, self.switch_seconds(np.maximum(before, 0), arm), 0.0)
        seconds += np.where(prefilled, 0.02, 0.0)
        time = carry["time"] + np.cumsum(seconds)
        carry.update(arm=int(arm[-1]), ended=int(ended[-1]), time=float(time[-1]), forward=int(forward[-1]))

        columns: dict[str, Any] = {
            "record_seq": index,
            "step": forward,
            "time": time,
            "seconds": seconds,
            "batch_size": batch,
            "padded_batch_size": np.array(CAPTURED)[np.searchsorted(CAPTURED, batch)],
            "context_tokens": context_tokens,
            "steps": k,
            "proposed_steps": k,
            "held_steps": np.array(ARMS)[held],
            "draft_tokens": k + 1,
            "accepted_drafts": lists(offsets, accepted),
            "truncated": lists(np.concatenate(([0], np.cumsum(ended))), place[truncated]),
            "running": batch,
            "queued": 0,
            "kv_used_tokens": context_tokens,
            "retracted": 0,
            "source": 1,
            "epoch": 1,
            "cell": cell,
            "probability": probability if self.exploration else 1.0,
            "block": forward // self.block_steps if self.exploration else -1,
            "previous_kind": np.where(prefilled, int(ForwardKind.EXTEND), int(ForwardKind.DECODE)),
            "previous_width": batch,
            "forwards": 1 + prefilled,
            "prefill_tokens": np.where(prefilled, 600, 0),
            "launch_gap_seconds": -0.001,
            "after_idle": False,
            "graph": True,
            "overlap": True,
            "grammar": False,
        }
        arrays = []
        for field in SCHEMA:
            values = columns[field.name]
            if not isinstance(values, pa.Array):
                values = pa.array(np.broadcast_to(values, count).astype(field.type.to_pandas_dtype()), field.type)
            arrays.append(values)
        states = {
            "batch": batch,
            "context": context_tokens / batch,
            "live": batch - gone,
            "acceptance": acceptance,
            "arm": arm,
        }
        return pa.record_batch(arrays, schema=SCHEMA), states

    def chunks(self) -> Iterator[Chunk]:
        """As ``trace.checked_reader`` would read them."""
        own, key = self.hello, fingerprint(self.hello)
        for part, (batch, _) in enumerate(self.parts()):
            follows = np.ones(batch.num_rows, bool)
            follows[0] = part > 0
            yield Chunk(Path("log"), "node:30000/0", own, key, np.arange(batch.num_rows), follows, Columns(batch))

    def write(self, directory: Path, segment_steps: int = 1 << 18) -> Path:
        """Write it as a trace, and return its directory."""
        folder = directory / "node%3A30000%2F0"
        folder.mkdir(parents=True)
        metadata = {
            "specpilot.trace": str(FORMAT_VERSION),
            "specpilot.wire": str(WIRE_VERSION),
            "specpilot.hello": msgspec.json.encode(msgspec.structs.asdict(self.hello)),
        }
        file: Any = None
        written = segment = 0
        for batch, _ in self.parts():
            if file is None or written >= segment_steps:
                if file is not None:
                    file.close()
                segment, written = segment + 1, 0
                file = (folder / f"{segment:06d}.arrows").open("wb")
                file.write(SCHEMA.with_metadata(metadata).serialize())
            for start in range(0, batch.num_rows, 4096):
                file.write(batch.slice(start, 4096).serialize())
            written += batch.num_rows
        file.close()
        return directory

    def truth(self, target: Plan) -> float:
        """Tokens per second of decoding that a plan without memory was to expect in these states."""
        tokens = seconds = 0.0
        last = -1
        for _, states in self.parts():
            arm = arms_of(target, states)
            expected, own, switches = self.expected(arm, last, states)
            tokens += expected.sum()
            seconds += own.sum() + switches.sum()
            last = int(arm[-1])
        return float(tokens / seconds)

    def gain(self, target: Plan) -> float:
        """How much faster than what ran a plan was to make the same tokens in each group of states."""
        strata = Strata(len(ARMS))
        groups = np.zeros((4, strata.count))
        took = needed = 0.0
        ran_last = last = -1
        for _, states in self.parts():
            ran, arm, held = states["arm"], arms_of(target, states), arms_of(self.logged, states)
            place = strata.of(states["batch"], states["context"], arm, np.sign(arm - held) % RELATIONS)
            work, seconds, switches = self.expected(ran, ran_last, states)
            took += switches.sum()
            sums = [work, seconds]
            tokens, seconds, switches = self.expected(arm, last, states)
            needed += switches.sum()
            for row, values in zip(groups, [*sums, tokens, seconds], strict=True):
                row += np.bincount(place, values, strata.count)
            ran_last, last = int(ran[-1]), int(arm[-1])
        work, seconds, tokens, target_seconds = groups
        took += seconds.sum()
        needed += (work * target_seconds / np.maximum(tokens, 1e-9)).sum()
        return float(took / needed - 1.0)

    def expected(
        self, arm: np.ndarray, last: int, states: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, seconds and seconds of switching that ``arm`` was to take; ``last``: of the step before, or -1."""
        before = np.concatenate(([last if last >= 0 else arm[0]], arm[:-1]))
        return (
            self.tokens_to_expect(arm, states["live"], states["acceptance"]),
            self.mean_seconds(arm, states["batch"], states["context"]),
            self.switch_seconds(before, arm),
        )

    def differing(self, target: Plan) -> float:
        """Share of the steps in which a plan runs another K than the logged one held."""
        different = sum(
            int((arms_of(target, states) != arms_of(self.logged, states)).sum()) for _, states in self.parts()
        )
        return different / self.steps


def arms_of(plan: Plan, states: dict[str, np.ndarray]) -> np.ndarray:
    cell = np.searchsorted(plan.grid.batch_edges, states["batch"]) * plan.grid.shape[1]
    cell += np.searchsorted(plan.grid.context_edges, states["context"])
    return np.searchsorted(ARMS, np.array(plan.choice)[cell])


def draws(seed: int, block: np.ndarray) -> np.ndarray:
    """``specpilot.sglang_hooks.table_policy.uniform`` of many blocks."""
    with np.errstate(over="ignore"):
        word = np.uint64(seed * 4 & (1 << 64) - 1) + block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def lists(offsets: np.ndarray, values: np.ndarray) -> Any:
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(values.astype(np.int16)), SCHEMA.field("truncated").type
    )
