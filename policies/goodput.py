"""Choose, for every batch size and context, the K with the most expected tokens per second.

Tokens per step come from the acceptance model, seconds per step from the cost model; both are
learned from the server's own steps (the goodput of SmartSpec, Liu et al. 2024, with learned and
uncertain terms). Around that argmax stand a few rules: a choice changes only for a gain above its
price, what is nearly as good may stay in force (``rules/choice.py``, ``rules/switching.py``),
exploration has a budget (``rules/exploration.py``), probes tell when a draft is worth its price
again (``rules/recovery.py``), and vetoes bound K for a while (``rules/vetoes.py``).

The class is written in the order of a policy's life: it begins with a server, learns from its
steps, decides, tells what it decided from, and keeps what it learned as a prior.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from specpilot.policies.interface import Alternatives, Grid, Plan, Policy
from specpilot.policies.knowledge import Knowledge
from specpilot.policies.models.acceptance import AcceptanceModel
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost import CostModel
from specpilot.policies.places import CellPlaces
from specpilot.policies.rules.choice import STAY, CellDecision, Expected, chosen, losses, may_stay, outlook
from specpilot.policies.rules.exploration import (
    BLOCK_STEPS,
    LEAST_LOSS,
    PROBE_STEPS,
    Budget,
    alternatives,
    floored,
    probe,
)
from specpilot.policies.rules.recovery import FOLLOW_PROBABILITY, RecoveryTest, plausible_lengths, worth_probing
from specpilot.policies.rules.switching import Spells
from specpilot.policies.rules.vetoes import Vetoes
from specpilot.sglang_hooks.wire import Hello, StepRecord

RECENT_STEPS = 256
"""Newest steps whose cells are decided again at every decision, and that ``describe`` tells of."""
REFRESH_CELLS = 8
"""Other cells that are decided again at every decision, in turn."""

CONTEXT_MEMORY = 0.02
"""Weight of the newest step in the context that stands for its cells."""

UNSETTLED_STEPS = 256
"""First steps of a server; after a change of acceptance a tenth as many. Decisions are more frequent in them."""
UNSETTLED_PERIOD = 16
"""Steps between urgent decisions while unsettled."""
DOUBTED_STEPS = 16
"""First steps in which a server that skips, since a stored prior says so, is probed as often as after a hit."""


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
        allows it, so that the log can tell what other policies would have earned; 0: only what is of use.
        """
        self.vetoes = Vetoes()
        self._prior = prior
        self.configure(time_per_output_token, max_steps, exploration_floor)
        self._server: Hello | None = None
        self._grid = Grid()
        self._cells: list[CellDecision] = []
        self._recent: list[tuple[int, int]] = []
        """Cell and applied K of the newest steps."""
        self._now = 0.0

    def configure(self, time_per_output_token: float | None, max_steps: int | None, exploration_floor: float) -> None:
        """Change the objective and the bounds; what was learned stays, and every cell is decided again."""
        self._objective = time_per_output_token
        self._floor = exploration_floor
        self._decide_all = True
        self.vetoes.lift("operator")
        if max_steps is not None:
            self.vetoes.place("operator", max_steps, float("inf"), "policy.max_steps")

    def _begin(self, server: Hello) -> None:
        self._server = server
        self._arms = sorted(server.candidate_steps)
        self._places = CellPlaces(server)
        self._grid = self._places.grid
        self._cells = [CellDecision(server.fallback_steps) for _ in range(self._grid.cells)]
        self._budget = Budget()
        self._spells = Spells()
        self._recovery = RecoveryTest(max(self._arms[-1], 1))
        self._plausible_lengths = plausible_lengths(self._arms[-1])[:, self._arms]
        self._recent = []
        self._explored_steps, self._explored_seconds = 0, 0.0
        self._decide_all = False
        self._turn = 0
        """The cell that is the next in turn to be decided again."""
        self._held = server.fallback_steps
        """The K in force, as far as the records tell."""
        self._applied = AppliedSteps(server.topk)
        self._unsettled = UNSETTLED_STEPS
        """Steps until decisions are as frequent as usual."""
        self._start_models(server)
        self._changes = self.acceptance.changes

    @staticmethod
    def _key(server: Hello) -> tuple[object, ...]:
        """Return what a server is known again by: another one is begun from the start."""
        return (
            server.candidate_steps,
            server.captured_batch_sizes,
            server.max_running_requests,
            server.gpu,
            server.model,
        )

    # -- learning --

    def learn(self, step: StepRecord) -> None:
        """Learn from one step in both models, and account for what exploring it has cost."""
        if self._server is None or not step.batch_size:
            return
        mean_context = step.context_tokens / step.batch_size
        cell = self._grid.cell(step.padded_batch_size, mean_context)
        decision = self._cells[cell]
        applied = self._applied.of(step)
        if applied is None:
            return
        if applied == decision.choice or applied in decision.keep:
            self._held = applied
        self._test_recovery(step, decision, applied, mean_context)
        self.acceptance.learn(step)
        self.cost.learn(step)
        self.vetoes.observe(step, applied, self._arms, self._server.kv_tokens, self._now)
        self._spells.step(decision.choice)
        # What a prior says is in force from the first step on, and doubted from the second.
        self.urgent |= self._from_prior and not self._recent
        self._recent.append((cell, applied))
        self._places.observe(mean_context, CONTEXT_MEMORY)
        self._budget.spend(self._explored(decision, applied) if step.block >= 0 else 0.0)
        if self.acceptance.changes != self._changes:
            self._changes = self.acceptance.changes
            self._budget.reopen()
            self._recovery.clear()
            self._unsettled = max(self._unsettled, UNSETTLED_STEPS // 10)
            self.urgent = True
        if self._unsettled:
            self._unsettled -= 1
            self.urgent |= self._unsettled % UNSETTLED_PERIOD == 0

    def _test_recovery(self, step: StepRecord, decision: CellDecision, applied: int, mean_context: float) -> None:
        """Learn from a probe of a cell that skips, before the models know of it."""
        if not self._skips(decision):
            if self._recovery.nats:
                self._recovery.clear()
            return
        if not decision.winning or not applied:
            return
        following = self._recovery.following
        hazards = self.acceptance.hazard(step.batch_size, mean_context).tolist()
        self._recovery.learn(step, hazards, decision.winning)
        if self._recovery.sure:
            self.acceptance.presume_change(step, self._recovery.trials, self._recovery.passed)
        elif self._recovery.following != following:
            self.urgent = True

    def _skips(self, decision: CellDecision) -> bool:
        """Is K=0 in force there, chosen or kept? Then nothing but probes tells of acceptance."""
        return decision.choice == 0 or (self._held == 0 and 0 in decision.keep)

    def _explored(self, decision: CellDecision, steps: int) -> float:
        """Return what the budget pays, in steps, for one step at K = ``steps`` where the choice may be another."""
        if not decision.scores or steps == decision.choice or steps not in self._arms:
            return 0.0
        choice = self._arms.index(decision.choice)
        loss = losses(decision, choice, BLOCK_STEPS)[self._arms.index(steps)]
        self._explored_steps += 1
        self._explored_seconds += loss * decision.seconds[choice]
        # What a floor draws has a bound of its own on what it loses, and is not to use up what learning may.
        least = 0.0 if self._floor else LEAST_LOSS
        return max(loss, least)

    # -- deciding --

    def decide(self, server: Hello, now: float) -> Plan:
        """Return the plan; cells that were recently visited are decided again, the others in turn."""
        if self._server is None or self._key(self._server) != self._key(server):
            self._begin(server)
        self._now = now
        self.urgent = False
        self._recent = self._recent[-RECENT_STEPS:]
        visits = Counter(cell for cell, _ in self._recent)
        decided = [index for index, cell in enumerate(self._cells) if cell.scores] if self._decide_all else []
        for index in {*visits, *self._next_in_turn(), *decided}:
            self._decide_cell(index)
        self._decide_all = False
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
                cell: within
                for cell, row in explore.items()
                if (within := tuple((k, probability) for k, probability in row if k <= allowed[-1]))
                and self._cells[cell].choice in allowed
            },
            # What is tried for its cost, and what a floor draws, is for the seconds, which a block's first step
            # does not tell.
            block_steps=PROBE_STEPS if probing and not self._floor else BLOCK_STEPS,
        )

    def _next_in_turn(self) -> list[int]:
        begin, self._turn = self._turn, (self._turn + REFRESH_CELLS) % len(self._cells)
        return [(begin + i) % len(self._cells) for i in range(min(REFRESH_CELLS, len(self._cells)))]

    def _decide_cell(self, index: int) -> None:
        """Choose the K of one cell, which others may stay in force there, and note what that rests on."""
        batch, context = self._places.of(index)
        lengths, length_covariance = self.acceptance.lengths_together(batch, context)
        length_covariance = length_covariance[np.ix_(self._arms, self._arms)]
        seconds, second_covariance = self.cost.predict_together(batch, context)
        expected = Expected(batch, context, lengths[self._arms], length_covariance, seconds, second_covariance)
        scores, allowed = expected.scores, expected.within(self._objective)
        cell = self._cells[index]
        arm = chosen(scores, allowed, self._arms.index(cell.choice))
        cell.choice = self._arms[arm]
        prices = [self._price(k, cell.choice) for k in self._arms]
        spell = self._spells.expected(cell.choice)
        cell.scores, cell.errors = tuple(scores.tolist()), tuple(expected.ratio_errors(arm).tolist())
        cell.seconds, cell.prices = tuple(seconds.tolist()), tuple(prices)
        cell.allowed = tuple(allowed.tolist())
        cell.keep = may_stay(self._arms, cell.scores, cell.allowed, arm, prices, cell.seconds[arm], spell)
        cell.winning = 0.0
        cell.outlook = outlook(expected, cell, self._arms, tuple(self.cost.tried(k, batch) for k in self._arms))

    def _price(self, steps: int, choice: int) -> float:
        """Seconds that switching between the two, there and back, costs beyond their steps."""
        return max(self.cost.switch_seconds(steps, choice)[0] + self.cost.switch_seconds(choice, steps)[0], 0.0)

    def _explore(self, visits: Counter[int]) -> tuple[dict[int, Alternatives], set[int]]:
        """Return what each visited cell is to try, and the cells that only probe for acceptance."""
        rate = self._budget.affordable_rate(100)
        explore: dict[int, Alternatives] = {}
        probed: set[int] = set()
        for index in visits:
            cell = self._cells[index]
            choice = self._arms.index(cell.choice)
            loss = losses(cell, choice, BLOCK_STEPS)
            scores = [score if within else 0.0 for score, within in zip(cell.scores, cell.allowed, strict=True)]
            tried = alternatives(self._arms, scores, cell.errors, choice, loss, rate, self._budget.worth_trying)
            if self._skips(cell) and len(self._arms) > 1:
                probing = self._probe(index)
                if self._recovery.following or not tried:
                    tried = probing
                    probed.add(index)
            if tried:
                explore[index] = tried
        return explore, probed

    def _probe(self, index: int) -> Alternatives:
        """Return, for a cell that skips, one K to try now and then, if any plausible acceptance could win with it."""
        cell = self._cells[index]
        batch, _ = self._places.of(index)
        plausible = np.where(cell.allowed, batch * self._plausible_lengths / cell.seconds, 0.0)
        best = worth_probing(plausible, cell.scores[0] * (1.0 + STAY))
        if best is None:
            return ()
        arm, cell.winning = best
        if self._recovery.following or self._unsettled > UNSETTLED_STEPS - DOUBTED_STEPS:
            return ((self._arms[arm], FOLLOW_PROBABILITY),)
        return ((self._arms[arm], probe(losses(cell, 0, PROBE_STEPS)[arm])),)

    def _add_floor(self, explore: dict[int, Alternatives]) -> None:
        """Let every cell draw each other K now and then, except where a hit is being followed."""
        for index, cell in enumerate(self._cells):
            if not cell.scores or (self._recovery.following and self._skips(cell)):
                continue
            choice = self._arms.index(cell.choice)
            loss = losses(cell, choice, BLOCK_STEPS)
            tried = explore.get(index, ())
            row = floored(tried, self._arms, choice, loss, cell.allowed, self._floor, self._budget.rate)
            if row:
                explore[index] = row

    # -- telling --

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

    def _reason(self, visits: Counter[int]) -> str:
        """One line on the cell that most of the recent steps were in."""
        if not visits:
            return "no steps seen yet: " + ("as the stored prior says" if self._from_prior else "the fallback")
        index = visits.most_common(1)[0][0]
        cell = self._cells[index]
        batch, context = self._places.of(index)
        scores = ", ".join(f"K={k} {score:,.0f}" for k, score in zip(self._arms, cell.scores, strict=True))
        return f"at batch {batch}, {context:,.0f} tokens: {scores} tokens/s"

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

    # -- what is kept for the next start --

    def to_prior(self) -> dict[str, Any] | None:
        """Return what both models know; None before any server."""
        if self._server is None:
            return None
        return {"cost": self.cost.to_prior(), "acceptance": self.acceptance.to_prior()}

    def _start_models(self, server: Hello) -> None:
        """Begin both models with the stored prior, as far as it is one of such a server, and decide by it."""
        prior = self._prior or {}
        positions = max(self._arms[-1], 1)
        self.cost = CostModel(server, prior.get("cost"))
        self.acceptance = AcceptanceModel(positions, server.topk)
        self._from_prior = self.cost.cells > 0
        self._ignored = ""
        """Why a stored prior, or a part of it, is not used; empty if it is."""
        if not self._from_prior:
            self._ignored = self.cost.note if prior else ""
            return
        try:
            self.acceptance = AcceptanceModel.from_prior(prior.get("acceptance"), positions, server.topk)
        except ValueError as error:
            self._ignored = f"acceptance prior ignored: {error}"
        for cell in range(self._grid.cells):
            self._decide_cell(cell)
