"""Makes the measured surfaces of ``specpilot replay`` from the live figures.

    python benchmarks/make_surfaces.py [--out controller/simulation/surfaces]

Reads ``benchmarks/live/surface.json``, writes one file per surface. A measured cell keeps its
batch size, its mean context and its median seconds. Cells that were not measured are filled in,
so that every arm has all contexts at all batch sizes, and marked ``"measured": false``:

- from two measured contexts of the same arm and batch size, linearly in the context;
- from a single one, with the slope of half the batch size, doubled: what a step reads of the
  KV cache grows with batch size times context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks/live/surface.json"

Line = dict[int, list[tuple[float, float]]]
"""(context, seconds) points by batch size."""


def lines_of(cells: list[dict[str, Any]]) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for cell in cells:
        points = lines.setdefault(cell["arm"], {}).setdefault(cell["batch_size"], [])
        points.append((cell["mean_context"], cell["seconds"]))
    return {arm: {batch: sorted(points) for batch, points in sorted(line.items())} for arm, line in lines.items()}


def filled(arm: str, line: Line) -> list[dict[str, Any]]:
    """All contexts of batch size 1 (the most complete) at every batch size."""
    contexts = [context for context, _ in line[min(line)]]
    complete: Line = {}
    cells = []
    for batch, points in line.items():
        known = dict(points)
        if len(points) == 1:
            (low, at_low), (high, at_high) = complete[batch // 2][:2]
            slope = 2 * (at_high - at_low) / (high - low)
            points = [*points, (points[0][0] + 1000.0, points[0][1] + 1000.0 * slope)]
        complete[batch] = [(context, known.get(context) or beyond(points, context)) for context in contexts]
        cells += [
            {
                "arm": arm,
                "batch_size": batch,
                "context": context,
                "seconds": round(seconds, 6),
                "measured": context in known,
            }
            for context, seconds in complete[batch]
        ]
    return cells


def beyond(points: list[tuple[float, float]], context: float) -> float:
    """Linear through the two points nearest to ``context``."""
    (low, at_low), (high, at_high) = sorted(sorted(points, key=lambda point: abs(point[0] - context))[:2])
    return at_low + (at_high - at_low) * (context - low) / (high - low)


def renamed(cells: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    return [{**cell, "arm": arm} for cell in cells]


def skipping(name: str, arms: dict[str, list[dict[str, Any]]], source: str) -> dict[str, Any]:
    """The surface ``name`` with the decode-mode skip, which skip_parity.json holds against no speculation."""
    return {
        "label": f"as {name}, but K=0 at the cost of no speculation, as the decode-mode skip; {source}",
        "skip": "decode",
        "cells": [
            cell for arm, cells in arms.items() for cell in (renamed(arms["none"], arm) if arm == "K=0" else cells)
        ],
    }


def surfaces() -> dict[str, dict[str, Any]]:
    """The contents of every file, by name."""
    found = {}
    for run in json.loads(MEASURED.read_text()):
        arms = {arm: filled(arm, line) for arm, line in lines_of(run["cells"]).items()}
        source = f"{run['gpu']}, {run['model']}, SGLang {run['sglang']}, {run['date']}"
        every = [cell for cells in arms.values() for cell in cells]
        missing = f"{sum(not cell['measured'] for cell in every)} of {len(every)} cells extrapolated"
        if run["attention"] == "fa3":
            found["h200-sglang"] = {
                "label": f"measured: FlashAttention-3, K=0 as SGLang has it; {source}; {missing}",
                "cells": every,
            }
            found["h200-native-skip"] = skipping("h200-sglang", arms, f"{source}; {missing}")
        else:
            found["h200-triton"] = {
                "label": f"measured: triton attention, K=0 as SGLang has it; {source}; {missing}",
                "cells": every,
            }
            found["h200-triton-skip"] = skipping("h200-triton", arms, f"{source}; {missing}")
    return found


def text_of(surface: dict[str, Any]) -> str:
    """JSON with one cell a line."""
    cells = ",\n".join(json.dumps(cell) for cell in surface["cells"])
    head = "".join(f'"{key}": {json.dumps(surface[key])},\n' for key in ("label", "skip") if key in surface)
    return f'{{{head}"cells": [\n{cells}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "controller/simulation/surfaces")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, surface in surfaces().items():
        (options.out / f"{name}.json").write_text(text_of(surface))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
