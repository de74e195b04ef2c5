"""Tokens per request and step at K drafts, from the hazards of a chain, and how sure they are.

    L_K = 1 + sum_{j<=K} prod_{i<=j} h_i        (the 1 is the bonus token)

Errors are carried from hazards to lengths by the delta method: with P_j the product of the hazards
down to j, e_j an independent error of the hazard's own variance and k_j its coupling,

    dh_j = e_j + k_j dh_{j-1},    dP_j = h_j dP_{j-1} + P_{j-1} dh_j,    dL_j = dL_{j-1} + dP_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from specpilot.policies.models.acceptance_evidence import Hazard

FloatArray = npt.NDArray[np.float64]


def chain_lengths(hazards: FloatArray) -> FloatArray:
    """Return L_0..L_n along the last axis, shape (..., n + 1), for hazards of shape (..., n).

    >>> chain_lengths(np.array([0.5, 0.5])).tolist()
    [1.0, 1.5, 1.75]
    """
    return _lengths(np.asarray(np.cumprod(hazards, axis=-1)))


def lengths_and_intervals(hazards: Sequence[Hazard], level: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return L_K, and low and high of its interval of ``level``, for K = 0..n, arrays of shape (n + 1,).

    The covariances of dh_j, dP_j and dL_j are carried along. The interval is the wider of the one on
    L and the one on the log-odds of (L-1)/K, which is right-skewed where little is known; both end
    at 1 and 1+K.
    """
    z = NormalDist().inv_cdf(0.5 + 0.5 * level)
    product = length = 1.0
    var_h = cov_hp = cov_hl = var_p = cov_pl = var_l = 0.0
    rows = [(1.0, 1.0, 1.0)]
    for steps, (mean, variance, coupling) in enumerate(hazards, start=1):
        # From (h, P, L) of the position before: first h, then P, then L become those of this one.
        cov_hp, cov_hl = coupling * cov_hp, coupling * cov_hl
        var_h = variance + coupling * coupling * var_h
        cov_pl = mean * cov_pl + product * cov_hl
        var_p = mean * mean * var_p + product * (2.0 * mean * cov_hp + product * var_h)
        cov_hp = mean * cov_hp + product * var_h
        var_l += 2.0 * cov_pl + var_p
        cov_pl += var_p
        cov_hl += cov_hp
        product *= mean
        length += product
        margin = z * math.sqrt(var_l)
        above, below = length - 1.0, 1.0 + steps - length
        stretch = math.exp(margin * steps / (above * below))
        low = min(length - margin, 1.0 + steps * above / (above + below * stretch))
        high = max(length + margin, 1.0 + steps * above / (above + below / stretch))
        rows.append((length, max(low, 1.0), min(high, 1.0 + steps)))
    lengths, lows, highs = np.array(rows).T
    return lengths, lows, highs


def lengths_and_covariance(hazards: Sequence[Hazard]) -> tuple[FloatArray, FloatArray]:
    """Return L_K for K = 0..n, shape (n + 1,), and the covariance of their logs, shape (n + 1, n + 1).

    All K live on the same hazards, so what is not known of these is mostly common to them, and
    the ratio of two L_K is known better than either: its squared relative error is
    C[i, i] + C[j, j] - 2 C[i, j].
    """
    means, variances, couplings = np.array(hazards).T
    positions = len(means)
    by_error = np.eye(positions)  # dh_j / de_i
    for j in range(1, positions):
        by_error[j] += couplings[j] * by_error[j - 1]
    products = np.cumprod(means)
    slopes = np.cumsum(products[:, None] * np.cumsum(by_error / means[:, None], axis=0), axis=0)
    lengths = _lengths(products)
    relative = np.zeros((positions + 1, positions))
    relative[1:] = slopes / lengths[1:, None]
    return lengths, (relative * variances) @ relative.T


def _lengths(products: FloatArray) -> FloatArray:
    """Return L_0..L_n along the last axis, for P_1..P_n."""
    lengths = np.empty((*products.shape[:-1], products.shape[-1] + 1))
    lengths[..., 0] = 1.0
    np.cumsum(products, axis=-1, out=lengths[..., 1:])
    lengths[..., 1:] += 1.0
    return lengths
