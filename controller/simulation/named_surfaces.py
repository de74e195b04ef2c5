"""The surfaces that a replay knows by name: ``load_surface``.

Measured ones come from ``surfaces/*.json``, which ``benchmarks/make_surfaces.py`` makes; two
synthetic ones, ``moe`` and ``context``, are computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import msgspec

from specpilot.controller.simulation.surface import CAPTURED_BATCH_SIZES, ContextSurface, Costs


@dataclass(frozen=True)
class NamedSurface:
    """A server to simulate: what its steps cost with speculation configured, and without."""

    name: str
    label: str
    """One line for a reader of results: where the figures come from, and what is not measured."""
    speculating: ContextSurface
    plain: ContextSurface
    """Costs of the server started without speculation: K=0 only."""

    def scaled(self, factor: float) -> NamedSurface:
        """Return a server that takes ``factor`` times as long for everything."""
        label = self.label if factor == 1.0 else f"{self.label}; every cost x {factor:g}"
        return NamedSurface(self.name, label, self.speculating.scaled(factor), self.plain.scaled(factor))


class SurfaceCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one step: of arm "none" or "K=...", at a batch size and a mean context."""

    arm: str
    batch_size: int
    context: float
    """Tokens per request."""
    seconds: float
    measured: bool
    """Was it measured, or extrapolated (see ``benchmarks/make_surfaces.py``)?"""


class SurfaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``surfaces/*.json``: every arm at the same batch sizes, and at the same contexts for each of them."""

    label: str
    cells: list[SurfaceCell]
    skip: Literal["decode", "verify"] = "verify"

    def surface(self, name: str) -> NamedSurface:
        """Return the server, with costs at the captured batch sizes."""
        by_arm: dict[str, dict[int, list[tuple[float, float]]]] = {}
        for cell in self.cells:
            by_arm.setdefault(cell.arm, {}).setdefault(cell.batch_size, []).append((cell.context, cell.seconds))
        costs = {arm: Costs.on_captured_sizes(lines) for arm, lines in by_arm.items()}
        plain = ContextSurface(CAPTURED_BATCH_SIZES, {0: costs.pop("none")})
        speculating = {int(arm.removeprefix("K=")): own for arm, own in costs.items()}
        return NamedSurface(name, self.label, ContextSurface(CAPTURED_BATCH_SIZES, speculating, skip=self.skip), plain)


_STEPS = (0, 1, 2, 3, 5, 7)
_CONTEXTS = (0.0, 32768.0)


def _synthetic(name: str, label: str, seconds: Callable[[int, int, float], float], plain: float) -> NamedSurface:
    """Tabulate ``seconds(K, batch, context)``, linear in the context; no speculation costs ``plain`` of K=0."""

    def costs(steps: int, share: float = 1.0) -> Costs:
        return Costs(
            _CONTEXTS,
            tuple(tuple(share * seconds(steps, batch, at) for at in _CONTEXTS) for batch in CAPTURED_BATCH_SIZES),
        )

    speculating = ContextSurface(CAPTURED_BATCH_SIZES, {steps: costs(steps) for steps in _STEPS})
    return NamedSurface(name, label, speculating, ContextSurface(CAPTURED_BATCH_SIZES, {0: costs(0, plain)}))


def _moe_seconds(steps: int, batch: int, context: float) -> float:
    """128 experts, 8 a token: n tokens touch 1 - (1 - 8/128)^n of them if they choose independently.

    Reading all experts takes 12 ms, the rest of the model 3 ms, a draft step 0.25 ms, the
    arithmetic 15 us a token, and attention reads 10 ns a token of context.
    """
    tokens = batch * (steps + 1)
    touched = 1.0 - (1.0 - 8 / 128) ** tokens
    return 0.003 + 0.012 * touched + 0.00025 * steps + 15e-6 * tokens + 10e-9 * batch * context


def _context_seconds(steps: int, batch: int, context: float) -> float:
    """8 ms to read the weights, 60 us a verified token, 0.6 ms a draft step, and 60 ns a token of context.

    The KV cache is read once a step however many drafts are verified, so at long context
    speculation is nearly free and at short context the verified tokens are the cost.
    """
    return 0.008 + 60e-6 * batch * (steps + 1) + 0.0006 * steps + 60e-9 * batch * context


def _moe() -> NamedSurface:
    label = "synthetic: a mixture of experts, whose verify cost grows steeply with the tokens until all are touched"
    return _synthetic("moe", label, _moe_seconds, 0.92)


def _context() -> NamedSurface:
    label = "synthetic: speculation loses at short context and wins at long, as in vllm #49986"
    return _synthetic("context", label, _context_seconds, 0.96)


_IN_CODE = {"context": _context, "moe": _moe}


def surface_names() -> list[str]:
    """Return every name that ``load_surface`` takes."""
    packaged = [file.name for file in files("specpilot.controller.simulation").joinpath("surfaces").iterdir()]
    return sorted([*_IN_CODE, *(name.removesuffix(".json") for name in packaged if name.endswith(".json"))])


def load_surface(name: str) -> NamedSurface:
    """Return a surface by name; ValueError lists the known ones.

    >>> surface_names()
    ['context', 'h200-native-skip', 'h200-sglang', 'h200-triton', 'h200-triton-skip', 'moe']
    """
    if name not in surface_names():
        raise ValueError(f"no surface is called {name!r}: use one of {', '.join(surface_names())}")
    if name in _IN_CODE:
        return _IN_CODE[name]()
    data = files("specpilot.controller.simulation").joinpath("surfaces", f"{name}.json").read_bytes()
    return msgspec.json.decode(data, type=SurfaceFile).surface(name)
