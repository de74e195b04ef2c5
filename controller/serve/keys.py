"""CURVE keys of the controller: making them (``specpilot keygen``), and who may connect.

    DIR/controller.key_secret   the controller's pair          DIR/controller.key   its public part, for clients
    DIR/NAME.key_secret         a client's pair                DIR/authorized/NAME.key   who may connect

The files are ZeroMQ certificates. Authentication is ZAP (https://rfc.zeromq.org/spec/27) with
pyzmq's own authenticator; what is added here is a folder that is read again while it runs, and
saying who was refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from rich.console import Console
from zmq.auth import create_certificates
from zmq.auth.thread import ThreadAuthenticator

from specpilot.controller.errors import ConfigError
from specpilot.sglang_hooks.connection import EndpointError, read_key_pair, read_public_key

logger = logging.getLogger(__name__)

DOMAIN = "specpilot"
REFUSED_NAMED = 256
"""Peers and causes that are named in the log at most; further ones are only counted."""

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,63}")


class Made(NamedTuple):
    """Files that ``make_keys`` wrote or found, absolute."""

    controller_pair: Path
    """File of the controller's key pair."""
    controller_public: Path
    """File of the controller's public key, for clients."""
    authorized: Path
    """Folder of the public keys that may connect."""
    client_pair: Path
    """File of the client's key pair."""


def make_keys(folder: Path, client: str = "client") -> Made:
    """Make a pair for ``client`` in ``folder``, and the controller's if there is none; all files of mode 0600.

    Raises ConfigError, and writes nothing, if the client's files are there already or the name is no file name.
    """
    if not _NAME.fullmatch(client) or client == "controller":
        raise ConfigError(f"--client {client!r}: use letters, digits and . _ - and not 'controller'")
    folder = folder.absolute()
    authorized = folder / "authorized"
    made = Made(
        folder / "controller.key_secret", folder / "controller.key", authorized, folder / f"{client}.key_secret"
    )
    try:
        for directory in (folder, authorized):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        client_public = authorized / f"{client}.key"
        taken = [path for path in (made.client_pair, client_public) if os.path.lexists(path)]
        if taken:
            raise ConfigError(f"{taken[0]} is there already and stays as it is: name another with --client")
        if not made.controller_pair.exists() and not os.path.lexists(made.controller_public):
            _make_pair(folder, "controller", made.controller_pair, made.controller_public)
        else:
            read_key_pair(made.controller_pair)
            read_public_key(made.controller_public)
        _make_pair(folder, client, made.client_pair, client_public)
    except EndpointError as error:
        raise ConfigError(f"{folder} holds another pair of the controller, which cannot be used: {error}") from error
    except OSError as error:
        raise ConfigError(f"keys cannot be made in {folder}: {error.strerror or error} ({error.filename})") from error
    return made


def _make_pair(folder: Path, name: str, pair: Path, public: Path) -> None:
    """Write both files in one step each; FileExistsError rather than replacing one."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".keygen-") as private:  # mode 0700
        new_public, new_pair = map(Path, create_certificates(private, name))
        for made, place in ((new_pair, pair), (new_public, public)):
            made.chmod(0o600)
            os.link(made, place)


def describe_keys(made: Made, client: str) -> str:
    """Return what an operator has to set where."""
    return f"""\
Controller, in its configuration file:

    [controller]
    endpoint = "tcp://*:5757"
    key = "{made.controller_pair}"
    authorized_keys = "{made.authorized}"

Server or operator {client!r}: copy these two files to its machine, readable by its user alone,
then delete the first one here:

    {made.client_pair}
    {made.controller_public}

and set there, with the address of the controller:

    SPECPILOT_ENDPOINT=tcp://ADDRESS:5757
    SPECPILOT_CLIENT_KEY={made.client_pair}
    SPECPILOT_CONTROLLER_KEY={made.controller_public}

A further client: specpilot keygen {made.client_pair.parent} --client NAME
To revoke a key: delete its file in {made.authorized}
"""


def read_authorized(folder: Path) -> tuple[dict[bytes, str], list[str]]:
    """Return the names of the keys in ``folder`` by key (Z85), and what is wrong with the other ``*.key`` files.

    Raises EndpointError if the folder cannot be read or others may write into it.
    """
    names: dict[bytes, str] = {}
    faults = []
    try:
        status = folder.stat()
        if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:
            raise EndpointError(f"others may write into {folder}, and so let themselves in: chmod 700 it")
        paths = sorted(folder.glob("*.key"))
    except (OSError, ValueError) as error:
        if isinstance(error, EndpointError):
            raise
        raise EndpointError(f"controller.authorized_keys = {str(folder)!r}: {error}") from error
    for path in paths:
        try:
            names[read_public_key(path)] = path.stem
        except EndpointError as error:
            faults.append(str(error))
    return names, faults


class Authenticator(ThreadAuthenticator):  # type: ignore[misc, unused-ignore]
    """Lets in clients whose key is in a folder; answers libzmq in a thread of its own.

    Thread-safety: ``allowed`` is replaced by one assignment, in the controller's thread, and read in
    this one. Without an answer from here nobody gets in: the socket sets ZAP_ENFORCE_DOMAIN.
    """

    def __init__(self, context: zmq.Context[Any], allowed: dict[bytes, str]) -> None:
        # What pyzmq logs itself names every key at every handshake.
        quiet = logging.getLogger(f"{__name__}.zap")
        quiet.setLevel(logging.ERROR)
        super().__init__(context, log=quiet)
        self.allowed = allowed
        self._lock = threading.Lock()
        self._refused: list[tuple[str, bytes]] = []
        self._address = ""
        self.configure_curve_callback(DOMAIN, self)

    def stop(self) -> None:
        """End the thread, or clear up behind one that has died."""
        if self.pipe is not None and not self.is_alive():
            self.pipe.close(linger=0)  # nobody is at its other end: telling it to end would wait for ever
            self.pipe = None  # type: ignore[assignment]
        super().stop()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer one request of libzmq."""
        self._address = msg[3].decode(errors="replace") if len(msg) > 3 else ""
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
        """Return whether the client with this public key (Z85) may connect."""
        if key in self.allowed:
            return True
        with self._lock:
            if len(self._refused) < REFUSED_NAMED:
                self._refused.append((self._address, key))
        return False

    def take_refused(self) -> list[tuple[str, bytes]]:
        """Return (address, key) of clients refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot keygen``."""
    command.add_argument("folder", type=Path, metavar="DIR", help="for the key files, new or of an earlier keygen")
    command.add_argument("--client", default="client", metavar="NAME", help="whose pair is made (default: client)")


def run(options: argparse.Namespace, console: Console) -> int:  # noqa: ARG001
    """Make the key files and say what to set where; return 0."""
    sys.stdout.write(describe_keys(make_keys(options.folder, options.client), options.client))
    return 0
