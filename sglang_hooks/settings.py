"""Options of the plugin, read from the environment once, when a server process loads it.

``OPTIONS`` is the one table of them: the reader, the error texts and ``docs/options.md``
all follow it. A variable that begins with SPECPILOT_ and is not in it is an error, since a
misspelt option would otherwise be a silent default on a production server.

They must be equal on every rank of a server; the ranks compare them before the first decode.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specpilot.sglang_hooks.connection import EndpointError, KeyFiles, check_endpoint, check_keys_named


class SettingsError(ValueError):
    """A variable that cannot be used: the text names it, its value and what would be right."""


_KUBERNETES = re.compile(r"SPECPILOT_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")
"""What Kubernetes puts into every container beside a Service called specpilot."""


@dataclass(frozen=True)
class Option:
    """One environment variable: how its text is read, and what it means to an operator."""

    name: str
    default: str
    meaning: str
    read: Callable[[str], Any]


def _mode(text: str) -> str:
    if text not in ("control", "shadow"):
        raise ValueError("use 'control' or 'shadow'")
    return text


def _skip(text: str) -> str:
    if text not in ("decode", "verify"):
        raise ValueError("use 'decode' or 'verify'")
    return text


def _endpoint(text: str) -> str:
    if text:
        check_endpoint(text)
        if text.startswith("tcp://*"):
            raise ValueError("name the controller's address")
    return text


def _steps(text: str) -> int | None:
    return None if text == "" else _not_negative(text)


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("use a whole number that is not negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError("use a whole number above 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("use seconds, not negative")
    return value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("use 0 or 1")
    return text == "1"


def max_steps_by_batch(text: str) -> tuple[tuple[int, int], ...]:
    """Return (batch size, steps) pairs of text such as ``16:3,64:0``; ValueError says what is wrong with it."""
    if not text:
        return ()
    pairs: list[tuple[int, int]] = []
    for item in text.split(","):
        batch, colon, steps = item.partition(":")
        if not colon:
            raise ValueError("use batch:steps pairs such as 16:3,64:0")
        pairs.append((_positive(batch), _not_negative(steps)))
    if pairs != sorted(set(pairs)) or len({batch for batch, _ in pairs}) != len(pairs):
        raise ValueError("batch sizes must rise from pair to pair")
    return tuple(pairs)


OPTIONS = (
    Option(
        "SPECPILOT_ENDPOINT",
        "",
        "Socket of the controller, `ipc:///path` or `tcp://host:port`. Empty: the plugin is inert.",
        _endpoint,
    ),
    Option(
        "SPECPILOT_CLIENT_KEY",
        "",
        "File of this server's key pair, `NAME.key_secret`; for `tcp://`, and read on rank 0 only.",
        str,
    ),
    Option(
        "SPECPILOT_CONTROLLER_KEY",
        "",
        "File of the controller's public key, `controller.key`; for `tcp://`, and read on rank 0 only.",
        str,
    ),
    Option(
        "SPECPILOT_MODE",
        "control",
        "`control` applies the controller's tables; `shadow` decides and records, but applies the fallback.",
        _mode,
    ),
    Option(
        "SPECPILOT_FALLBACK",
        "",
        "Steps (K) before the first table, and when the last one is too old. Empty: `--speculative-num-steps`.",
        _steps,
    ),
    Option(
        "SPECPILOT_MAX_STEPS_BY_BATCH",
        "",
        "Upper bounds that no table can pass: `16:3,64:0` means at most 3 from batch size 16 on, 0 from 64 on.",
        max_steps_by_batch,
    ),
    Option(
        "SPECPILOT_SKIP",
        "decode",
        "What K=0 runs: `decode`, the target's ordinary decode step, where it can; `verify`, SGLang's own K=0.",
        _skip,
    ),
    Option(
        "SPECPILOT_SKIP_RING_MB",
        "512",
        "GPU memory, in MiB, for what the draft needs of skipped steps to catch up when speculation resumes.",
        _not_negative,
    ),
    Option(
        "SPECPILOT_STALE_SECONDS",
        "600",
        "How long the last table stays in force, without exploration, after its lease ran out.",
        _seconds,
    ),
    Option(
        "SPECPILOT_SERVER_ID",
        "",
        "Name of this server, the same after a restart. Empty: host name and port.",
        str,
    ),
    Option(
        "SPECPILOT_QUEUE_RECORDS",
        "8192",
        "Step records kept while the controller does not read; more are dropped and counted.",
        _positive,
    ),
    Option(
        "SPECPILOT_MIN_TABLE_INTERVAL_SECONDS",
        "0.5",
        "Mean time between two changes of the table; up to 8 may come on credit, beyond only the newest waits.",
        _seconds,
    ),
    Option(
        "SPECPILOT_CHECK_STEPS",
        "1024",
        "Forward passes between two comparisons of the ranks' decisions.",
        _positive,
    ),
    Option(
        "SPECPILOT_ALLOW_UNTESTED",
        "0",
        "`1` starts on an SGLang version that this release was not tested with.",
        _flag,
    ),
)


@dataclass(frozen=True)
class Settings:
    """The options as values; seconds, steps and records as their names say."""

    endpoint: str = ""
    client_key: str = ""
    controller_key: str = ""
    mode: str = "control"
    fallback: int | None = None
    max_steps_by_batch: tuple[tuple[int, int], ...] = ()
    skip: str = "decode"
    skip_ring_mb: int = 512
    stale_seconds: float = 600.0
    server_id: str = ""
    queue_records: int = 8192
    min_table_interval_seconds: float = 0.5
    check_steps: int = 1024
    allow_untested: bool = False

    @property
    def key_files(self) -> KeyFiles:
        """Paths of the keys for ``tcp://``."""
        return KeyFiles(self.client_key, self.controller_key)

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Settings:
        """Read every option; raise SettingsError naming the variable that is wrong or unknown.

        >>> Settings.from_environment({"SPECPILOT_MAX_STEPS_BY_BATCH": "16:3,64:0"}).max_steps_by_batch
        ((16, 3), (64, 0))
        """
        known = {option.name for option in OPTIONS}
        for name in environment:
            if name.startswith("SPECPILOT_") and name not in known and not _KUBERNETES.fullmatch(name):
                raise SettingsError(f"{name} is not an option of specpilot; known are {', '.join(sorted(known))}")
        values = {}
        for option in OPTIONS:
            text = environment.get(option.name, option.default).strip()
            try:
                values[option.name.removeprefix("SPECPILOT_").lower()] = option.read(text)
            except ValueError as error:
                raise SettingsError(f"{option.name}={text!r} cannot be used: {error}") from error
        settings = Settings(**values)
        try:
            check_keys_named(settings.endpoint, settings.key_files)
        except EndpointError as error:
            raise SettingsError(f"SPECPILOT_ENDPOINT={settings.endpoint!r} cannot be used: {error}") from error
        return settings

    def decision_hash(self) -> int:
        """Hash of what the ranks' decisions depend on (equal on all ranks, 32 bits)."""
        text = repr((self.mode, self.fallback, self.max_steps_by_batch, self.skip, self.skip_ring_mb))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
