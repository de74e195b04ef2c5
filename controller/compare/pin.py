"""An arm pinned on a live server: put in force, renewed while a run lasts, and taken back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specpilot.controller.client.settings import change_settings
from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.compare.arms import values_of
from specpilot.controller.compare.runs import CompareError
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.sglang_hooks.connection import KeyFiles
from specpilot.sglang_hooks.wire import DecisionSource, SetRequest

logger = logging.getLogger(__name__)

PIN_SECONDS = 60.0
"""Seconds after which a pin ends that nobody renews."""
RENEW_SECONDS = 15.0
IN_FORCE_SECONDS = 15.0
"""Seconds for a pinned table to get to the server; an idle one looks for it at its next receiving pass."""


def replicas_of(status: ControllerStatus, name: str) -> list[ServerStatus]:
    """Return the servers of a controller that ``name`` means: one by its name, or all replicas of NAME/RANK."""
    return [server for server in status.servers if name in (server.server, server.server.rpartition("/")[0])]


@dataclass(frozen=True)
class PinnedServer:
    """The server of a comparison, with all its replicas, as its controller is told about it."""

    endpoint: str
    keys: KeyFiles
    """Keys for a tcp:// endpoint."""
    name: str

    def pin(self, arm: str) -> None:
        """Put an arm in force, and wait until the server (all its replicas) says that its table is."""
        try:
            self._set(arm)
        except ConfigError as error:
            raise CompareError(f"arm {arm} cannot be put in force: {error}") from error
        deadline = time.monotonic() + IN_FORCE_SECONDS
        while True:
            status = fetch_status(self.endpoint, keys=self.keys)
            replicas = replicas_of(status, self.name)
            waiting = [
                replica for replica in replicas if replica.pending_epoch or replica.source != DecisionSource.TABLE.name
            ]
            if replicas and not waiting:
                break
            if time.monotonic() > deadline:
                notes = "; ".join(filter(None, (replica.note for replica in waiting))) or "see `specpilot status`"
                raise CompareError(f"arm {arm} did not come in force at {self.name} in {IN_FORCE_SECONDS:g} s: {notes}")
            time.sleep(0.1)
        if arm != "configured" and any(replica.mode == "shadow" for replica in replicas):
            raise CompareError(f"{self.name} was started with SPECPILOT_MODE=shadow and applies nothing: restart it")

    @contextmanager
    def renewed(self, arm: str) -> Iterator[Callable[[], str]]:
        """Renew a pin until the block ends; what is yielded tells why that failed, if it did."""
        ended = threading.Event()
        failures: list[str] = []

        def renew() -> None:
            while not ended.wait(RENEW_SECONDS):
                try:
                    self._set(arm)
                except (StatusError, ConfigError) as error:
                    failures.append(str(error))
                    return

        thread = threading.Thread(target=renew, name="specpilot-pin", daemon=True)
        thread.start()
        try:
            yield lambda: "; ".join(failures)
        finally:
            ended.set()
            thread.join()

    def restore(self) -> None:
        """Let the server go back to what was configured."""
        try:
            change_settings(self.endpoint, SetRequest({}, self.name, seconds=1.0, reset=True), self.keys)
        except (StatusError, ConfigError) as error:
            logger.warning(
                "%s; what was set for the comparison ends with the controller, or by itself within %.0f s",
                error,
                PIN_SECONDS,
            )

    def _set(self, arm: str) -> None:
        change_settings(self.endpoint, SetRequest(values_of(arm), self.name, PIN_SECONDS), self.keys)
