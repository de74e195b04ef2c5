"""Means with their intervals, and weighted medians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specpilot.policies.student import student_975

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t); NaN for a single value.

    >>> [round(value, 2) for value in mean_and_interval([1.0, 2.0, 3.0])]
    [2.0, 2.48]
    """
    import numpy as np  # not for ``specpilot status``, which comes here by way of the switchback

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, float("nan")
    return mean, student_975(len(values) - 1) * float(np.std(values, ddof=1)) / len(values) ** 0.5


def weighted_median(values: ArrayLike, weights: ArrayLike) -> float:
    """Return the lowest of ``values`` up to which half of the ``weights`` lie; both of shape (n,), n above 0.

    >>> weighted_median([3.0, 1.0, 2.0], [1, 1, 5])
    2.0
    """
    import numpy as np

    ordered = np.argsort(values, kind="stable")
    total = np.cumsum(np.asarray(weights)[ordered])
    return float(np.asarray(values)[ordered][np.searchsorted(total, total[-1] / 2.0)])
