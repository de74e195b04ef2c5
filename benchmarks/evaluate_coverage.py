"""Do the intervals of ``specpilot evaluate`` hold the truth, and how far off are the estimates?

    python benchmarks/evaluate_coverage.py --steps 1000000 --repetitions 200 --out benchmarks/evaluate_coverage.json

Logs with the record structure of the real hooks are made up by ``tests/logs.py``, where the truth is
known: 1 % of exploration in blocks of 4 forward passes. Each repetition is another log. The target
policy differs from the logged one on about a fifth of the steps. Prints, and writes as JSON, for each
estimator how many of the 95 % intervals held the truth, and the errors.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from controller.evaluate import fold_sums, judge
from controller.evaluate_models import fit_folds
from policies.estimators import ESTIMATORS
from policies.interface import Plan
from tests.logs import LOGGED, Log, table

LESS = table((1, 3), (8, 1), (17, 0))
"""Against LOGGED, K=3 up to batch 8, 1 up to 32 and 0 above: less at batch 8, and nothing from 17 on."""
MORE = table((1, 3), (13, 1))
"""More instead: K=3 up to batch 12, and 1 above, of which nothing is seen but in explored steps."""


@dataclass(frozen=True)
class Repetition:
    """One log, one estimator."""

    case: str
    estimator: str
    seed: int
    truth: float
    estimate: float
    low: float
    high: float
    effective_samples: float
    differing: float
    """Share of steps on which the target runs another K than the log held."""


class Kept(Log):
    """A log that is made up once."""

    def parts(self) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
        if "kept" not in self.__dict__:
            self.__dict__["kept"] = list(super().parts())
        yield from self.__dict__["kept"]


def repeat(case: str, log: Log, target: Plan) -> list[Repetition]:
    """Evaluate one log."""
    hello = log.hello
    folds = fold_sums(log.chunks(), hello)
    assert folds is not None
    judged = judge(log.chunks(), hello, {"target": [target]}, fit_folds(folds, hello))
    truth, differing = log.truth(target), log.differing(target)
    found = []
    for estimator in ESTIMATORS:
        one = judged.sums["target"].estimate(estimator, judged.switches)
        if one is None or one.answered < 1.0:
            # Refused, or about a part of the steps, of which the truth is another.
            continue
        found.append(
            Repetition(
                case, estimator, log.seed, truth, one.estimate, one.low, one.high, one.effective_samples, differing
            )
        )
    return found


def cases(steps: int, seed: int) -> list[tuple[str, Log, Plan]]:
    return [
        ("less", Kept(steps, seed), LESS),
        ("more", Kept(steps, seed), MORE),
        ("drift", Kept(steps, seed, drift=0.2), LESS),
        ("tie", Kept(steps, seed, tie=True, ending=0.0), LESS),
    ]


def run(steps: int, seed: int, only: list[str]) -> list[Repetition]:
    return [one for case in cases(steps, seed) if not only or case[0] in only for one in repeat(*case)]


def summary(found: list[Repetition]) -> list[dict[str, object]]:
    """Per case and estimator."""
    rows = []
    for case, estimator in dict.fromkeys((one.case, one.estimator) for one in found):
        own = [one for one in found if (one.case, one.estimator) == (case, estimator)]
        errors = np.array([one.estimate / one.truth - 1.0 for one in own])
        held = sum(one.low <= one.truth <= one.high for one in own)
        rows.append(
            {
                "case": case,
                "estimator": estimator,
                "answered_in_full": len(own),
                "intervals_that_held_the_truth": held / len(own),
                "largest_error": float(np.abs(errors).max()),
                "root_mean_square_error": float(np.sqrt((errors**2).mean())),
                "mean_error": float(errors.mean()),
                "mean_half_width": float(np.mean([(one.high - one.low) / 2.0 / one.estimate for one in own])),
                "differing_steps": float(np.mean([one.differing for one in own])),
                "effective_samples": float(np.mean([one.effective_samples for one in own])),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--cases", nargs="*", default=[], help="less, more, drift, tie (default: all)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin = perf_counter()
    seeds = range(1, options.repetitions + 1)
    arguments = ([options.steps] * len(seeds), seeds, [options.cases] * len(seeds))
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers) as pool:
            parts = list(pool.map(run, *arguments))
    else:
        parts = list(map(run, *arguments))
    found = [one for part in parts for one in part]
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.processor() or platform.system()}, Python "
        f"{platform.python_version()}, numpy {np.__version__}",
        "steps": options.steps,
        "exploration": Log(1, 1).exploration,
        "logged": str(LOGGED.choice),
        "seconds": round(perf_counter() - begin, 1),
        "cases": summary(found),
        "repetitions": [asdict(one) for one in found],
    }
    for row in result["cases"]:
        print(json.dumps(row))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
