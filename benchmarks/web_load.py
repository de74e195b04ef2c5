"""What the page, the metrics and ``specpilot status`` cost a controller of ten servers.

    python -m benchmarks.web_load --out benchmarks/web_load.json

A real controller with ``goodput`` and ten servers that each send 20 steps a second at batch 16, of 28 captured sizes and
three context regions. Its CPU time is read from the kernel with nobody looking, with a browser on the page,
and with ten readers that poll as the page does. Scrapes and ``specpilot status`` are timed one after the other.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.surface import H200_8B
from sglang_hooks.agent import Agent, ServerFacts
from sglang_hooks.settings import Settings
from sglang_hooks.table_policy import TablePolicy
from tests.messages import record
from tests.web_rig import Rig, browser, running

SERVERS = 10
STEPS_PER_SECOND = 20.0
BATCH = 16
SCRAPES = 100
STATUSES = 20


class Server:
    """The link of one server, fed with steps."""

    def __init__(self, endpoint: str, number: int) -> None:
        settings = Settings(endpoint=endpoint)
        self.agent = Agent(settings, TablePolicy(settings, (0, 1, 3), 3))
        self.agent.start(
            ServerFacts(
                f"gpu-{number}:30000",
                model=f"model {number}",
                captured_batch_sizes=H200_8B.captured_batch_sizes,
                max_running_requests=64,
                context_length=8192,
                overlap=True,
            )
        )
        self.seq = 0

    def step(self) -> None:
        """Take in a table that has come, and send one record of a step at what it says."""
        received: list[Any] = []
        self.agent.pull(received)
        for update in received:
            self.agent.apply(update)
        steps = self.agent.policy.get_steps_for_batch(BATCH) if False else (0, 1, 3)[self.seq // 8 % 3]
        accepted = [(self.seq + row) % (steps + 1) for row in range(BATCH)]
        self.agent.send(
            record(
                record_seq=self.seq,
                step=self.seq + 1,
                time=time.time(),
                batch_size=BATCH,
                padded_batch_size=BATCH,
                context_tokens=500 * BATCH,
                steps=steps,
                proposed_steps=steps,
                draft_tokens=steps + 1,
                accepted_drafts=accepted,
                seconds=H200_8B.decode_seconds(steps, BATCH) * (1.0 + 0.01 * (self.seq % 3)),
            )
        )
        self.seq += 1
