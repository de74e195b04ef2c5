"""Which system calls do the hooks make on the scheduler thread? Needs strace.

    python benchmarks/hook_syscalls.py            prints a JSON object: steps, and calls by name

Traces only the main thread (which plays the scheduler) over 20,000 steps at batch 64, with the
link thread and a controller process running, once with the controller stopped by SIGSTOP.
``futex`` is CPython handing the GIL to the link thread, ``mmap`` and ``munmap`` are its allocator
growing with the bounded queue. Exits with 1 if there is anything else.
"""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20_000


def traced() -> None:
    from specpilot.controller.bench import HookDriver, running_controller, step_until

    with tempfile.TemporaryDirectory() as folder, running_controller(Path(folder)) as (endpoint, process):
        server = HookDriver(endpoint, "strace:1")
        step_until(lambda: server.agent.state().epoch > 0, server, "no table came")
        server.batch_of(64)
        for stopped in (False, True):
            if stopped:
                process.send_signal(signal.SIGSTOP)
            os.getpgid(0)  # the mark that the trace is cut at: nothing else here calls it
            for _ in range(STEPS):
                server.step()
            os.getpgid(0)
        process.send_signal(signal.SIGCONT)
        server.stop()


def main() -> int:
    if sys.argv[1:] == ["--traced"]:
        traced()
        return 0
    with tempfile.NamedTemporaryFile("r") as log:
        subprocess.run(["strace", "-qq", "-o", log.name, sys.executable, __file__, "--traced"], check=True)
        calls: dict[str, collections.Counter[str]] = {
            "running": collections.Counter(),
            "stopped": collections.Counter(),
        }
        marks = 0
        for line in log:
            name = re.match(r"(\w+)\(", line)
            if name is None:
                continue
            if name[1] == "getpgid":
                marks += 1
            elif marks in (1, 3):
                calls["running" if marks == 1 else "stopped"][name[1]] += 1
    assert marks == 4, marks
    print(json.dumps({"steps": STEPS, **calls}, indent=1))
    return int(any(set(found) - {"futex", "mmap", "munmap"} for found in calls.values()))


if __name__ == "__main__":
    raise SystemExit(main())
