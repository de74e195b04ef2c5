"""From the statistics of a trace to a stored prior, and how well it holds for what it was not fitted to.

The prior is what ``Goodput(prior=...)`` reads: the cells' lines in ``specpilot.policies.models.cost_prior.StoredCosts``
and the pool's trials of ``specpilot.policies.models.acceptance``. A controller lets it count for a few dozen steps.
"""

from __future__ import annotations

from typing import Any

import msgspec

from specpilot.controller.errors import ConfigError
from specpilot.controller.fit.acceptance_fit import BandQuality, band_qualities, stored_acceptance
from specpilot.controller.fit.by_k import StatisticsByK
from specpilot.controller.fit.cost_fit import (
    CellQuality,
    SwitchQuality,
    cell_quality,
    cost_lines,
    one_thread,
    robust_line,
    stored_costs,
    switch_qualities,
)
from specpilot.controller.fit.statistics import FOLDS, TraceStatistics
from specpilot.policies.models.acceptance import AcceptanceModel
from specpilot.policies.models.cost import CostModel
from specpilot.policies.models.cost_cell import FIRST
from specpilot.policies.models.cost_prior import read_prior
from specpilot.sglang_hooks.wire import Hello


class FittedPrior(msgspec.Struct, frozen=True):
    """A prior, and its quality."""

    prior: dict[str, Any]
    """The stored prior as JSON values: ``cost`` and ``acceptance``."""
    cells: list[CellQuality]
    switches: list[SwitchQuality]
    bands: list[BandQuality]


def fit(statistics: TraceStatistics, hello: Hello) -> FittedPrior:
    """Return the prior for servers of ``hello``'s fingerprint, and its quality.

    Raises ConfigError where no step time can be learned, or scikit-learn is missing.
    """
    robust = robust_line()
    records = StatisticsByK(statistics)
    with one_thread():
        lines = cost_lines(records, robust)
        folds = [cost_lines(records, robust, without=fold) for fold in range(FOLDS)]
    if not lines:
        why = "; ".join(f"{count:,}: {reason}" for reason, count in statistics.reasons.most_common() if count)
        raise ConfigError(
            f"no step time can be learned from these traces: {statistics.used:,} records tell a step's own time, and "
            f"at least {FIRST} of one K and batch size are needed. Of the others: {why or 'there are none'}"
        )
    starts = [CostModel(hello, stored_costs(hello, of_fold, records)) for of_fold in folds]
    depth = max(1, *hello.candidate_steps, *(steps for steps, _, _ in records.tables))
    acceptance = stored_acceptance(records, depth)
    prior = {"cost": stored_costs(hello, lines, records), "acceptance": acceptance}
    _check(prior, hello)
    return FittedPrior(
        prior,
        [cell_quality(cell, lines[cell], records.cells[cell], folds, starts) for cell in sorted(lines)],
        switch_qualities(lines, records),
        band_qualities(records.tables, depth),
    )


def _check(prior: dict[str, Any], hello: Hello) -> None:
    stored, wrong = read_prior(prior["cost"], hello)
    if stored is None:
        raise ConfigError(f"the fit gives no prior that a controller takes: {wrong}. Please report this")
    AcceptanceModel.from_prior(prior["acceptance"])
