"""What the policy gains on a live server, measured: blocks of the policy against blocks of the fallback.

    |  policy ...  | A | B |  policy ...  | B | A |  policy ...      A, B: policy and fallback, in random order
                     pair                   pair

For a share of the time *pairs* of blocks are run, in each the policy's table once and the server's
static fallback once, in an order that is drawn (a switchback experiment: Bojinov, Simchi-Levi & Zhao 2023,
with the washout there called carryover). Where a pair lies in its period is drawn too, so that no rhythm of
the load falls in step with it.

Of each pair comes the log of a ratio of tokens per second of decoding. The load differs between blocks,
and between the arms *because* one of them is faster, so only steps of the same batch size are set against each
other (direct standardisation, the weights of Mantel & Haenszel 1959). So it is a ratio of efficiency at equal
load, not of what clients saw in queues.

An operator, and the controller, look again after every pair. The interval therefore holds at all
looks together (an asymptotic confidence sequence: Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas 2024, widened
by Student's t for few pairs), about half as wide again as one for a single look.
"""

from __future__ import annotations

import enum
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import msgspec

from specpilot.controller.config import SwitchbackConfig
from specpilot.policies.interface import Grid, Plan
from specpilot.policies.student import NORMAL_975, student_975
from specpilot.sglang_hooks.wire import MASKED, DecisionSource, Hello, StepRecord

CLAIM_PAIRS = 10
"""Pairs of blocks from which on a gain is stated: the spread of fewer is not known."""
KEPT_PAIRS = 200
"""Newest pairs that count: older ones are of another load, and at a tenth of the time 200 take three days."""
MATCHED_STEPS = 50.0
"""Steps of equal batch size that a pair must have, in steps of each arm."""
TRIAL_PAIRS = CLAIM_PAIRS + 2
"""Pairs that follow each other when the policy is tried again, enough to tell whether it still loses: it decides half
of that time."""
MOST_LOG_RATIO = 20.0
"""Largest log ratio believed: nothing is 500 million times as fast, so a larger one comes of nonsense."""
LEVEL_ERROR = 0.05
"""Probability that the interval misses the truth at any look."""
TIGHTEST_PAIRS = 20
"""Number of pairs about which the confidence sequence is tightest."""


class Arm(enum.Enum):
    """Who decides in a block."""

    POLICY = "policy"
    FALLBACK = "fallback"


class Measured(msgspec.Struct, frozen=True):
    """Gain of the policy over the fallback as a share of the latter's tokens per second, and its 95 % interval."""

    gain: float
    low: float
    high: float


class SwitchbackStatus(msgspec.Struct, frozen=True):
    """What ``specpilot status`` shows of one server's switchback."""

    arm: str
    """Who decides now: ``policy`` or ``fallback``."""
    fallback_steps: int
    """K of the fallback that the policy is compared with."""
    measured: Measured | None
    """The policy's gain; None before there are enough pairs."""
    pairs: int
    """Pairs of blocks that count."""
    pairs_needed: int
    """Pairs of blocks that are needed before a gain is stated."""
    pairs_unmatched: int
    """Pairs that do not count: too few steps of equal batch size in both blocks, or interrupted."""
    off_seconds: float
    """Seconds until a policy that is suspended, since it was losing, is tried again; 0 while it is not suspended."""

    @property
    def text(self) -> str:
        """Return it in one line."""
        if self.measured is None:
            return f"not known yet: {self.pairs} of {self.pairs_needed} pairs of blocks measured"
        against = f"against the fallback K={self.fallback_steps}, {self.pairs} pairs of blocks"
        if self.off_seconds:
            again = f"the fallback is in force, the policy is tried again in {_hours(self.off_seconds)}"
            return f"{describe(self.measured)} {against}; {again}"
        if not _differs(self.measured):
            return f"no difference shown, {100 * self.measured.gain:+.1f} % {_interval(self.measured)} {against}"
        return f"{describe(self.measured)} {against}"


class Stored(msgspec.Struct, frozen=True):
    """What survives a restart of the controller."""

    identity: str
    """What was compared (policy, fallback, machine): a measurement of anything else is not continued."""
    log_ratios: list[float]
    """Log of the policy's over the fallback's tokens per second, of each pair that counts, oldest first."""
    unmatched: int
    """Pairs that do not count."""
    off_until: float
    """When a suspended policy is tried again, in seconds since the Unix epoch; 0 while it is not suspended."""
    trial: bool
    """The policy is being tried again."""


@dataclass
class _Block:
    arm: Arm
    begun_at: float
    ends_at: float
    epoch: int | None = None
    """Epoch of the block's first table; None until that was decided."""
    by_batch: dict[int, list[float]] = field(default_factory=dict)
    """Sums by batch size: steps, tokens, seconds."""


class Switchback:
    """One server's experiment. ``arm`` moves it on; records come through ``learn``.

    Time is that of the caller's clock, in seconds, and never goes back.
    """

    def __init__(self, config: SwitchbackConfig, server: Hello, seed: int, now: float) -> None:
        """``seed``: of the order and the place of pairs."""
        self.config = config
        self._fallback = server.fallback_steps
        self._random = random.Random(f"switchback {seed}")  # noqa: S311
        self._log_ratios: deque[float] = deque(maxlen=KEPT_PAIRS)
        self._unmatched = 0
        self._off_until: float | None = None
        self._trial = False
        self._block: _Block | None = None
        self._first: _Block | None = None
        """First block of a pair whose second block runs."""
        self._to_come: list[Arm] = []
        self._period_at = now
        self._pair_at = self._drawn()
        self.news = ""
        """Line for the log: the policy was suspended, or is tried again. Whoever reads it clears it."""
        self.changed = False
        """Has something changed that is to be stored? Whoever stores it clears this."""

    # -- across restarts --

    def stored(self, identity: str, now: float, wall: float) -> Stored:
        """Return what is to be kept; ``wall`` is ``now`` in seconds since the Unix epoch."""
        off_until = 0.0 if self._off_until is None else wall + self._off_until - now
        return Stored(identity, list(self._log_ratios), self._unmatched, off_until, self._trial)

    def resume(self, stored: Stored, now: float, wall: float) -> None:
        """Continue from what was kept; a suspended policy stays so until its time."""
        ratios = [ratio for ratio in stored.log_ratios if abs(ratio) <= MOST_LOG_RATIO]
        self._log_ratios.extend(ratios)
        self._unmatched = max(stored.unmatched, 0)
        self._trial = stored.trial
        if stored.off_until:
            # A clock that was set back must not keep the policy off for longer than it ever would be.
            self._off_until = now + min(max(stored.off_until - wall, 0.0), self.config.retry_seconds)
        if self._trial:
            self._pair_at = now

    # -- time --

    def due(self, now: float) -> bool:
        """Would ``arm`` now begin or end a block, or try the policy again?"""
        if self._off_until is not None:
            return now >= self._off_until
        return now >= (self._pair_at if self._block is None else self._block.ends_at)

    def arm(self, now: float) -> Arm:
        """Return who decides from ``now`` on."""
        if self._off_until is not None:
            if now < self._off_until:
                return Arm.FALLBACK
            self._try_again(now)
        if self._block is not None and now >= self._block.ends_at:
            self._end_block(now)
            if self._off_until is not None:
                return Arm.FALLBACK
        if self._block is None and now >= self._pair_at:
            self._to_come = [Arm.POLICY, Arm.FALLBACK]
            if self._random.random() < 0.5:
                self._to_come.reverse()
            self._begin_block(now)
        return Arm.POLICY if self._block is None else self._block.arm

    def decided(self, epoch: int) -> None:
        """Note the newest table that was sent: a block's steps are those of its first one and later ones."""
        if self._block is not None and self._block.epoch is None:
            self._block.epoch = epoch

    def interrupted(self, now: float) -> None:
        """Give up the pair that runs: the server was restarted, the two blocks are not comparable."""
        if self._block is not None:
            self._unmatched += 1
            self._end_pair(now)

    def _begin_block(self, now: float) -> None:
        self._block = _Block(self._to_come.pop(0), now, now + self.config.block_seconds)

    def _end_block(self, now: float) -> None:
        block, first = self._block, self._first
        assert block is not None
        if now - block.ends_at > self.config.block_seconds:  # the controller itself was stopped
            self.interrupted(now)
        elif first is None:
            self._first = block
            self._begin_block(now)
        else:
            by_arm = {half.arm: half.by_batch for half in (first, block)}
            ratio = log_ratio(by_arm[Arm.POLICY], by_arm[Arm.FALLBACK])
            if ratio is None:
                self._unmatched += 1
            else:
                self._log_ratios.append(ratio)
            self._end_pair(now)
            self._judge(now)

    def _end_pair(self, now: float) -> None:
        self._block = self._first = None
        self.changed = True
        self._trial = self._trial and len(self._log_ratios) < TRIAL_PAIRS
        if self._trial:
            self._pair_at = self._period_at = now
            return
        self._period_at = max(self._period_at + self._period, now)
        self._pair_at = self._drawn()

    @property
    def _period(self) -> float:
        return 2.0 * self.config.block_seconds / self.config.share

    def _drawn(self) -> float:
        spare = self._period - 2.0 * self.config.block_seconds
        return self._period_at + self._random.random() * max(spare, 0.0)

    def _judge(self, now: float) -> None:
        measured = self.measured
        if measured is None or measured.high >= 0.0:
            return
        self._off_until = now + self.config.retry_seconds
        self.news = (
            f"the policy is {describe(measured)} against the fallback K={self._fallback}: the fallback is in force, "
            f"the policy is tried again in {_hours(self.config.retry_seconds)}"
        )

    def _try_again(self, now: float) -> None:
        self._off_until = None
        self._log_ratios.clear()
        self._unmatched = 0
        self._trial = True
        self._period_at = self._pair_at = now
        self.changed = True
        self.news = f"the policy is tried again, after it was losing against the fallback K={self._fallback}"

    # -- what is measured --

    def learn(self, step: StepRecord, now: float) -> None:
        """Count a record, received ``now``, if it is a block's own and tells a step's time."""
        block = self._block
        if block is None or block.epoch is None or step.epoch < block.epoch or step.source != DecisionSource.TABLE:
            return
        if not block.begun_at + self.config.washout_seconds <= now < block.ends_at:
            return
        if step.forwards != 1 or step.after_idle or step.seconds <= 0.0:
            return
        live = [accepted for accepted in step.accepted_drafts if accepted != MASKED]
        if not live:
            return
        # Rows that are masked for want of draft context are still served: they count as the others do.
        tokens = step.batch_size * (1.0 + sum(live) / len(live))
        sums = block.by_batch.setdefault(step.batch_size, [0.0, 0.0, 0.0])
        sums[0] += 1.0
        sums[1] += tokens
        sums[2] += step.seconds

    @property
    def measured(self) -> Measured | None:
        """The gain so far; None before enough pairs."""
        return measure(self._log_ratios) if len(self._log_ratios) >= CLAIM_PAIRS else None

    def status(self, now: float) -> SwitchbackStatus:
        """Return what an operator may want to know."""
        off = self._off_until is not None
        arm = Arm.FALLBACK if off else Arm.POLICY if self._block is None else self._block.arm
        return SwitchbackStatus(
            arm=arm.value,
            fallback_steps=self._fallback,
            measured=self.measured,
            pairs=len(self._log_ratios),
            pairs_needed=CLAIM_PAIRS,
            pairs_unmatched=self._unmatched,
            off_seconds=max(self._off_until - now, 0.0) if self._off_until is not None else 0.0,
        )


def fallback_plan(server: Hello) -> Plan:
    """Return the server's static fallback, as a table of one cell."""
    return Plan(
        Grid(),
        (server.fallback_steps,),
        (frozenset(),),
        f"the fallback K={server.fallback_steps}, to measure what the policy gains",
    )


def log_ratio(policy: dict[int, list[float]], fallback: dict[int, list[float]]) -> float | None:
    """Return log of the policy's over the fallback's tokens per second at equal batch sizes.

    Arguments are (steps, tokens, seconds) by batch size. Each arm's tokens and seconds are those of a
    mean step at each batch size, weighted by n m / (n + m) of the steps n and m that the arms have there.
    None where that is less than ``MATCHED_STEPS`` of each arm, or the result is nonsense.

    >>> round(log_ratio({2: [100, 400.0, 1.0], 9: [50, 900.0, 1.0]}, {2: [50, 100.0, 0.5]}), 4)
    0.6931
    >>> log_ratio({2: [100, 400.0, 1.0]}, {3: [100, 400.0, 1.0]}) is None
    True
    """
    sums = [0.0, 0.0, 0.0, 0.0]
    matched = 0.0
    for batch in policy.keys() & fallback.keys():
        (n, tokens, seconds), (m, other_tokens, other_seconds) = policy[batch], fallback[batch]
        weight = n * m / (n + m)
        matched += 2.0 * weight
        means = (tokens / n, seconds / n, other_tokens / m, other_seconds / m)
        sums = [total + weight * mean for total, mean in zip(sums, means, strict=True)]
    if matched < MATCHED_STEPS:
        return None
    tokens, seconds, other_tokens, other_seconds = sums
    ratio = math.log(tokens) - math.log(seconds) - math.log(other_tokens) + math.log(other_seconds)
    return ratio if abs(ratio) <= MOST_LOG_RATIO else None


def measure(log_ratios: Sequence[float]) -> Measured:
    """Return the mean gain and its interval of at least two pairs.

    >>> measured = measure([0.10, 0.12, 0.08, 0.11, 0.09, 0.10])
    >>> [round(100 * share, 1) for share in (measured.gain, measured.low, measured.high)]
    [10.5, 7.9, 13.2]
    """
    count = len(log_ratios)
    mean = fmean(log_ratios)
    half = stdev(log_ratios) / math.sqrt(count) * multiplier(count)
    return Measured(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))


def multiplier(count: int) -> float:
    """Return by how many standard errors the interval reaches to either side, at whichever count one looks.

    Waudby-Smith et al. 2024: sqrt((1 + 1/v) log((v + 1) / alpha^2)) with v = n rho^2, tightest
    where v is about 8; times what Student's t is wider than the normal for so few pairs.

    >>> [round(multiplier(count), 2) for count in (5, 20, 200)]
    [4.62, 3.24, 3.26]
    """
    v = 8.0 * count / TIGHTEST_PAIRS
    uniform = math.sqrt((1.0 + 1.0 / v) * math.log((v + 1.0) / LEVEL_ERROR**2))
    return uniform * student_975(count - 1) / NORMAL_975


def describe(measured: Measured) -> str:
    """Return the gain in words.

    >>> describe(Measured(-0.051, -0.072, -0.0298)), describe(Measured(0.123, 0.081, 0.166))
    ('losing 5.1 % (-7.2 … -3.0)', 'gaining 12.3 % (8.1 … 16.6)')
    """
    word = "losing" if measured.gain < 0.0 else "gaining"
    return f"{word} {100 * abs(measured.gain):.1f} % {_interval(measured)}"


def _interval(measured: Measured) -> str:
    return f"({100 * measured.low:.1f} … {100 * measured.high:.1f})"


def _differs(measured: Measured) -> bool:
    return measured.low > 0.0 or measured.high < 0.0


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
