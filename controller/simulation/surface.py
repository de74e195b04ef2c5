"""What a forward pass costs a simulated GPU, in seconds.

All surfaces are asked through ``Surface``:

    LatencySurface    by steps (K) and batch size; ``H200_8B``, the card of the demo, is one
    ContextSurface    by steps, batch size and mean context: those of replay, see ``named_surfaces.py``
    DriftingSurface   from one ContextSurface to another over time
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


def acceptance_length(acceptance: float, steps: int) -> float:
    """Return the expected tokens per request and step, bonus token included.

    Each draft is accepted with probability ``acceptance`` given that those before it were:
    1 + p + p^2 + ... + p^K.

    >>> round(acceptance_length(0.7, 3), 3)
    2.533
    """
    return sum(acceptance**position for position in range(steps + 1))


class Surface(Protocol):
    """What a simulated server asks of its GPU."""

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes with a CUDA graph, rising; smaller batches are padded to one of them."""

    @property
    def skip(self) -> str:
        """Kind of a step with K=0, as ``Hello.skip``."""

    def decode_seconds(self, steps: int, batch_size: int, mean_context: float = 0.0) -> float:
        """Return the seconds of one step; ``mean_context`` in tokens per request."""

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds of a prefill of ``tokens`` prompt tokens."""


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
    skip: str = "decode"
    """Kind of a step with K=0, as ``Hello.skip``."""

    def padded(self, batch_size: int) -> int:
        """Return the captured size that runs ``batch_size`` requests, or itself above the largest."""
        index = bisect_left(self.captured_batch_sizes, batch_size)
        return self.captured_batch_sizes[index] if index < len(self.captured_batch_sizes) else batch_size

    def decode_seconds(self, steps: int, batch_size: int, mean_context: float = 0.0) -> float:  # noqa: ARG002
        """Return the seconds of one step at any context; ValueError for a K above the largest that has a curve."""
        batch = self.padded(batch_size)
        if steps in self.curves:
            return _linear(self.curves[steps], batch)
        measured = sorted(self.curves)
        above = bisect_left(measured, steps)
        if not 0 < above < len(measured):
            raise ValueError(f"no latency is known for {steps} steps, only for {measured[0]} to {measured[-1]}")
        ends = tuple((k, _linear(self.curves[k], batch)) for k in measured[above - 1 : above + 1])
        return _linear(ends, steps)

    def prefill_seconds(self, tokens: float) -> float:
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
K=0 is the skip at the speed of plain decoding, which SGLang's K=0, a width-1 verify, does not
reach: measured, that was slower than every speculative setting (1972 tokens/s at batch 16, not 2947).

Prefill: an estimate, not a measurement. 2 * 8e9 FLOP a token at half of the card's 989
TFLOP/s (dense bf16), on top of what a decode step of one request takes.
"""


# -- surfaces by context --

CAPTURED_BATCH_SIZES = (1, 2, 4, *range(8, 257, 8))
"""SGLang's list for a server without speculation, up to 256 requests."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one K: ``seconds[i][j]`` at the i-th captured batch size and the j-th of ``contexts``."""

    contexts: tuple[float, ...]
    """Tokens per request, rising, at least two."""
    seconds: tuple[tuple[float, ...], ...]

    @staticmethod
    def on_captured_sizes(measured: Mapping[int, Sequence[tuple[float, float]]]) -> Costs:
        """Return the costs at ``CAPTURED_BATCH_SIZES``, linear in the batch size between those measured.

        ``measured``: (context, seconds) points by batch size, of each at the same contexts.
        """
        sizes = sorted(measured)
        contexts = tuple(context for context, _ in sorted(measured[sizes[0]]))
        seconds = [[value for _, value in sorted(measured[size])] for size in sizes]
        rows = []
        for batch in CAPTURED_BATCH_SIZES:
            row, part = _segment(sizes, batch)
            rows.append(tuple(_between(pair, 0, part) for pair in zip(seconds[row], seconds[row + 1], strict=True)))
        return Costs(contexts, tuple(rows))


@dataclass(frozen=True)
class ContextSurface:
    """Seconds of a decode step by steps (K), batch size and mean context, and of a prefill by tokens.

    A batch costs what the captured size that it is padded to costs: a staircase. In the context
    it is linear between the points, and beyond them as steep as before (but see
    ``LEAST_OF_FIRST``); so it is above the largest captured size, where steps run eagerly, in the
    batch size.

    >>> surface = ContextSurface((1, 4), {0: Costs((0.0, 100.0), ((1.0, 2.0), (2.0, 6.0)))})
    >>> [surface.decode_seconds(0, batch, 50.0) for batch in (1, 3, 4, 7)]
    [1.5, 4.0, 4.0, 6.5]
    >>> surface.decode_seconds_of(0, np.array([1, 3]), np.array([50.0, 200.0])).tolist()
    [1.5, 10.0]
    """

    captured_batch_sizes: tuple[int, ...]
    costs: Mapping[int, Costs]
    """Costs by K."""
    factor: float = 1.0
    """Cost of prefills as a multiple of the estimate of ``H200_8B``."""
    skip: str = "verify"
    """Kind of a step with K=0, as ``Hello.skip``."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Every K that has costs, rising."""
        return tuple(sorted(self.costs))

    def decode_seconds(self, steps: int, batch_size: int, mean_context: float = 0.0) -> float:
        """Return the seconds of one step; KeyError for a K without costs."""
        costs = self.costs[steps]
        sizes = self.captured_batch_sizes
        index = bisect_left(sizes, batch_size)
        column, part = _segment(costs.contexts, mean_context)
        if index == len(sizes):
            below, above = (_between(costs.seconds[i], column, part) for i in (index - 2, index - 1))
            return above + (above - below) * (batch_size - sizes[-1]) / (sizes[-1] - sizes[-2])
        return _between(costs.seconds[index], column, part)

    def decode_seconds_of(
        self,
        steps: int,
        batch_sizes: npt.NDArray[Any],
        mean_contexts: npt.NDArray[Any],
        at: npt.NDArray[Any] | None = None,  # noqa: ARG002
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of many steps of one K, the same ``at`` any time.

        None of the batch sizes may be above the largest captured one.
        """
        costs = self.costs[steps]
        contexts, seconds = np.array(costs.contexts), np.array(costs.seconds)
        row = np.searchsorted(self.captured_batch_sizes, batch_sizes)
        column = np.clip(np.searchsorted(contexts, mean_contexts), 1, len(contexts) - 1) - 1
        part = (mean_contexts - contexts[column]) / (contexts[column + 1] - contexts[column])
        linear = seconds[row, column] * (1.0 - part) + seconds[row, column + 1] * part
        least: npt.NDArray[np.float64] = LEAST_OF_FIRST * seconds[row, 0]
        return np.asarray(np.maximum(linear, least), np.float64)

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds of a prefill of ``tokens`` prompt tokens: the estimate of ``H200_8B``."""
        return self.factor * H200_8B.prefill_seconds(tokens)

    def scaled(self, factor: float) -> ContextSurface:
        """Return the surface with everything ``factor`` times as slow."""
        costs = {
            steps: Costs(own.contexts, tuple(tuple(factor * seconds for seconds in row) for row in own.seconds))
            for steps, own in self.costs.items()
        }
        return ContextSurface(self.captured_batch_sizes, costs, factor * self.factor, self.skip)


LEAST_OF_FIRST = 0.6
"""Least cost below the first measured context, as a share of the cost there: the line through steep
measurements would soon be below 0."""


def _segment(points: Sequence[float], x: float) -> tuple[int, float]:
    """Return the index of the point left of ``x``, and how far ``x`` lies towards the next (1 = there)."""
    left = min(max(bisect_left(points, x), 1), len(points) - 1) - 1
    return left, (x - points[left]) / (points[left + 1] - points[left])


def _between(values: Sequence[float], left: int, part: float) -> float:
    return max(values[left] * (1.0 - part) + values[left + 1] * part, LEAST_OF_FIRST * values[0])


@dataclass(frozen=True)
class DriftingSurface:
    """What a step costs now, between two surfaces of the same K and captured batch sizes."""

    begin: ContextSurface
    end: ContextSurface
    seconds: float
    """Seconds from the one surface to the other."""
    now: Callable[[], float] = field(compare=False, default=lambda: 0.0)
    """Seconds since the start of the server."""

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes with a CUDA graph, rising."""
        return self.begin.captured_batch_sizes

    @property
    def skip(self) -> str:
        """Kind of a step with K=0, as ``Hello.skip``."""
        return self.begin.skip

    @property
    def steps(self) -> tuple[int, ...]:
        """Every K that has costs, rising."""
        return self.begin.steps

    def decode_seconds(self, steps: int, batch_size: int, mean_context: float = 0.0) -> float:
        """Return the seconds of one step."""
        part = min(self.now() / self.seconds, 1.0)
        costs = [surface.decode_seconds(steps, batch_size, mean_context) for surface in (self.begin, self.end)]
        return costs[0] + part * (costs[1] - costs[0])

    def decode_seconds_of(
        self, steps: int, batch_sizes: npt.NDArray[Any], mean_contexts: npt.NDArray[Any], at: npt.NDArray[Any]
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of many steps of one K, each ``at`` its own moment."""
        begin, end = (s.decode_seconds_of(steps, batch_sizes, mean_contexts, at) for s in (self.begin, self.end))
        return np.asarray(begin + np.minimum(at / self.seconds, 1.0) * (end - begin), np.float64)

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds of a prefill, as before the drift."""
        return self.begin.prefill_seconds(tokens)
