"""Quantiles of the normal distribution and of Student's t, for 95 % intervals."""

from __future__ import annotations

NORMAL_975 = 1.96
"""97.5th percentile of the normal distribution: a two-sided 95 % interval is this many standard errors each way."""

_STUDENT_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5th percentiles of Student's t by degrees of freedom from 1 on (any table of the distribution)."""


def student_975(freedom: float) -> float:
    """Return the 97.5th percentile of Student's t at ``freedom`` degrees, at least 1; within 0.005 at whole numbers.

    >>> [round(student_975(freedom), 3) for freedom in (1, 9, 9.5, 60, 1e9)]
    [12.706, 2.262, 2.244, 2.0, 1.96]
    """
    if freedom <= len(_STUDENT_975):
        # Linear in the inverse between whole numbers.
        below = min(int(freedom), len(_STUDENT_975) - 1)
        least, most = _STUDENT_975[below], _STUDENT_975[below - 1]
        return least + (most - least) * (below * (below + 1.0) / freedom - below)
    # The first term of the expansion of Fisher & Cornish (1960) around the normal's z: (z^3 + z) / 4n.
    return NORMAL_975 + 2.37 / freedom
