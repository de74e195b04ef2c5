"""Simulated servers for tests of the cost model: surfaces with a known truth, and noisy records of their steps."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.policies.models.cost import CostModel
from tests.support.messages import hello, record

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/live/surface.json").read_text())
STEPS = [0, 1, 2, 3, 5, 7]
CAPTURED = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
SERVER = hello(candidate_steps=STEPS, captured_batch_sizes=CAPTURED)


class Surface:
    """Seconds by K, batch size and mean context: linear between the measured points."""

    def __init__(self, attention: str) -> None:
        self._points: dict[int, dict[int, list[tuple[float, float]]]] = {}
        for cell in next(each for each in MEASURED if each["attention"] == attention)["cells"]:
            if cell["arm"] != "none":
                curves = self._points.setdefault(int(cell["arm"][2:]), {})
                curves.setdefault(cell["batch_size"], []).append((cell["mean_context"], cell["seconds"]))

    def seconds(self, steps: int, batch_size: float, mean_context: float) -> float:
        curves = self._points[steps]
        batches = sorted(curves)
        right = min(max(bisect_left(batches, batch_size), 1), len(batches) - 1)
        ends = [(b, _linear(sorted(curves[b]), mean_context)) for b in batches[right - 1 : right + 1]]
        return _linear(ends, batch_size)


def _linear(points: list[tuple[float, float]], x: float) -> float:
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, (x, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class Server:
    """Feeds a model with records that are numbered without gaps."""

    def __init__(self, model: CostModel, rng: random.Random, scale: float = 1.0) -> None:
        self.model, self.rng, self.scale = model, rng, scale
        self.seq = 0

    def step(
        self, seconds: float, steps: int = 3, batch_size: int = 8, mean_context: float = 500.0, **facts: Any
    ) -> bool:
        self.seq += 1
        context_tokens = round(batch_size * mean_context)
        facts = {"steps": steps, "draft_tokens": steps + 1, "batch_size": batch_size, **facts}
        return self.model.learn(
            record(record_seq=self.seq, seconds=seconds * self.scale, context_tokens=context_tokens, **facts)
        )

    def noisy(self, seconds: float, count: int, noise: float = 0.03, outliers: float = 0.01, **facts: Any) -> None:
        for _ in range(count):
            factor = math.exp(self.rng.gauss(0.0, noise))
            if self.rng.random() < outliers:
                factor *= 10.0 ** self.rng.uniform(1.0, 3.0)
            self.step(seconds * factor, **facts)

    def run(self, surface: Seconds, steps: int, size: int, mean_context: float, count: int, **facts: Any) -> None:
        """``count`` steps of a full batch of a captured size."""
        seconds = surface(steps, size, mean_context)
        self.noisy(seconds, count, steps=steps, batch_size=size, mean_context=mean_context, **facts)


Seconds = Callable[[int, int, float], float]
"""Seconds of a step by K, captured batch size (requests) and mean context (tokens per request)."""

NAMED = ("context", "h200-native-skip", "h200-sglang", "h200-triton", "moe")


def named(name: str) -> Seconds:
    return load_surface(name).speculating.decode_seconds


def drawn(seed: int) -> Seconds:
    """A server whose terms are drawn: dense or of experts, with or without a roofline, tiles and odd kernels."""
    rng = random.Random(seed)

    def share(low: float, high: float) -> float:
        return base * math.exp(rng.uniform(math.log(low), math.log(high)))

    base = 1.0
    base = share(0.005, 0.03)
    draft, request, token, verify = share(0.01, 0.12), share(2e-4, 5e-3), share(5e-4, 8e-3), share(0.005, 0.15)
    cached, single = share(1e-6, 1e-5), share(2e-6, 5e-5)
    cached_verify, cached_draft = cached * rng.uniform(0.03, 1.0), cached * rng.uniform(0.005, 0.1)
    knee = rng.choice([0.0, rng.uniform(32.0, 400.0)])
    experts, touched = rng.choice([0.0, 0.0, share(0.3, 3.0)]), rng.uniform(0.01, 0.1)
    tile, odd = rng.choice([1, 1, 8, 16, 64]), rng.choice([0.0, 0.02, 0.05])

    def seconds(steps: int, size: int, mean_context: float) -> float:
        tokens = math.ceil(size * (steps + 1) / tile) * tile
        context = size * mean_context
        total = base + verify * (steps > 0) + draft * steps + request * size + token * max(tokens - knee, 0.0)
        total += (cached + cached_verify * (steps > 0) + cached_draft * steps) * context + single * mean_context
        total += experts * (1.0 - (1.0 - touched) ** tokens)
        return total * math.exp(odd * random.Random(f"{seed} {steps} {size}").gauss(0.0, 1.0))

    return seconds


def rates(seconds: Sequence[float], acceptance: float = 0.7) -> list[float]:
    """Tokens per second and request of each of STEPS, by the seconds of its step."""
    return [sum(acceptance**i for i in range(k + 1)) / s for k, s in zip(STEPS, seconds, strict=True)]


def best(seconds: Sequence[float], acceptance: float = 0.7) -> int:
    """Index of the K with the most tokens per second, of STEPS."""
    goodput = rates(seconds, acceptance)
    return goodput.index(max(goodput))


def share_of_best(model: CostModel, surface: Seconds, size: int, mean_context: float) -> float:
    """Goodput of the K that the model takes for the best, as a share of that of the best."""
    truth = rates([surface(k, size, mean_context) for k in STEPS])
    return truth[best(model.predict_all(size, mean_context)[0].tolist())] / max(truth)
