"""The evaluation of policies by the log of the one that ran: two passes over a trace, and a replay.

    TRACES ─► pass 1: models of each half ─► tables, models for the other half
           ─► pass 2: weights, tokens, seconds by stratum and replicate ─► per-step efficiency
           ─► replay on the fitted models                               ─► effect on the server

Two kinds of answers that must not be mixed. *Per-step efficiency* (``snips``, ``doubly-robust``) is an
estimate from what happened, in the states that were logged (``policies/offpolicy/estimators.py``). The *effect on
the server* (``replay``) is a simulation. Memory does not depend on the length of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specpilot.controller.errors import ConfigError
from specpilot.controller.evaluate.fold_models import FoldModel, FoldSums, fit_folds
from specpilot.controller.evaluate.report import EFFECT, EFFICIENCY, HALF_WIDTH, Evaluation, Row, UnansweredCell
from specpilot.controller.evaluate.server_effect import SEEDS, Effect, effects
from specpilot.controller.evaluate.step_reader import StepReader
from specpilot.controller.replay.policies import parse_policy
from specpilot.controller.trace.checked_reader import Chunk, read_source
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.sources import single_source
from specpilot.policies.baselines import Truth
from specpilot.policies.interface import Plan, PolicyError
from specpilot.policies.offpolicy.bootstrap import Blocks
from specpilot.policies.offpolicy.estimators import ESTIMATORS, PolicySums
from specpilot.policies.offpolicy.follower import Follower
from specpilot.policies.offpolicy.overlap import LEAST_ANSWERED, Overlap, Unanswered, needed_floor
from specpilot.policies.offpolicy.step_model import Predicted
from specpilot.policies.offpolicy.switch_sums import SwitchSums
from specpilot.policies.rules.exploration import BLOCK_STEPS
from specpilot.sglang_hooks.wire import Hello

KNOWN = "static:K, threshold:N, batch-table:1:5,8:3, goodput or logged"


class EvaluateError(ConfigError):
    """An evaluation that cannot be made as it was asked for; the text says what to change."""


# -- policies --

Tables = Callable[[Sequence[FoldModel], Hello], list[Plan]]
"""Makes the tables for the steps of each fold from the models of both."""


def parse(text: str) -> Tables | None:
    """Return how to make a policy's tables; None for ``logged``. EvaluateError says what is wrong.

    >>> parse("best")
    Traceback (most recent call last):
    specpilot.controller.evaluate.evaluation.EvaluateError: policy 'best' cannot be evaluated: use static:K, \
threshold:N, batch-table:1:5,8:3, goodput or logged
    """
    name = text.partition(":")[0]
    if text == "logged":
        return None
    if text == "goodput":
        return lambda fitted, hello: [half.plan(hello) for half in fitted]
    if name not in ("static", "threshold", "batch-table"):
        raise EvaluateError(f"policy {text!r} cannot be evaluated: use {KNOWN}")
    factory = parse_policy(text)
    assert factory is not None
    # These look at nothing but the server.
    unknown = Truth(lambda *_: math.nan, lambda *_: math.nan)
    return lambda _fitted, hello: [factory(hello, unknown).decide(hello, 0.0)]


# -- the two passes --


def evaluate(
    paths: Sequence[Path], policies: Sequence[str], server: str | None = None, replay_seconds: float = 60.0
) -> Evaluation:
    """Evaluate ``policies`` on the traces of one server.

    ``replay_seconds``: of virtual time for the effect on the server; 0 leaves that out. Raises TraceError
    where the traces cannot be read, EvaluateError where the question makes no sense.
    """
    names = list(dict.fromkeys(policies))
    if not names:
        raise EvaluateError(f"--policy names none: use {KNOWN}")
    tables = {name: parse(name) for name in names}
    findings = Findings()
    source = single_source(paths, server, findings)
    hello = source.hello
    _check_tree(hello)
    folds = fold_sums(read_source(source, findings), hello)
    if not any(fold.times for fold in folds):
        raise EvaluateError(
            f"no step of {source.server} has a time of its own: every one follows a prefill, an idle spell or a "
            "switch of K. Record for longer"
        )
    fitted = fit_folds(folds, hello)
    try:
        plans = {name: None if make is None else make(fitted, hello) for name, make in tables.items()}
    except PolicyError as error:
        raise EvaluateError(str(error)) from error
    judged = judge(read_source(source, Findings()), hello, plans, fitted)
    rows = [row for name in names for row in _rows(name, judged)]
    notes = []
    if judged.reader.unusable:
        notes.append(f"{judged.reader.unusable:,} steps are left out: their K is no candidate")
    if judged.switches.outliers:
        notes.append(f"the times of {judged.switches.outliers:,} steps are left out: far longer than any K explains")
    replayed = [name for name in names if name != "logged"]
    if replay_seconds > 0.0 and replayed:
        replay = effects(paths, server, replayed, folds[0].merged(folds[1]), replay_seconds)
        rows += [_effect_row(effect) for effect in replay.effects]
        notes += [f"replay: {note}" for note in replay.notes]
    return Evaluation(source.server, judged.steps, rows, notes, findings.lines())


def _check_tree(hello: Hello) -> None:
    drafting = [k for k in hello.candidate_steps if k]
    if hello.topk > 1 and len(drafting) > 1:
        raise EvaluateError(
            f"{hello.server_id} drafts trees (top-k {hello.topk}) of several K: what a smaller tree would have had "
            "accepted is not seen in a larger one, so its log cannot be evaluated"
        )


def fold_sums(chunks: Iterator[Chunk], hello: Hello) -> list[FoldSums]:
    """Add up what the models are fitted to, each half by itself."""
    reader = StepReader(hello)
    folds = [FoldSums(reader.arms), FoldSums(reader.arms)]
    for chunk in chunks:
        steps, trials, passed = reader.steps(chunk)
        for index, fold in enumerate(folds):
            fold.add(steps, np.flatnonzero(steps.fold == index), trials, passed)
    return folds


@dataclass(frozen=True)
class JudgedLog:
    """Sums of the second pass: what every policy would have done with the logged steps."""

    sums: dict[str, PolicySums]
    switches: SwitchSums
    reader: StepReader

    @property
    def steps(self) -> int:
        """Logged steps that were judged."""
        return int(next(iter(self.sums.values())).overlap.steps.sum())


def judge(
    chunks: Iterator[Chunk], hello: Hello, plans: dict[str, list[Plan] | None], fitted: Sequence[FoldModel]
) -> JudgedLog:
    """Add up what every policy would have done; ``plans``: a table, or one for each fold, or None for what was run."""
    reader = StepReader(hello)
    arms = reader.arms.tolist()
    models = [half.model for half in fitted]
    followers = {
        name: None if plan is None else Follower(plan, arms, hello.fallback_steps) for name, plan in plans.items()
    }
    sums = {name: PolicySums(arms, logged=plan is None) for name, plan in plans.items()}
    switches = SwitchSums()
    for chunk in chunks:
        steps, _, _ = reader.steps(chunk)
        if not len(steps):
            continue
        blocks, predicted = Blocks.of(steps), Predicted.of(steps, models)
        outlier = switches.add(steps, predicted, reader.arms, blocks)
        for name, follower in followers.items():
            target = steps.arm
            if follower is not None:
                target = follower.follow(steps.batch_size, steps.mean_context, steps.fold)
            sums[name].add(steps, target, predicted, outlier, blocks)
    return JudgedLog(sums, switches, reader)


def _rows(name: str, judged: JudgedLog) -> list[Row]:
    sums = judged.sums[name]
    cells = sums.overlap.unanswered()
    listed = [_cell(cell) for cell in cells]
    rows = []
    for estimator in ESTIMATORS:
        estimate = sums.estimate(estimator, judged.switches)
        if estimate is None:
            rows.append(_refused(name, estimator, sums.overlap, cells, listed, judged))
            continue
        rows.append(
            Row(
                name,
                estimator,
                EFFICIENCY,
                False,
                estimate.estimate,
                estimate.low,
                estimate.high,
                estimate.effective_samples,
                estimate.gain,
                estimate.gain_low,
                estimate.gain_high,
                estimate.answered,
                unanswered=listed,
            )
        )
    return rows


def _refused(
    name: str,
    estimator: str,
    overlap: Overlap,
    cells: list[Unanswered],
    listed: list[UnansweredCell],
    judged: JudgedLog,
) -> Row:
    answered = overlap.answered
    spread = judged.switches.spread
    block = max(judged.reader.block_steps, BLOCK_STEPS)
    floor = needed_floor(cells, judged.steps, spread, block, HALF_WIDTH)
    reason = (
        f"the log tells what {name} would have done in {100.0 * answered:.1f} % of its steps only, "
        f"{100.0 * LEAST_ANSWERED:.0f} % are needed"
    )
    usable = math.isfinite(floor) and floor > 0.0
    return Row(
        name,
        estimator,
        EFFICIENCY,
        False,
        None,
        None,
        None,
        0.0,
        answered=answered,
        reason=reason,
        unanswered=listed,
        exploration_floor=float(f"{floor:.2g}") if usable else None,
    )


def _cell(cell: Unanswered) -> UnansweredCell:
    return UnansweredCell(
        _span(cell.batch), _span(cell.context), cell.steps, cell.logged_steps, cell.effective_blocks, cell.reason
    )


def _span(limits: tuple[int, int | None]) -> str:
    low, high = limits
    return f"{low:,} and more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _effect_row(effect: Effect) -> Row:
    return Row(
        effect.policy,
        "replay",
        EFFECT,
        True,
        effect.tokens_per_second,
        effect.low,
        effect.high,
        float(SEEDS if effect.tokens_per_second is not None else 0),
        seconds_per_token=effect.seconds_per_token,
        reason=effect.reason,
    )
