"""What a policy would do to the whole server, by replaying the trace's own requests on fitted models.

Per-step estimates hold the logged states fixed. On a server they are not: faster steps make queues and
batches smaller. That can only be simulated, so whatever comes from here is *model-based*: requests as far as
a trace tells them (``controller/replay/inference``), costs as fitted to all of its steps, one acceptance per window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specpilot.controller.evaluate.fold_models import FoldModel, FoldSums
from specpilot.controller.replay.inference.costs import ARM_STEPS
from specpilot.controller.replay.inference.infer import Inferred, infer
from specpilot.controller.replay.policies import ReplayError
from specpilot.controller.replay.run import simulate
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.surface import ContextSurface, Costs
from specpilot.controller.statistics import mean_and_interval

RECORDS = 40_000
"""Records at the trace's beginning from which requests and acceptance are inferred."""
SEEDS = 4
"""Simulations of each policy, with other random numbers each."""


@dataclass(frozen=True)
class Effect:
    """One policy on the simulated server."""

    policy: str
    tokens_per_second: float | None
    """Mean output tokens per second; None: ``reason`` says why not."""
    low: float | None
    """Lower end of the 95 % interval over the seeds: of the simulation's chance, not of its models."""
    high: float | None
    """Upper end of the 95 % interval over the seeds."""
    seconds_per_token: float | None
    """Mean time per output token, as clients see it."""
    reason: str = ""


@dataclass(frozen=True)
class Effects:
    """The effects of all policies, and what they were simulated from."""

    effects: tuple[Effect, ...]
    notes: tuple[str, ...]


def surface_of(sums: FoldSums, fitted: FoldModel, inferred: Inferred) -> NamedSurface:
    """Return what steps cost, of every K that was timed often enough."""
    timed = np.zeros(len(sums.arms))
    for (arm, _, _), found in sums.cells().items():
        timed[arm] += found[0]
    model = fitted.model
    known = [arm for arm in range(len(sums.arms)) if timed[arm] >= ARM_STEPS]
    if len(known) < 2:
        raise ReplayError(inferred.unfit or "the trace tells the cost of fewer than two K")
    contexts = tuple(model.contexts.tolist())
    costs = {
        int(model.arms[arm]): Costs(contexts, tuple(tuple(row) for row in model.seconds[arm].tolist())) for arm in known
    }
    factor = inferred.fitted.speculating.factor if inferred.fitted is not None else 1.0
    sizes = tuple(model.sizes.tolist())
    plain = {0: costs[0]} if 0 in costs else {}
    return NamedSurface(
        "fitted",
        f"model-based: fitted to the steps of {inferred.server}",
        ContextSurface(sizes, costs, factor, inferred.hello.skip),
        ContextSurface(sizes, plain, factor),
    )


def effects(
    paths: Sequence[Path], server: str | None, policies: Sequence[str], sums: FoldSums, seconds: float
) -> Effects:
    """Replay ``policies`` for ``seconds`` of virtual time; what cannot be replayed says so."""
    try:
        inferred = infer(paths, server, RECORDS)
        surface = surface_of(sums, FoldModel.of(sums, inferred.hello), inferred)
    except ReplayError as error:
        return Effects(tuple(Effect(policy, None, None, None, None, str(error)) for policy in policies), ())
    inferred = replace(inferred, fitted=surface)
    length = min(seconds, inferred.seconds)
    notes = (f"{length:,.0f} s of virtual time, {SEEDS} seeds, on costs fitted to the whole trace", *inferred.notes)
    return Effects(tuple(_effect(policy, inferred, surface, length) for policy in policies), notes)


def _effect(policy: str, inferred: Inferred, surface: NamedSurface, seconds: float) -> Effect:
    try:
        results = [simulate(policy, inferred.scenario(surface, seconds, seed)) for seed in range(1, SEEDS + 1)]
    except ReplayError as error:
        return Effect(policy, None, None, None, None, str(error))
    waits = [result.time_per_output_token.mean for result in results]
    known = [wait for wait in waits if wait is not None]
    mean, margin = mean_and_interval([result.tokens_per_second for result in results])
    return Effect(policy, mean, mean - margin, mean + margin, float(np.mean(known)) if known else None)
