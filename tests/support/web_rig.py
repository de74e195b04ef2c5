"""A real controller with its page and simulated servers as processes, for a browser to look at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.serve.priors import PriorStore
from specpilot.controller.serve.report import ControllerStatus
from specpilot.controller.simulation.server import CANDIDATE_STEPS
from specpilot.controller.simulation.surface import H200_8B
from tests.support.messages import hello
from tests.support.snapshots import learned
from tests.support.waiting import PATIENCE, until

GOODPUT = '[policy]\nname = "goodput"\n'
SIMULATED = hello(
    model="simulated 8B target",
    draft_model="simulated EAGLE3 draft",
    gpu="simulated H200",
    sglang_version="simulated",
    candidate_steps=list(CANDIDATE_STEPS),
    captured_batch_sizes=list(H200_8B.captured_batch_sizes),
)
"""What a simulated server says of itself, as far as its fingerprint goes."""


@dataclass
class Rig:
    """What runs: the page's address without a slash at the end, the controller, its log."""

    url: str
    endpoint: str
    controller: subprocess.Popen[bytes]
    log: Path

    def status(self) -> ControllerStatus:
        return fetch_status(self.endpoint, PATIENCE)


@contextmanager
def running(
    folder: Path,
    servers: Sequence[str] = ("gpu-a:30000",),
    policy: str = GOODPUT,
    web: str = "",
    seconds: float = 120.0,
) -> Iterator[Rig]:
    """Run a controller that knows its servers from before, as after a restart, and the servers."""
    endpoint = f"ipc://{folder}/c.ipc"
    # One that has seen all sizes of the demo's card, so that the page has something to explain at once.
    known, _ = learned(8000, server=SIMULATED, batches=(1, 2, 4, 8, 16, 32, 48, 64))
    prior = known.to_prior()
    assert prior is not None
    PriorStore(folder / "prior").save(SIMULATED, prior)
    config = folder / "controller.toml"
    listen = "" if "listen" in web else 'listen = "127.0.0.1:0"\n'
    config.write_text(
        f'[controller]\nendpoint = "{endpoint}"\n{policy}[trace]\ndirectory = "{folder}/trace"\n'
        f'[prior]\ndirectory = "{folder}/prior"\n[web]\n{listen}{web}\n'
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECPILOT_")}
    with ExitStack() as ends, (folder / "log").open("wb") as log:

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL, stderr=log, env=environment
            )
            ends.callback(_end, process)
            return process

        controller = start("specpilot.controller.cli", "controller", "--config", str(config))
        rig = Rig("", endpoint, controller, folder / "log")
        _until(lambda: _page(rig), rig)
        for number, name in enumerate(servers):
            options = ("--endpoint", endpoint, "--server-id", name, "--seed", str(number + 1))
            start("specpilot.controller.simulation.server", *options, "--seconds", str(seconds))
        _until(lambda: sum(server.records > 0 for server in rig.status().servers) == len(servers), rig)
        yield rig


def _page(rig: Rig) -> bool:
    try:
        rig.url = rig.status().page.removesuffix("/")
    except StatusError:
        return False
    return rig.url.startswith("http://")


def _until(done: Any, rig: Rig) -> None:
    until(
        lambda: rig.controller.poll() is not None or done(),
        what=lambda: f"after {rig.log.read_text()[-2000:]}: what was waited for",
    )
    assert rig.controller.poll() is None, rig.log.read_text()[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
