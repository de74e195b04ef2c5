"""The backbone of the cost model: step seconds as a smooth function of K, batch size and context.

    log seconds = s + log sum_j exp(theta_j) f_j(K, size, context) + h(K, size) . g,

positive terms f for what a step is made of, and a small bend h for what they miss; a Gaussian
posterior of (s, theta, g), fitted by Gauss-Newton to what the cells know. s is free, so nothing
depends on how fast the hardware is. It speaks for cells that were never tried.
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
TERM_WEIGHTS: Array = np.array([1.0, 0.05, 0.05, 2e-3, 4e-3, 0.3, 5e-6, 1e-6, 2e-7, 2e-5])
"""Prior medians of the terms of ``_design`` against the first: an 8B-shaped model on an H200."""
TERM_ERRORS: Array = np.array([1e-3, 1.5, 1.0, 1.0, 1.0, 1.5, 1.2, 1.5, 1.5, 2.0])
"""Their prior standard deviations on the log scale; the first is pinned, since s scales it."""
SIZE_NODES = 11
"""Nodes of the bend, one an octave of size from 1 to 1024; and STEPS_NODES at K = 0, 1, 3, 7, 15."""
STEPS_NODES = 5
BEND_ERRORS: Array = np.array([0.15] * SIZE_NODES + [0.08] * STEPS_NODES + [0.08] * SIZE_NODES)
MISFIT = 0.04
"""Relative deviation of one cell from the backbone, at first (for ten cells)."""


_TERMS = len(TERM_WEIGHTS)
_PARAMETERS = 1 + _TERMS + len(BEND_ERRORS)
_PRIOR_ERRORS: Array = np.concatenate(([1e6], TERM_ERRORS, BEND_ERRORS))

Design = tuple[Array, Array, Array]
"""For some cells: terms at no context, their rise per context token, and the bend's row."""


@dataclass(frozen=True)
class Backbone:
    """Posterior of (s, theta, g): mean, covariance, and the estimated variance of cells about it."""

    mean: Array = field(default_factory=lambda: np.zeros(_PARAMETERS))
    covariance: Array = field(default_factory=lambda: np.diag(_PRIOR_ERRORS**2))
    misfit: float = MISFIT**2

    def at(self, design: Design, context: float) -> tuple[Array, Array]:
        """Return log seconds of cells and their variances, shape (cells,), at ``context`` tokens in all."""
        means, jacobian = _linearise(design, context, self.mean)
        return means, (jacobian @ self.covariance * jacobian).sum(axis=1) + self.misfit

    def slopes(self, design: Design, context: Array) -> Array:
        """Return relative rises of seconds per token, shape (cells,), at each cell's ``context``."""
        fixed, rise, _ = design
        weights = np.exp(self.mean[1 : 1 + _TERMS])
        slopes: Array = (rise @ weights) / ((fixed + rise * context[:, None]) @ weights)
        return slopes

    def fitted(self, design: Design, level: Array, noise: Array, context: Array, half: Array, lean: Array) -> Backbone:
        """Return the fit to cells, by two Gauss-Newton steps from this one; all of shape (cells,).

        A cell is known as log seconds ``level`` of variance ``noise`` at ``context``, and by the
        relative rise ``lean`` over ``half``, one standard deviation of its contexts. It is two
        points, that far to either side: the same moments, hence the same evidence on level and
        slope, as all its records.
        """
        contexts = np.concatenate((context - half, context + half))[:, None]
        levels = np.concatenate((level + np.log1p(-lean), level + np.log1p(lean)))
        weight = np.tile(0.5 / (self.misfit + noise), 2)[:, None]
        twice = (np.concatenate((design[0],) * 2), np.concatenate((design[1],) * 2), np.concatenate((design[2],) * 2))
        mean, covariance, precision = self.mean, self.covariance, _PRIOR_ERRORS**-2
        for _ in range(2):
            guess, jacobian = _linearise(twice, contexts, mean)
            weighted = (jacobian * weight).T
            covariance = np.asarray(np.linalg.inv(weighted @ jacobian + np.diag(precision)), np.float64)
            target = covariance @ (weighted @ (levels - guess + jacobian @ mean))
            step = target - mean
            step[1 : 1 + _TERMS] = np.clip(step[1 : 1 + _TERMS], -1.0, 1.0)
            mean = mean + step
        off = ((levels - _linearise(twice, contexts, mean)[0]) ** 2).sum() / 2.0
        free = max(len(level) - _PARAMETERS + float(covariance.diagonal() @ precision), 0.0)
        return Backbone(mean, covariance, (10.0 * MISFIT**2 + off) / (10.0 + free))


def design_row(steps: int, size: float, eager: bool) -> Design:
    """Return what the backbone sees of one cell; ``context`` is the sum of sequence lengths.

    Terms: weights read once, speculating at all, draft forwards, requests, verified tokens
    past the knee, eager launches; then KV read by the target, by a verify, by drafts, and the
    longest single request, which bounds kernels that do not split it.
    """
    tokens = size * (steps + 1)
    speculates = float(steps > 0)
    fixed = np.array([1.0, speculates, steps, size, tokens**2 / (tokens + KNEE_TOKENS), float(eager), 0, 0, 0, 0])
    rise = np.array([0, 0, 0, 0, 0, 0, 1.0, speculates, steps, 1.0 / size])
    depth = math.log2(steps + 1)
    sizes = _hats(math.log2(size), SIZE_NODES)
    bend = np.concatenate((sizes, _hats(depth, STEPS_NODES), sizes * (depth - 1.0)))
    return fixed * TERM_WEIGHTS, rise * TERM_WEIGHTS, bend


def _hats(x: float, nodes: int) -> Array:
    """Return the weights of linear interpolation between nodes 0, 1, 2, ..."""
    hats: Array = np.maximum(1.0 - np.abs(min(max(x, 0.0), nodes - 1.0) - np.arange(nodes)), 0.0)
    return hats


def _linearise(design: Design, context: Any, mean: Array) -> tuple[Array, Array]:
    """Return the backbone's log seconds and its Jacobian, row by row."""
    fixed, rise, bend = design
    terms = (fixed + rise * context) * np.exp(mean[1 : 1 + _TERMS])
    total = terms.sum(axis=1)
    jacobian = np.empty((len(total), _PARAMETERS))
    jacobian[:, 0] = 1.0
    jacobian[:, 1 : 1 + _TERMS] = terms / total[:, None]
    jacobian[:, 1 + _TERMS :] = bend
    return mean[0] + np.log(total) + bend @ mean[1 + _TERMS :], jacobian


def stack(designs: Sequence[Design]) -> Design:
    """Return the rows of several cells as one design."""
    if not designs:
        return np.empty((0, _TERMS)), np.empty((0, _TERMS)), np.empty((0, len(BEND_ERRORS)))
    fixed, rise, bend = zip(*designs, strict=True)
    return np.array(fixed), np.array(rise), np.array(bend)
