"""Choose, for every batch size and context, the K with the most expected tokens per second.

Tokens per step come from the acceptance model, seconds per step from the cost model; both are
learned from the server's own steps (the goodput of SmartSpec, Liu et al. 2024, with learned and
uncertain terms). Around that argmax stand a few rules: a choice changes only for a gain above
its price, what is nearly as good may be kept in force (``switching.py``), exploration has a budget
(``exploration.py``), probes tell when a draft is worth its price again (``recovery.py``), and
vetoes bound K for a while (``vetoes.py``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.policies.knowledge import Knowledge, Outlook
from specpilot.policies.models.acceptance import AcceptanceModel
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost import CostModel
from specpilot.policies.rules.exploration import (
    BLOCK_STEPS,
    LEAST_LOSS,
    PROBE_STEPS,
    Budget,
    alternatives,
    floored,
    probe,
)
from specpilot.policies.rules.recovery import FOLLOW_PROBABILITY, Watch
from specpilot.policies.rules.switching import Spells, may_lose
from specpilot.policies.rules.vetoes import Vetoes
from specpilot.sglang_hooks.wire import Hello, StepRecord

CONTEXT_EDGES = (1024, 4096, 16384)
"""Tokens per request; attention's share of a step differs by more than noise between these."""

STAY = 0.003
"""A choice changes for a gain above this share: ties stay put."""

KEEP = 0.005
"""What is within this share of the choice may stay in force when the batch moves between cells.

Not K=0, which would tell nothing of the drafts: it stays only for what a switch costs.
"""

RECENT_STEPS = 256
REFRESH_CELLS = 8
"""Cells not visited of late are decided anew in turn, this many at a time."""

UNSETTLED_STEPS = 256
UNSETTLED_PERIOD = 16
"""So often a decision is urgent in the first steps, and in the first tenth of them after a change."""

SIGMAS = 1.96
"""Standard errors by which an objective has to be met: 97.5 %."""

DOUBTED_STEPS = 16
"""A server that starts to skip since a stored prior says so is probed like after a hit for so long."""

PLAUSIBLE = np.linspace(0.05, 0.95, 19)
"""Acceptance per draft that a drafter may have; what no value of these could make pay is not probed."""


@dataclass
class _Cell:
    """The last decision of one cell."""

    choice: int
    keep: frozenset[int] = frozenset()
    scores: tuple[float, ...] = ()
    """Expected tokens per second by arm."""
    errors: tuple[float, ...] = ()
    """Relative standard errors of their ratios to that of the choice."""
    seconds: tuple[float, ...] = ()
    """Of a step, by arm."""
    prices: tuple[float, ...] = ()
    """Seconds that switching to that arm and back costs."""
    allowed: tuple[bool, ...] = ()
    """Arms within the objective."""
    winning: float = 0.0
    """While it skips: acceptance per draft at which speculating would win clearly; 0: none would."""
    outlook: Outlook | None = None
    """The same for people."""


class Goodput(Policy):
    """Learns acceptance and cost of one server, and plans for the most tokens per second.

    With ``time_per_output_token`` (seconds) only such K are chosen, kept or tried as meet it with
    97.5 % confidence, as long as there is one. For a given batch the K with the most tokens per
    second also has the shortest mean time per token, so the objective decides between what is
    known well and what may be better or worse, and forbids exploring at the clients' expense.
    """

    name = "goodput"

    def __init__(
        self,
        prior: dict[str, Any] | None = None,
        time_per_output_token: float | None = None,
        max_steps: int | None = None,
        exploration_floor: float = 0.0,
    ) -> None:
        """``prior``: of ``to_prior``, for a server of the same fingerprint. ``max_steps``: an operator's bound on K.

        ``exploration_floor``: probability of a block for each other K in every cell, as far as the budget
        bears it, so that the log can tell what other policies would have earned; 0: what is of use alone.
        """
        self.vetoes = Vetoes()
        self._prior = prior
        self.configure(time_per_output_token, max_steps, exploration_floor)
        self._server: Hello | None = None
        self._grid = Grid()
        self._cells: list[_Cell] = []
        self._recent: list[tuple[int, int]] = []
        """Cell and applied K of the newest steps."""
        self._now = 0.0

    def configure(self, time_per_output_token: float | None, max_steps: int | None, exploration_floor: float) -> None:
        """Change the objective and the bounds; what was learned stays, and every cell is decided anew."""
        self._objective = time_per_output_token
        self._floor = exploration_floor
        self._all_anew = True
        self.vetoes.lift("operator")
        if max_steps is not None:
            self.vetoes.place("operator", max_steps, float("inf"), "policy.max_steps")

    def _begin(self, server: Hello) -> None:
        self._server = server
        self._arms = sorted(server.candidate_steps)
        sizes = tuple(size for size in sorted(server.captured_batch_sizes) if size <= server.max_running_requests)
        self._grid = Grid(sizes, tuple(edge for edge in CONTEXT_EDGES if edge < max(server.context_length, 1)))
        self._cells = [_Cell(server.fallback_steps) for _ in range(self._grid.cells)]
        # By column, of which the last has whatever contexts are above its edge; guesses until one is seen.
        self._context = [512.0, 2048.0, 8192.0, 32768.0][: len(self._grid.context_edges) + 1]
        self._budget = Budget()
        self._spells = Spells()
        self._watch = Watch(max(self._arms[-1], 1))
        self._recent = []
        self._explored_steps, self._explored_seconds = 0, 0.0
        self._all_anew = False
        self._turn = 0
        self._held = server.fallback_steps
        self._applied = AppliedSteps(server.topk)
        self._unsettled = UNSETTLED_STEPS
        self._plausible_lengths = (PLAUSIBLE[:, None, None] ** np.arange(self._arms[-1] + 1)).cumsum(axis=2)[:, 0]
        self._start_models(server)
        self._changes = self.acceptance.changes

    def _start_models(self, server: Hello) -> None:
        prior = self._prior or {}
        self._from_prior = False
        self.cost = CostModel(server, prior.get("cost"))
        self.acceptance = AcceptanceModel(max(self._arms[-1], 1), server.topk)
        self._ignored = ""
        if not prior:
            return
        self._from_prior = self.cost.cells > 0
        if not self._from_prior:
            self._ignored = self.cost.note
            return
        try:
            self.acceptance = AcceptanceModel.from_prior(prior.get("acceptance"), max(self._arms[-1], 1), server.topk)
        except ValueError as error:
            self._ignored = f"acceptance prior ignored: {error}"
        for cell in range(self._grid.cells):
            self._decide_cell(cell)

    def to_prior(self) -> dict[str, Any] | None:
        """Return what both models know; None before any server."""
        if self._server is None:
            return None
        return {"cost": self.cost.to_prior(), "acceptance": self.acceptance.to_prior()}

    @property
    def note(self) -> str:  # type: ignore[override]
        """What an operator should look at: a broken drafter, a prior that was ignored."""
        if self._server is None:
            return ""
        broken = ""
        if self.acceptance.drafter_broken:
            broken = (
                "drafter broken: fewer than 5 % of its first drafts are accepted. "
                "Does the draft model belong to this target model and revision?"
            )
        return "; ".join(filter(None, (broken, self._ignored)))

    # -- learning --

    def learn(self, step: StepRecord) -> None:
        """Take one step into both models, and account for what exploring it has cost."""
        if self._server is None or not step.batch_size:
            return
        mean_context = step.context_tokens / step.batch_size
        cell = self._grid.cell(step.padded_batch_size, mean_context)
        decided = self._cells[cell]
        applied = self._applied.of(step)
        if applied is None:
            return
        if applied == decided.choice or applied in decided.keep:
            self._held = applied
        if self._skips(decided) and decided.winning and applied:
            self._probed(step, decided.winning, mean_context)
        elif not self._skips(decided) and self._watch.nats:
            self._watch.clear()
        self.acceptance.learn(step)
        self.cost.learn(step)
        self.vetoes.observe(step, applied, self._arms, self._server.kv_tokens, self._now)
        self._spells.step(decided.choice)
        # What a prior says is in force from the first step on, and doubted from the second.
        self.urgent |= self._from_prior and not self._recent
        self._recent.append((cell, applied))
        column = cell % len(self._context)
        self._context[column] += 0.02 * (mean_context - self._context[column])
        self._budget.spend(self._explored(decided, applied) if step.block >= 0 else 0.0)
        if self.acceptance.changes != self._changes:
            self._changes = self.acceptance.changes
            self._budget.reopen()
            self._watch.clear()
            self._unsettled = max(self._unsettled, UNSETTLED_STEPS // 10)
            self.urgent = True
        if self._unsettled:
            self._unsettled -= 1
            self.urgent |= self._unsettled % UNSETTLED_PERIOD == 0

    def _skips(self, cell: _Cell) -> bool:
        """Is K=0 in force there, chosen or kept? Then nothing but probes tells of acceptance."""
        return cell.choice == 0 or (self._held == 0 and 0 in cell.keep)

    def _probed(self, step: StepRecord, winning: float, mean_context: float) -> None:
        """Take in a speculative step of a cell that skips."""
        following = self._watch.following
        self._watch.learn(step, self.acceptance.hazard(step.batch_size, mean_context).tolist(), winning)
        if self._watch.sure:
            self.acceptance.presume_change(step, self._watch.trials, self._watch.passed)
        elif self._watch.following != following:
            self.urgent = True

    def _explored(self, decided: _Cell, steps: int) -> float:
        """Return what the budget pays, in steps, for one step of ``steps`` where the choice may be another."""
        if not decided.scores or steps == decided.choice or steps not in self._arms:
            return 0.0
        choice = self._arms.index(decided.choice)
        loss = losses(decided, choice, BLOCK_STEPS)[self._arms.index(steps)]
        self._explored_steps += 1
        self._explored_seconds += loss * decided.seconds[choice]
        # What a floor draws has a bound of its own on what it loses, and is not to use up what learning may.
        least = 0.0 if self._floor else LEAST_LOSS
        return max(loss, least)

    # -- deciding --

    def decide(self, server: Hello, now: float) -> Plan:
        """Return the plan; cells that were visited of late are decided anew, the others in turn."""
        if self._server is None or self._key(self._server) != self._key(server):
            self._begin(server)
        self._now = now
        self.urgent = False
        self._recent = self._recent[-RECENT_STEPS:]
        visits = Counter(cell for cell, _ in self._recent)
        anew = [index for index, cell in enumerate(self._cells) if cell.scores] if self._all_anew else []
        for cell in {*visits, *self._next_in_turn(), *anew}:
            self._decide_cell(cell)
        self._all_anew = False
        bound = self.vetoes.max_steps(now)
        allowed = [k for k in self._arms if bound is None or k <= bound] or self._arms[:1]
        explore, probed = self._explore(visits)
        probing = bool(visits) and visits.most_common(1)[0][0] in probed
        if self._floor:
            self._add_floor(explore)
        return Plan(
            self._grid,
            tuple(min(cell.choice, allowed[-1]) for cell in self._cells),
            tuple(cell.keep.intersection(allowed) for cell in self._cells),
            "; ".join([self._reason(visits), *self.vetoes.reasons(now)]),
            explore={
                cell: kept
                for cell, row in explore.items()
                if (kept := tuple(one for one in row if one[0] <= allowed[-1])) and self._cells[cell].choice in allowed
            },
            # What is tried for its cost, and what a floor draws, is for the seconds, which a block's first step
            # does not tell.
            block_steps=PROBE_STEPS if probing and not self._floor else BLOCK_STEPS,
        )

    @staticmethod
    def _key(server: Hello) -> tuple[object, ...]:
        return (
            server.candidate_steps,
            server.captured_batch_sizes,
            server.max_running_requests,
            server.gpu,
            server.model,
        )

    def _next_in_turn(self) -> list[int]:
        begin, self._turn = self._turn, (self._turn + REFRESH_CELLS) % len(self._cells)
        return [(begin + i) % len(self._cells) for i in range(min(REFRESH_CELLS, len(self._cells)))]

    def _place(self, cell: int) -> tuple[int, float]:
        """Batch size and mean context that stand for a cell: the padded size, and the context seen there."""
        row, column = divmod(cell, len(self._context))
        sizes = self._grid.batch_edges
        batch = sizes[row] if row < len(sizes) else (sizes[-1] * 5 // 4 + 1 if sizes else 1)
        return batch, self._context[column]

    def _decide_cell(self, index: int) -> None:
        batch, context = self._place(index)
        lengths, of_lengths = self.acceptance.lengths_together(batch, context)
        seconds, of_seconds = self.cost.predict_together(batch, context)
        length = lengths[self._arms]
        scores = batch * length / seconds
        covariance = of_lengths[np.ix_(self._arms, self._arms)] + of_seconds
        variances = covariance.diagonal()
        allowed = np.ones(len(self._arms), bool)
        if self._objective is not None:
            meets = seconds / length * (1.0 + SIGMAS * np.sqrt(variances)) <= self._objective
            allowed = meets if meets.any() else allowed
        cell = self._cells[index]
        best = int(np.argmax(np.where(allowed, scores, -np.inf)))
        current = self._arms.index(cell.choice)
        if not allowed[current] or scores[best] > scores[current] * (1.0 + STAY):
            current = best
        cell.choice = self._arms[current]
        prices = [self._price(k, cell.choice) for k in self._arms]
        spell = self._spells.expected(cell.choice)
        cell.keep = frozenset(
            k
            for k, score, price, within in zip(self._arms, scores, prices, allowed, strict=True)
            if within
            and k != cell.choice
            and score > scores[current] * (1.0 - max(KEEP if k else 0.0, may_lose(price, seconds[current], spell)))
        )
        of_ratios = np.maximum(variances + variances[current] - 2.0 * covariance[current], 0.0)
        cell.scores, cell.errors = tuple(scores.tolist()), tuple(np.sqrt(of_ratios).tolist())
        cell.seconds, cell.prices = tuple(seconds.tolist()), tuple(prices)
        cell.allowed = tuple(allowed.tolist())
        cell.winning = 0.0
        of_none = np.maximum(variances + variances[0] - 2.0 * covariance[0], 0.0)
        cell.outlook = Outlook(
            steps=tuple(self._arms),
            batch_size=batch,
            mean_context=context,
            choice=cell.choice,
            keep=tuple(sorted(cell.keep)),
            lengths=tuple(length.tolist()),
            length_errors=tuple(np.sqrt(of_lengths.diagonal()[self._arms]).tolist()),
            seconds=cell.seconds,
            second_errors=tuple(np.sqrt(of_seconds.diagonal()).tolist()),
            choice_errors=cell.errors,
            none_errors=tuple(np.sqrt(of_none).tolist()) if self._arms[0] == 0 else (),
            tried=tuple(self.cost.tried(k, batch) for k in self._arms),
            allowed=cell.allowed,
        )

    def describe(self) -> Knowledge | None:
        """Return what was known at the last decision; None before any server."""
        if self._server is None:
            return None
        return Knowledge(
            steps=tuple(self._arms),
            batch_edges=self._grid.batch_edges,
            context_edges=self._grid.context_edges,
            cells=tuple(cell.outlook for cell in self._cells),
            recent=Counter(self._recent[-RECENT_STEPS:]),
            positions=self.acceptance.positions() if self._arms[-1] else (),
            drafter_broken=self.acceptance.drafter_broken,
            explored_steps=self._explored_steps,
            explored_seconds=self._explored_seconds,
        )

    def _price(self, steps: int, choice: int) -> float:
        """Seconds that switching between the two, there and back, costs beyond their steps."""
        return max(self.cost.switch_seconds(steps, choice)[0] + self.cost.switch_seconds(choice, steps)[0], 0.0)

    def _explore(self, visits: Counter[int]) -> tuple[dict[int, tuple[tuple[int, float], ...]], set[int]]:
        """Return what each cell is to try, and the cells that only probe for acceptance."""
        rate = self._budget.affordable_rate(100)
        found, probed = {}, set()
        for index in visits:
            cell = self._cells[index]
            current = self._arms.index(cell.choice)
            loss = losses(cell, current, BLOCK_STEPS)
            scores = [score if within else 0.0 for score, within in zip(cell.scores, cell.allowed, strict=True)]
            tried = alternatives(self._arms, scores, cell.errors, current, loss, rate, self._budget.worth_trying)
            if self._skips(cell) and len(self._arms) > 1:
                probing = self._probe(index)
                if self._watch.following or not tried:
                    tried = probing
                    probed.add(index)
            if tried:
                found[index] = tried
        return found, probed

    def _add_floor(self, explore: dict[int, tuple[tuple[int, float], ...]]) -> None:
        """Let every cell draw each other K now and then, but where a hit is being followed."""
        for index, cell in enumerate(self._cells):
            if not cell.scores or (self._watch.following and self._skips(cell)):
                continue
            current = self._arms.index(cell.choice)
            loss = losses(cell, current, BLOCK_STEPS)
            tried = explore.get(index, ())
            row = floored(tried, self._arms, current, loss, cell.allowed, self._floor, self._budget.rate)
            if row:
                explore[index] = row

    def _probe(self, index: int) -> tuple[tuple[int, float], ...]:
        """While skipping: one K now and then, if any acceptance that a draft may have could win with it."""
        cell = self._cells[index]
        batch, _ = self._place(index)
        plausible = batch * self._plausible_lengths[:, self._arms] / cell.seconds
        plausible = np.where(cell.allowed, plausible, 0.0)[:, 1:]
        wins = np.flatnonzero(plausible.max(axis=1) > cell.scores[0] * (1.0 + STAY))
        if not len(wins):
            return ()
        row = (int(wins[0]) + len(PLAUSIBLE) - 1) // 2
        cell.winning = float(PLAUSIBLE[row])
        arm = int(np.argmax(plausible[row])) + 1
        if self._watch.following or self._unsettled > UNSETTLED_STEPS - DOUBTED_STEPS:
            return ((self._arms[arm], FOLLOW_PROBABILITY),)
        return ((self._arms[arm], probe(losses(cell, 0, PROBE_STEPS)[arm])),)

    def _reason(self, visits: Counter[int]) -> str:
        """One line on the cell that most steps of late were in."""
        if not visits:
            return "no steps seen yet: " + ("as the stored prior says" if self._from_prior else "the fallback")
        index = visits.most_common(1)[0][0]
        cell = self._cells[index]
        batch, context = self._place(index)
        scores = ", ".join(f"K={k} {score:,.0f}" for k, score in zip(self._arms, cell.scores, strict=True))
        return f"at batch {batch}, {context:,.0f} tokens: {scores} tokens/s"


def losses(cell: _Cell, choice: int, block: int) -> list[float]:
    """Return the time that a step of each arm loses, in steps of the choice, its share of the switches included.

    Lost is what is beyond the time in which the choice makes as many tokens.

    >>> losses(_Cell(0, scores=(100.0, 75.0), seconds=(0.01, 0.02), prices=(0.0, 0.01)), choice=0, block=4)
    [0.0, 0.75]
    """
    rows = zip(cell.scores, cell.seconds, cell.prices, strict=True)
    return [
        (max(1.0 - score / cell.scores[choice], 0.0) * seconds + price / block) / cell.seconds[choice]
        for score, seconds, price in rows
    ]
