"""Means over seeds, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence

_STUDENT_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5th percentiles of Student's t, by degrees of freedom from 1 on (any table of the distribution)."""


def student_975(freedom: int) -> float:
    """Return the 97.5th percentile of Student's t; above 30 degrees of freedom to within 0.005.

    >>> student_975(9), round(student_975(60), 2)
    (2.262, 2.0)
    """
    if freedom <= len(_STUDENT_975):
        return _STUDENT_975[freedom - 1]
    # The first term of Fisher and Cornish's expansion (1960) around the normal's 1.96: (z^3 + z) / 4n.
    return 1.96 + 2.37 / freedom


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
