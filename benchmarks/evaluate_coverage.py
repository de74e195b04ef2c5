"""Do the intervals of ``specpilot evaluate`` hold the truth, and how far off are the estimates?

    python benchmarks/evaluate_coverage.py --steps 1000000 --repetitions 200 --out benchmarks/evaluate_coverage.json

Logs with the record structure of the real hooks are made up by ``tests/support/logs.py``, where the truth is
known: 1 % of exploration in blocks of 4 forward passes. Each repetition is another log. The target
policy differs from the logged one on about a fifth of the steps. Prints, and writes as JSON, for each
estimator how many of the 95 % intervals held the truth, and the errors: of the efficiency and of the gain.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from specpilot.controller.evaluate.evaluation import fold_sums, judge
from specpilot.controller.evaluate.fold_models import fit_folds
from specpilot.policies.interface import Plan
from specpilot.policies.offpolicy.estimators import ESTIMATORS
from tests.support.logs import Log, table

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
    true_gain: float
    gain: float
    gain_low: float
    gain_high: float
    effective_samples: float
    differing: float
    """Share of steps on which the target runs another K than the log held."""


class Kept(Log):
    """A log that is made up once."""

    def parts(self) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
        if "kept" not in self.__dict__:
            self.__dict__["kept"] = list(super().parts())
        yield from self.__dict__["kept"]


def repeat(log: Log, targets: dict[str, Plan]) -> list[Repetition]:
    """Evaluate one log for the target of each case."""
    hello = log.hello
    folds = fold_sums(log.chunks(), hello)
    assert folds is not None
    judged = judge(log.chunks(), hello, {case: [plan] for case, plan in targets.items()}, fit_folds(folds, hello))
    found = []
    for case, target in targets.items():
        truth, true_gain, differing = log.truth(target), log.gain(target), log.differing(target)
        for estimator in ESTIMATORS:
            one = judged.sums[case].estimate(estimator, judged.switches)
            if one is None or one.answered < 1.0:
                # Refused, or about a part of the steps, of which the truth is another.
                continue
            efficiency = (truth, one.estimate, one.low, one.high)
            gain = (true_gain, one.gain, one.gain_low, one.gain_high)
            found.append(Repetition(case, estimator, log.seed, *efficiency, *gain, one.effective_samples, differing))
    return found


def asked(steps: int, seed: int) -> list[Repetition]:
    """Targets that differ on about a fifth of the steps."""
    return repeat(Kept(steps, seed), {"less": LESS, "more": MORE})


def beside(steps: int, seed: int) -> list[Repetition]:
    """Acceptance that drifts, and a server on which every K is as good."""
    return [
        *repeat(Kept(steps, seed, drift=0.2), {"drift": LESS}),
        *repeat(Kept(steps, seed, tie=True, ending=0.0), {"tie": LESS}),
    ]


def summary(found: list[Repetition]) -> list[dict[str, object]]:
    """Per case and estimator."""
    rows = []
    for case, estimator in dict.fromkeys((one.case, one.estimator) for one in found):
        own = [one for one in found if (one.case, one.estimator) == (case, estimator)]
        errors = np.array([one.estimate / one.truth - 1.0 for one in own])
        gain_errors = np.array([one.gain - one.true_gain for one in own])
        rows.append(
            {
                "case": case,
                "estimator": estimator,
                "answered_in_full": len(own),
                "intervals_that_held_the_truth": float(np.mean([one.low <= one.truth <= one.high for one in own])),
                "largest_error": float(np.abs(errors).max()),
                "root_mean_square_error": float(np.sqrt((errors**2).mean())),
                "mean_error": float(errors.mean()),
                "mean_half_width": float(np.mean([(one.high - one.low) / 2.0 / one.estimate for one in own])),
                "gain_intervals_that_held_the_truth": float(
                    np.mean([one.gain_low <= one.true_gain <= one.gain_high for one in own])
                ),
                "largest_gain_error": float(np.abs(gain_errors).max()),
                "mean_gain_error": float(gain_errors.mean()),
                "mean_true_gain": float(np.mean([one.true_gain for one in own])),
                "mean_gain_half_width": float(np.mean([(one.gain_high - one.gain_low) / 2.0 for one in own])),
                "differing_steps": float(np.mean([one.differing for one in own])),
                "effective_samples": float(np.mean([one.effective_samples for one in own])),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--beside", type=int, default=20, help="repetitions of the cases drift and tie")
    parser.add_argument("--out", type=Path, help="written as it goes on")
    options = parser.parse_args()
    found: list[Repetition] = []
    for cases, repetitions in ((asked, options.repetitions), (beside, options.beside)):
        for seed in range(1, repetitions + 1):
            found += cases(options.steps, seed)
            if options.out is not None:
                options.out.write_text(json.dumps(result(options.steps, found), indent=1) + "\n")
    for row in summary(found):
        print(json.dumps(row))
    return 0


def result(steps: int, found: list[Repetition]) -> dict[str, object]:
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, one process",
        "steps": steps,
        "exploration": Log(1, 1).exploration,
        "cpu_seconds": round(process_time(), 1),
        "cases": summary(found),
    }


if __name__ == "__main__":
    sys.exit(main())
