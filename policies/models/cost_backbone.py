"""The backbone of the cost model: step seconds as a smooth function of K, batch size and context.

    log seconds = s + log sum_j exp(theta_j) f_j(K, size, context) + h(K, size) . g

The terms f are what a step is made of, all positive. The bend h . g is what they miss: the sum of
smooth curves, over the octaves of batch size, of K + 1 and of tokens, each a Gaussian process
(Rasmussen & Williams 2006). A skip that is the target's ordinary decode step runs other kernels than
a verification, so how it compares is a curve over batch size of its own, and a wide one: no
number of speculative steps tells it. The posterior of (s, theta, g) is Gaussian, fitted by
Gauss-Newton to what the cells know. s is free, so nothing depends on how fast the hardware is.
The backbone speaks for cells that were never tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNEE_TOKENS = 256.0
"""Tokens around which a step turns from memory-bound to compute-bound (peak FLOP / bandwidth: H200 206, A100 156)."""

FEW_EXPERTS, MANY_EXPERTS = 16.0, 64.0
"""Tokens that touch 63 % of a mixture's experts: experts / experts per token, Mixtral 4, Qwen3 16, DeepSeek-V3 32."""

_TERMS = (
    # Of a step without context: median against the first (an 8B-shaped model on an H200), error of its log.
    ("weights, read once", 1.0, 1e-3),  # pinned, since s scales it
    ("speculating at all", 0.05, 1.5),
    ("draft forwards", 0.05, 1.0),
    ("requests", 2e-3, 1.0),
    ("verified tokens past the knee", 4e-3, 1.0),
    ("eager launches", 0.3, 1.5),
    ("a few experts", 0.2, 1.5),
    ("many experts", 0.2, 1.5),
    # Per token of context; wide, as a token's keys and values differ sixteenfold between models.
    ("keys and values read by the target", 5e-6, 2.0),
    ("and once more by a verify", 1e-6, 1.5),
    ("and by each draft forward", 2e-7, 1.5),
    ("the longest request, where a kernel does not split it", 2e-5, 2.0),
)
_TERM_WEIGHTS: Array = np.array([weight for _, weight, _ in _TERMS])

CURVE_OCTAVES = 3.0
"""Distance over which a curve of the bend keeps 60 % of its deviation."""
ROUGHNESS = 0.01
"""What each octave deviates by itself."""
_CURVES = ((11, 0.15), (5, 0.05), (13, 0.06), (11, 0.8))
"""Nodes, one an octave from 1, and standard deviation of the curves over batch size, K + 1 and tokens, and over
the batch size of decode-mode skips: of these, triton's verify at batch 64 takes five times what FA3's does."""

MISFIT, MISFIT_CELLS = 0.025, 5.0
"""Relative deviation of one cell from the backbone: assumed at first, and for how many cells that counts."""


def _bend_covariance() -> Array:
    """Squared-exponential kernels of the curves, on the diagonal of one matrix."""
    count = sum(nodes for nodes, _ in _CURVES)
    covariance = np.eye(count) * ROUGHNESS**2
    start = 0
    for nodes, deviation in _CURVES:
        part = slice(start, start + nodes)
        distance = np.subtract.outer(np.arange(nodes), np.arange(nodes)) / CURVE_OCTAVES
        covariance[part, part] += deviation**2 * np.exp(-0.5 * distance**2)
        start += nodes
    return covariance


_THETA = slice(1, 1 + len(_TERMS))
_BEND = slice(1 + len(_TERMS), 1 + len(_TERMS) + sum(nodes for nodes, _ in _CURVES))
_PRIOR_COVARIANCE: Array = np.diag([1e6, *(error**2 for _, _, error in _TERMS), *[0.0] * (_BEND.stop - _BEND.start)])
_PRIOR_COVARIANCE[_BEND, _BEND] = _bend_covariance()
_PRIOR_PRECISION: Array = np.asarray(np.linalg.inv(_PRIOR_COVARIANCE), np.float64)
_PARAMETERS = len(_PRIOR_COVARIANCE)

Design = tuple[Array, Array, Array]
"""For some cells: terms at no context, their rise per context token, and the bend's row."""


@dataclass(frozen=True)
class Backbone:
    """Posterior of (s, theta, g): mean, covariance, and the estimated variance of cells about it."""

    mean: Array = field(default_factory=lambda: np.zeros(_PARAMETERS))
    """Posterior mean of (s, theta, g), shape (parameters,)."""
    covariance: Array = field(default_factory=_PRIOR_COVARIANCE.copy)
    """Posterior covariance of (s, theta, g), shape (parameters, parameters)."""
    misfit: float = MISFIT**2
    """Variance of the log seconds of cells about the backbone."""

    def at(self, design: Design, context: float) -> tuple[Array, Array]:
        """Return log seconds of cells, shape (cells,), and their covariance, (cells, cells), without ``misfit``.

        ``context`` is in tokens of all requests.
        """
        means, jacobian = _linearise(design, context, self.mean)
        return means, jacobian @ self.covariance @ jacobian.T

    def slopes(self, design: Design, context: Array) -> Array:
        """Return relative rises of seconds per token, shape (cells,), at each cell's ``context``."""
        fixed, rise, _ = design
        weights = np.exp(self.mean[_THETA])
        slopes: Array = (rise @ weights) / ((fixed + rise * context[:, None]) @ weights)
        return slopes

    def fitted(
        self,
        design: Design,
        level: Array,
        noise: Array,
        context: Array,
        half: Array,
        lean: Array,
        shared: Array,
    ) -> Backbone:
        """Return the fit to cells, by two Gauss-Newton steps from this one; arrays of shape (cells,).

        A cell is known as log seconds ``level`` of variance ``noise`` at ``context``, and by the
        relative rise ``lean`` over ``half``, one standard deviation of its contexts. It is two
        points, that far to either side: the same moments, hence the same evidence on level and
        slope, as all its records. ``shared``, shape (cells, groups), is the standard deviation of an
        error that the levels of a group's cells have in common: they tell a shape as well as without it.
        """
        contexts = np.concatenate((context - half, context + half))[:, None]
        levels = np.concatenate((level + np.log1p(-lean), level + np.log1p(lean)))
        weight = np.tile(0.5 / (self.misfit + noise), 2)[:, None]
        twice = (np.concatenate((design[0],) * 2), np.concatenate((design[1],) * 2), np.concatenate((design[2],) * 2))
        # The errors in common are unknown as the parameters are, and linear: they begin at 0 with every fit.
        errors = np.concatenate((shared, shared))
        precision = np.eye(_PARAMETERS + errors.shape[1])
        precision[:_PARAMETERS, :_PARAMETERS] = _PRIOR_PRECISION
        mean = np.concatenate((self.mean, np.zeros(errors.shape[1])))
        for _ in range(2):
            guess, jacobian = _linearise(twice, contexts, mean[:_PARAMETERS])
            jacobian = np.hstack((jacobian, errors))
            weighted = (jacobian * weight).T
            covariance = np.asarray(np.linalg.inv(weighted @ jacobian + precision), np.float64)
            target = covariance @ (weighted @ (levels - guess + jacobian[:, :_PARAMETERS] @ mean[:_PARAMETERS]))
            step = target - mean
            step[_THETA] = np.clip(step[_THETA], -1.0, 1.0)
            mean = mean + step
        mean, common = mean[:_PARAMETERS], mean[_PARAMETERS:]
        covariance = covariance[:_PARAMETERS, :_PARAMETERS]
        off = ((levels - _linearise(twice, contexts, mean)[0] - errors @ common) ** 2).sum() / 2.0
        free = max(len(level) - _PARAMETERS + float((covariance * _PRIOR_PRECISION).sum()), 0.0)
        return Backbone(mean, covariance, (MISFIT_CELLS * MISFIT**2 + off) / (MISFIT_CELLS + free))


def design_row(steps: int, size: float, eager: bool, decode_skip: bool) -> Design:
    """Return what the backbone sees of one cell: its ``_TERMS`` in order, and its place on the curves.

    ``decode_skip``: K=0 is the target's ordinary decode step, not a verification of width 1.
    """
    tokens = size * (steps + 1)
    speculates = float(steps > 0)
    past_knee = tokens**2 / (tokens + KNEE_TOKENS)
    few, many = 1.0 - math.exp(-tokens / FEW_EXPERTS), 1.0 - math.exp(-tokens / MANY_EXPERTS)
    fixed = np.array([1.0, speculates, steps, size, past_knee, float(eager), few, many, 0.0, 0.0, 0.0, 0.0])
    rise = np.array([0.0] * 8 + [1.0, speculates, steps, 1.0 / size])
    places = (size, steps + 1.0, tokens, size)
    bends = [_hats(math.log2(at), nodes) for at, (nodes, _) in zip(places, _CURVES, strict=True)]
    bends[-1] *= decode_skip and not steps
    bend = np.concatenate(bends)
    return fixed * _TERM_WEIGHTS, rise * _TERM_WEIGHTS, bend


def stack(designs: Sequence[Design]) -> Design:
    """Return the rows of several cells as one design."""
    if not designs:
        return np.empty((0, len(_TERMS))), np.empty((0, len(_TERMS))), np.empty((0, _BEND.stop - _BEND.start))
    fixed, rise, bend = zip(*designs, strict=True)
    return np.array(fixed), np.array(rise), np.array(bend)


def _hats(x: float, nodes: int) -> Array:
    """Return the weights of linear interpolation between nodes 0, 1, 2, ..."""
    hats: Array = np.maximum(1.0 - np.abs(min(max(x, 0.0), nodes - 1.0) - np.arange(nodes)), 0.0)
    return hats


def _linearise(design: Design, context: Any, mean: Array) -> tuple[Array, Array]:
    """Return the backbone's log seconds and its Jacobian, row by row."""
    fixed, rise, bend = design
    terms = (fixed + rise * context) * np.exp(mean[_THETA])
    total = terms.sum(axis=1)
    jacobian = np.empty((len(total), _PARAMETERS))
    jacobian[:, 0] = 1.0
    jacobian[:, _THETA] = terms / total[:, None]
    jacobian[:, _BEND] = bend
    return mean[0] + np.log(total) + bend @ mean[_BEND], jacobian
