"""Seconds and memory of ``specpilot evaluate`` by the length of the trace.

    python benchmarks/evaluate_scale.py --steps 1000000 3000000 10000000 --out benchmarks/evaluate_scale.json

Traces of a simulated server (``tests/support/logs.py``, 1 % of exploration) are written below ``--directory``,
evaluated by the command in a process of its own on one core, replay included, and deleted. Four policies each time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.logs import Log

ROOT = Path(__file__).parents[1]
POLICIES = ("logged", "threshold:16", "batch-table:1:3,8:1,17:0", "goodput")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def measure(steps: int, directory: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=directory) as name:
        folder = Path(name)
        begin = process_time()
        trace = Log(steps, 1).write(folder / "trace")
        written = process_time() - begin
        size = sum(path.stat().st_size for path in trace.rglob("*.arrows"))
        words = [word for policy in POLICIES for word in ("--policy", policy)]
        out = folder / "rows.json"
        begin = perf_counter()
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "specpilot.controller.cli", "evaluate", str(trace), *words, "--json", str(out)],
            {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
        )
        _, status, usage = os.wait4(child, 0)
        seconds = perf_counter() - begin
        rows = json.loads(out.read_text())
        shutil.rmtree(trace)
    return {
        "steps": steps,
        "trace_mb": round(size / 1e6),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "memory_mb": round(usage.ru_maxrss / 1024),
        "exit_code": os.waitstatus_to_exitcode(status),
        "writing_cpu_seconds": round(written, 1),
        "estimates": {f"{row['policy']} {row['estimator']}": row["estimate"] for row in rows},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # One core, whatever the libraries would take.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, one core",
        "policies": POLICIES,
        "runs": [measure(steps, options.directory) for steps in options.steps],
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
