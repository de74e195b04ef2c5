"""What a step costs a simulated GPU: a ``LatencySurface``, and that of a measured card, ``H200_8B``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


def acceptance_length(acceptance: float, steps: int) -> float:
    """Return the expected tokens per request and step, bonus token included.

    Each draft is accepted with probability ``acceptance`` given that those before it were:
    1 + p + p^2 + ... + p^K.

    >>> round(acceptance_length(0.7, 3), 3)
    2.533
    """
    return sum(acceptance**position for position in range(steps + 1))


@dataclass(frozen=True)
class LatencySurface:
    """Seconds of a decode step by steps (K) and batch size, and of a prefill by tokens.

    Between the points it is linear, in the batch size and then in K; past a curve's last
    point it goes on as steep as before. A batch up to the largest captured CUDA-graph size
    costs what the size it is padded to costs.

    >>> H200_8B.decode_seconds(0, 17) == H200_8B.decode_seconds(0, 18)
    True
    >>> [round(16 * acceptance_length(0.7, k) / H200_8B.decode_seconds(k, 16)) for k in (0, 1, 3)]
    [2947, 3064, 3913]
    """

    curves: dict[int, tuple[tuple[int, float], ...]]
    """(batch size, seconds) points of each K, at least two, by rising batch size."""
    captured_batch_sizes: tuple[int, ...]
    prefill_base_seconds: float
    prefill_seconds_per_token: float

    def padded(self, batch_size: int) -> int:
        """Return the captured size that runs ``batch_size`` requests, or itself above the largest."""
        index = bisect_left(self.captured_batch_sizes, batch_size)
        return self.captured_batch_sizes[index] if index < len(self.captured_batch_sizes) else batch_size

    def decode_seconds(self, steps: int, batch_size: int) -> float:
        """Return the seconds of one step; ValueError for a K above the largest that has a curve."""
        batch = self.padded(batch_size)
        if steps in self.curves:
            return _linear(self.curves[steps], batch)
        known = sorted(self.curves)
        above = bisect_left(known, steps)
        if not 0 < above < len(known):
            raise ValueError(f"no latency is known for {steps} steps, only for {known[0]} to {known[-1]}")
        ends = tuple((k, _linear(self.curves[k], batch)) for k in known[above - 1 : above + 1])
        return _linear(ends, steps)

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds of a prefill of ``tokens`` prompt tokens."""
        return self.prefill_base_seconds + tokens * self.prefill_seconds_per_token


def _linear(points: Sequence[tuple[int, float]], x: float) -> float:
    right = min(max(bisect_left(points, (x, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


_H200_8B_TOKENS_PER_SECOND = {
    0: ((1, 206.0), (16, 2947.0), (64, 8964.0), (128, 13352.0), (256, 16426.0)),
    1: ((1, 271.0), (16, 3064.0), (64, 5844.0), (128, 6352.0)),
    3: ((1, 360.0), (16, 3913.0), (64, 6367.0), (128, 7399.0), (256, 8719.0)),
}

H200_8B = LatencySurface(
    curves={
        steps: tuple((batch, batch * acceptance_length(0.7, steps) / rate) for batch, rate in points)
        for steps, points in _H200_8B_TOKENS_PER_SECOND.items()
    },
    # SGLang's own choice for a speculating server of 64 requests.
    captured_batch_sizes=(*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)),
    prefill_base_seconds=0.005,
    prefill_seconds_per_token=32e-6,
)
"""An 8B-shaped target with a one-layer EAGLE3 draft, except that skipping costs nothing extra.

Decode: figures of one H200, 8B-shaped target with random weights, triton attention, SGLang
0.5.17, 2026-11-29, single runs, illustrative. They are tokens/s at a simulated acceptance of
0.7; seconds = batch size * acceptance length / tokens/s. K=1 at batch 256 was not measured.
K=0 is the skip at the speed of plain decoding, which SGLang's own K=0 is not yet: measured,
that was slower than every speculative setting (1972 tokens/s at batch 16, not 2947).

Prefill: an estimate, not a measurement. 2 * 8e9 FLOP a token at half of the card's 989
TFLOP/s (dense bf16), on top of what a decode step of one request takes.
"""
