"""Checks of the endpoint at which servers and controller meet: its folder, or its keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from specpilot.controller.config import Config, default_endpoint
from specpilot.controller.doctor.folders import existing, writable
from specpilot.controller.doctor.report import SOCKET, Check
from specpilot.controller.serve.keys import read_authorized
from specpilot.sglang_hooks.connection import (
    EndpointError,
    KeyFiles,
    check_endpoint,
    check_folder,
    check_keys_named,
    is_tcp,
    read_key_pair,
    read_keys,
    socket_path,
)


@dataclass(frozen=True)
class Address:
    """Where the controller is looked for, and with which keys."""

    endpoint: str
    keys: KeyFiles


def address(asked: str, keys: KeyFiles, environment: Mapping[str, str], config: Config | None) -> Address:
    """Return what ``specpilot status`` would ask, or else what the configuration file says."""
    own = config.controller.endpoint if config is not None else ""
    return Address(asked or environment.get("SPECPILOT_ENDPOINT") or own or default_endpoint(), keys)


def check_socket(at: Address, config: Config | None) -> Iterator[Check]:
    """Check the endpoint, its folder or its keys, and that server and controller mean the same one."""
    try:
        check_endpoint(at.endpoint)
    except EndpointError as error:
        yield SOCKET.problem(f"{at.endpoint}: {error}", "give such an endpoint to controller and servers")
        return
    own = config.controller.endpoint if config is not None else ""
    if own and not is_tcp(own) and own != at.endpoint and not _same(own, at.endpoint):
        yield SOCKET.warning(
            f"the configuration file has the controller at {own}, and servers look for it at {at.endpoint}",
            "give both the same endpoint (in containers: the same volume)",
        )
    if is_tcp(at.endpoint):
        yield from check_client_keys(at)
    else:
        yield check_socket_folder(socket_path(at.endpoint).parent)
    if config is not None and is_tcp(own):
        yield from check_controller_keys(config, at.keys)


def _same(one: str, other: str) -> bool:
    return not is_tcp(other) and socket_path(one).resolve() == socket_path(other).resolve()


def check_socket_folder(folder: Path) -> Check:
    """Check owner, mode and that a controller of this user could bind there."""
    change = f"chmod 700 {folder}, chown it to the controller's user, or choose another endpoint"
    try:
        check_folder(folder, any_owner=os.getuid() == 0)
    except FileNotFoundError:
        if writable(parent := existing(folder)):
            return SOCKET.ok(f"{folder} is not there yet; the controller makes it, with mode 0700")
        return SOCKET.problem(f"{folder} is not there, and this user may not make it in {parent}", change)
    except (EndpointError, OSError) as error:
        return SOCKET.problem(str(error), change)
    found = folder.stat()
    said = f"{folder} belongs to user {found.st_uid}, mode {found.st_mode & 0o7777:04o}"
    if not writable(folder):
        return SOCKET.problem(f"{said}: user {os.getuid()} may not write into it", change)
    return SOCKET.ok(said)


def check_client_keys(at: Address) -> Iterator[Check]:
    """Check what a server or ``specpilot status`` needs for ``tcp://``."""
    try:
        check_keys_named(at.endpoint, at.keys)
        read_keys(at.keys)
    except EndpointError as error:
        yield SOCKET.problem(str(error), "`specpilot keygen` makes the files and says what to set where")
        return
    yield SOCKET.ok(f"the keys for {at.endpoint} can be read, by this user alone")


def check_controller_keys(config: Config, client: KeyFiles) -> Iterator[Check]:
    """Check the controller's own keys, and that the client's is among those that may connect."""
    own = config.controller
    try:
        read_key_pair(own.key)
        allowed, faults = read_authorized(Path(own.authorized_keys))
    except EndpointError as error:
        yield SOCKET.problem(str(error), "`specpilot keygen` makes the files and says what to set where")
        return
    for fault in faults:
        yield SOCKET.problem(fault, "correct or delete that file: the controller does not start with it")
    if not allowed:
        yield SOCKET.warning(
            f"no key is in {own.authorized_keys}: nobody can connect", "add NAME.key of each client's pair"
        )
        return
    yield SOCKET.ok(f"may connect: {', '.join(sorted(allowed.values()))}")
    try:
        public = read_key_pair(client.client)[0] if client.client else None
    except EndpointError:
        return  # said where the client's keys are checked
    if public is not None and public not in allowed:
        yield SOCKET.problem(
            f"{client.client} is not among the keys that may connect",
            f"copy its public part into {own.authorized_keys}",
        )
