"""Acceptance from a trace's statistics: what a stored prior says of it, and how well that predicts.

Held-out error: tokens per step of each fold, against what the trials of the other four promise.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from specpilot.controller.fit.by_k import StatisticsByK, Tables
from specpilot.controller.fit.statistics import FOLDS
from specpilot.policies.models.acceptance import BANDS
from specpilot.policies.models.acceptance_evidence import CHAIN_DECAY, FIRST_MEAN

Array = NDArray[np.float64]

MOST_SAMPLES = 16.0
"""Most that acceptance counts as at a position: half of what a controller gives its own, which is a minute old."""
LEAST_BLOCKS, BLOCK_TRIALS = 8, 32
"""Blocks with so many trials at a position, from which on they tell how acceptance varies."""
DESIGN_EFFECT = 2.0
"""Design effect of a request's trials, which are alike: as ``specpilot.policies.models.acceptance`` allows for."""


class BandQuality(msgspec.Struct, frozen=True):
    """Acceptance in a band of batch size and context, and how well it is predicted."""

    batch_sizes: str
    """Batch sizes of the band, in words."""
    mean_contexts: str
    """Context in tokens per request."""
    requests: int
    """Requests with drafts, counted at each step."""
    hazards: list[float]
    """P(draft j accepted | those before it were), by position; as far as there were trials."""
    tokens_per_step: float
    """Tokens per request and step, over the K as they ran, truncated requests left out."""
    held_out_error: float | None
    """Mean over the folds of |predicted - true| / true tokens per step, predicted by the band's own hazards."""
    pooled_error: float | None
    """Mean over the folds of |predicted - true| / true tokens per step, predicted by all bands together."""


def stored_acceptance(records: StatisticsByK, depth: int) -> dict[str, list[float]]:
    """Return trials and accepted drafts of a stored prior: as counted, for as many samples as they are worth.

    Where acceptance moves, its mean over a trace says less of any one moment than its trials would
    have it. As a prior of a moment they are worth the s of the Beta(s p, s (1 - p)) from which the
    blocks' acceptances seem drawn: p (1 - p) / variance - 1.
    """
    trials, passed = trials_by_position(records.tables, depth)
    counts = [trials_by_position(block, depth) for block in records.blocks]
    of_blocks = np.array(counts, np.float64) if counts else np.empty((0, 2, depth))
    worth = MOST_SAMPLES
    stored: dict[str, list[float]] = {"trials": [], "passed": []}
    for position, (count, accepted) in enumerate(zip(trials.tolist(), passed.tolist(), strict=True)):
        worth = min(_samples_worth(of_blocks[:, 0, position], of_blocks[:, 1, position], worth), MOST_SAMPLES)
        samples = min(float(count), worth)
        stored["trials"].append(samples)
        stored["passed"].append(samples * accepted / count if count else 0.0)
    return stored


def _samples_worth(trials: Array, passed: Array, otherwise: float) -> float:
    """Return s by the method of moments (DerSimonian & Laird 1986); ``otherwise`` where too few blocks have trials.

    >>> n, rng = np.full(400, 500.0), np.random.default_rng(0)
    >>> round(_samples_worth(n, rng.binomial(500, rng.beta(6.0, 4.0, 400)).astype(float), 32.0))
    11
    >>> _samples_worth(n, rng.binomial(500, 0.6, 400).astype(float), 32.0)
    inf
    """
    some = trials >= BLOCK_TRIALS
    n, x = trials[some], passed[some]
    if len(n) < LEAST_BLOCKS:
        return otherwise
    mean = float(x.sum() / n.sum())
    noise = mean * (1.0 - mean)
    spread = float((n * (x / n - mean) ** 2).sum()) - DESIGN_EFFECT * (len(n) - 1) * noise
    variance = spread / float(n.sum() - (n**2).sum() / n.sum())
    return max(noise / variance - 1.0, 1.0) if variance > 0.0 else math.inf


def trials_by_position(tables: Tables, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return trials and accepted drafts by position, shape (depth,): the sum of ``trials_of`` all records."""
    trials, passed = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    for (steps, _, _), counted in tables.items():
        last = min(steps, depth)
        reached = counted.sum(axis=1)[::-1].cumsum()[::-1]
        trials[:last] += reached[:last] - counted[:last, 1]
        passed[:last] += reached[1 : last + 1]
    return trials, passed


def _hazards(tables: Tables, depth: int) -> Array:
    """Return h_1..h_depth as counted; where there was no trial, as of the position before, a little lower."""
    hazards, before = [], FIRST_MEAN / CHAIN_DECAY
    for count, accepted in zip(*(counts.tolist() for counts in trials_by_position(tables, depth)), strict=True):
        before = accepted / count if count else CHAIN_DECAY * before
        hazards.append(before)
    return np.array(hazards)


def _tokens(hazards: Array, tables: Tables) -> float:
    """Return tokens per request and step at these hazards, averaged over the K that ``tables`` ran."""
    lengths = np.concatenate(([1.0], 1.0 + np.cumprod(hazards).cumsum()))
    weights = Counter[int]()
    for (steps, _, _), counted in tables.items():
        weights[min(steps, len(hazards))] += int(counted.sum())
    return float(sum(weight * lengths[steps] for steps, weight in weights.items()) / sum(weights.values()))


def band_qualities(tables: Tables, depth: int) -> list[BandQuality]:
    """Return acceptance by band, and how well it is predicted, for K up to ``depth``."""
    columns = len(BANDS.context_edges) + 1
    qualities = []
    for band in sorted({band for _, band, _ in tables}):
        own = {key: counted for key, counted in tables.items() if key[1] == band}
        errors, pooled = [], []
        for fold in range(FOLDS):
            held = {key: counted for key, counted in own.items() if key[2] == fold}
            rest = {key: counted for key, counted in own.items() if key[2] != fold}
            others = {key: counted for key, counted in tables.items() if key[2] != fold}
            if held and rest:
                truth = _tokens(_hazards(held, depth), held)
                errors.append(abs(_tokens(_hazards(rest, depth), held) / truth - 1.0))
                pooled.append(abs(_tokens(_hazards(others, depth), held) / truth - 1.0))
        trials = trials_by_position(own, depth)[0]
        hazards = _hazards(own, depth)
        qualities.append(
            BandQuality(
                batch_sizes=_span(BANDS.batch_edges, band // columns),
                mean_contexts=_span(BANDS.context_edges, band % columns),
                requests=sum(int(counted.sum()) for counted in own.values()),
                hazards=hazards[: int((trials > 0).sum())].tolist(),
                tokens_per_step=_tokens(hazards, own),
                held_out_error=float(np.mean(errors)) if errors else None,
                pooled_error=float(np.mean(pooled)) if errors else None,
            )
        )
    return qualities


def _span(edges: tuple[int, ...], region: int) -> str:
    """Return the values of a region.

    >>> _span((4, 32), 0), _span((4, 32), 1), _span((4, 32), 2)
    ('up to 4', '5 to 32', 'over 32')
    """
    if region == len(edges):
        return f"over {edges[-1]:,}"
    return f"up to {edges[0]:,}" if region == 0 else f"{edges[region - 1] + 1:,} to {edges[region]:,}"
