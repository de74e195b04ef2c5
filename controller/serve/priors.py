"""What was learned of a server, stored on disk: a controller that restarts begins where it was.

One JSON file per fingerprint (hardware, models, version, graphs: ``specpilot.policies.models.cost_prior.fingerprint``),
and one per server of what its switchback has measured (``switchback.py``).
A file that cannot be read, or says nonsense, is worth a note in the log and in ``status``, never
an error: the policy then learns from nothing, as it would without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from specpilot.controller.config import Config, GoodputPolicy, ServerConfig
from specpilot.controller.errors import ConfigError
from specpilot.controller.files import replace_json
from specpilot.controller.serve.session import Session
from specpilot.controller.serve.switchback import Stored
from specpilot.controller.trace.format import folder_name
from specpilot.policies.interface import Policy
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import Hello

logger = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
"""Largest file that is read: a prior has some hundred cells of 100 bytes each."""


class PriorStore:
    """The folder of stored priors; nothing here raises for what the disk does, after the start."""

    def __init__(self, directory: Path) -> None:
        """Create ``directory``; ConfigError if it cannot be."""
        self._directory = directory.absolute()
        self.failures = 0
        """Number of files that could not be written, or were there and could not be used."""
        self.error = ""
        """Why the newest attempt to write failed; empty while it works."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"stored priors cannot be kept in {self._directory}: {error.strerror or error}. "
                'Make that folder writable, or set prior.directory to another one, or to "" to keep none'
            ) from error

    def path(self, server: Hello) -> Path:
        """Return the file for a server of this fingerprint."""
        return self._directory / f"{fingerprint(server)}.json"

    def load(self, server: Hello) -> dict[str, Any] | None:
        """Return the stored prior for this server; None if there is none that can be read."""
        path = self.path(server)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES >> 20} MB")
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._unused(path, error)
            return None

    def save(self, server: Hello, prior: dict[str, Any]) -> None:
        """Replace the file of this server in one step: a crash leaves the old one or the new one."""
        self._write(self.path(server), prior)

    def load_switchback(self, server_key: str) -> Stored | None:
        """Return what a server's switchback had measured; None if there is nothing that can be read."""
        path = self._switchback_path(server_key)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES >> 20} MB")
            return msgspec.json.decode(path.read_bytes(), type=Stored)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._unused(path, error)
            return None

    def save_switchback(self, server_key: str, stored: Stored) -> None:
        """Replace the file of this server's switchback in one step."""
        self._write(self._switchback_path(server_key), stored)

    def _switchback_path(self, server_key: str) -> Path:
        return self._directory / f"{folder_name(server_key)}.switchback.json"

    def _unused(self, path: Path, error: Exception) -> None:
        self.failures += 1
        logger.warning("%s is not used: %s. It will be replaced", path, error)

    def _write(self, path: Path, content: object) -> None:
        try:
            replace_json(path, content)
            self.error = ""
        except ConfigError as error:
            self.failures += 1
            if not self.error:
                logger.error("what was learned cannot be kept: %s", error)
            self.error = f"what was learned cannot be kept: {error}"


class PriorKeeper:
    """Stores what the sessions learn, and starts policies from it, as far as the configuration wants that."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        """ConfigError if the folder of priors cannot be made."""
        self._clock = clock
        self.store: PriorStore | None = None
        self.store = self.store_for(config)

    def store_for(self, config: Config) -> PriorStore | None:
        """Return where priors are stored under a configuration; None: nowhere. ConfigError if that cannot be made.

        A store that is open stays so: what has learned until now is still stored.
        """
        learns = any(isinstance(own.policy, GoodputPolicy) or own.switchback.share for own in config.all_servers)
        folder = config.prior.folder if learns else None
        return self.store or (PriorStore(folder) if folder is not None else None)

    def policy_for(self, hello: Hello, config: ServerConfig) -> Policy:
        """Return a new policy for a server, which begins with the stored prior if there is one."""
        return config.policy.build(self.store.load(hello) if self.store is not None else None)

    def save(self, session: Session) -> None:
        """Store what a session has learned; a policy that failed has learned who knows what."""
        session.saved_at = self._clock()
        if self.store is None or session.hello is None or session.failed:
            return
        try:
            prior = (session.shelved or session.policy).to_prior()
        except Exception:
            session.fail("telling what it learned")
            return
        if prior is not None:
            self.store.save(session.hello, prior)

    def load_switchback(self, server_key: str) -> Stored | None:
        """Return what the switchback of the server ``NAME/RANK`` had measured; None if there is nothing."""
        return self.store.load_switchback(server_key) if self.store is not None else None

    def save_switchback(self, server_key: str, stored: Stored) -> None:
        """Store what the switchback of the server ``NAME/RANK`` has measured."""
        if self.store is not None:
            self.store.save_switchback(server_key, stored)

    @property
    def error(self) -> str:
        """Why the newest prior could not be stored; empty while they can."""
        return self.store.error if self.store is not None else ""

    @property
    def failures(self) -> int:
        """Number of files that could not be written, or were there and could not be used."""
        return self.store.failures if self.store is not None else 0
