"""Checks of what was configured: SPECPILOT_ variables, the controller's file, the folders it names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from specpilot.controller.config import Config, GoodputPolicy, load_config
from specpilot.controller.doctor.folders import existing, writable
from specpilot.controller.doctor.installation import installed_sglang
from specpilot.controller.doctor.report import CONFIGURATION, STORAGE, Check
from specpilot.controller.errors import ConfigError
from specpilot.controller.web import Page
from specpilot.sglang_hooks.settings import Settings, SettingsError


def check_settings(environment: Mapping[str, str]) -> tuple[Settings | None, list[Check]]:
    """Return the SPECPILOT_ variables, None if they cannot be used, and what is wrong with them."""
    try:
        settings = Settings.from_environment(environment)
    except SettingsError as error:
        return None, [CONFIGURATION.problem(str(error), "correct or unset it: a server with it refuses to start")]
    given = sorted(name for name in environment if name.startswith("SPECPILOT_"))
    found = [
        CONFIGURATION.ok(f"variables can be used: {', '.join(given)}" if given else "no SPECPILOT_ variable is set")
    ]
    if not settings.endpoint and installed_sglang() is not None:
        found.append(
            CONFIGURATION.warning(
                "SPECPILOT_ENDPOINT is not set: the plugin does nothing in a server that is started from here",
                "set it to the controller's endpoint, or start the server with `specpilot launch`",
            )
        )
    if settings.mode == "shadow":
        found.append(
            CONFIGURATION.warning(
                "SPECPILOT_MODE=shadow: tables are recorded, and the fallback is applied", "unset it to steer"
            )
        )
    return settings, found


def check_configuration(file: Path | None) -> tuple[Config | None, list[Check]]:
    """Return the controller's configuration, None if it cannot be used, and what is wrong with it."""
    try:
        config = load_config(file)
        for server in config.all_servers:
            server.policy.build(None)
        Page(config.web)
    except ConfigError as error:
        return None, [CONFIGURATION.problem(str(error), "correct the file: the controller does not start with it")]
    policy = type(config.policy).__struct_config__.tag
    name = str(file) if file is not None else "no --config, all defaults"
    return config, [CONFIGURATION.ok(f"{name}: policy {policy}, mode {config.mode}")]


# -- disk --


def check_storage(config: Config) -> Iterator[Check]:
    """Check the folders of trace and prior as this user sees them from here."""
    learns = any(isinstance(server.policy, GoodputPolicy) or server.switchback.share for server in config.all_servers)
    try:
        trace, prior = config.trace.folder, config.prior.folder if learns else None
    except ConfigError as error:
        yield STORAGE.problem(str(error), "set trace.directory and prior.directory, or XDG_STATE_HOME")
        return
    if trace is not None:
        yield from check_written_folder("trace.directory", trace)
        yield from check_room(trace, config.trace.total_bytes)
    else:
        yield STORAGE.warning(
            "no trace is written (trace.directory is empty)", "name a folder: `fit`, `evaluate` and `replay` read it"
        )
    if prior is not None:
        yield from check_written_folder("prior.directory", prior)
    elif learns:
        yield STORAGE.warning(
            "what is learned is not kept (prior.directory is empty)",
            "name a folder, or each start learns from the beginning",
        )


def check_written_folder(key: str, folder: Path) -> Iterator[Check]:
    """Check that a folder can be written into, or made."""
    whole = folder.absolute()
    place = existing(whole)
    if not place.is_dir():
        yield STORAGE.problem(f"{key}: {place} is no folder", f"name another {key}")
    elif not writable(place):
        yield STORAGE.problem(
            f"{key} {whole}: user {os.getuid()} may not write into {place}", f"chown {place}, or name another {key}"
        )
    else:
        yield STORAGE.ok(f"{key} {whole} " + ("can be written into" if place == whole else f"can be made in {place}"))


def check_room(folder: Path, total_bytes: int) -> Iterator[Check]:
    """Check that the trace can grow to its bound."""
    place = existing(folder.absolute())
    try:
        free = shutil.disk_usage(place).free
        used = sum(file.stat().st_size for file in place.rglob("*.arrows")) if place == folder.absolute() else 0
    except OSError as error:
        yield STORAGE.not_checked(f"free room in {place}: {error.strerror}")
        return
    said = (
        f"{free / 1e9:.1f} GB are free in {place}; the trace has {used / 1e9:.1f} of at most {total_bytes / 1e9:.1f} GB"
    )
    if free + used < total_bytes:
        yield STORAGE.warning(said, "lower trace.total_bytes, or name a folder on another disk")
    else:
        yield STORAGE.ok(said)
