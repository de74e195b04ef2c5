"""How a client gets to the controller's socket, and why it does not: for the link and ``specpilot status``.

    ipc:///path        a folder that nobody else can write into is what keeps others out
    tcp://host:port    CURVE (https://rfc.zeromq.org/spec/26): both ends prove a key, all is encrypted

Key files are ZeroMQ certificates, as ``specpilot keygen`` and pyzmq's ``zmq.auth`` write them.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%a-z]+\]|[0-9A-Za-z_.-]+):(\d{1,5})")
MAX_PATH_BYTES = 107
MAX_KEY_BYTES = 1 << 14
KEEPALIVE_SECONDS = 2
"""Over tcp: a peer behind a cut line is given up after three of these, not after TCP's quarter of an hour."""
HANDSHAKE_SECONDS = 5.0
"""A peer that has not shown its key by then is disconnected; it holds a descriptor until then."""

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_MECHANISM = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class EndpointError(ValueError):
    """An endpoint, its folder or a key file that must not be used; the text says why and what to do."""


class KeyFiles(NamedTuple):
    """Paths of what a client needs over tcp; empty over ipc."""

    client: str = ""
    """Its own pair, ``NAME.key_secret``."""
    controller: str = ""
    """The controller's public key, ``controller.key``."""


def is_tcp(endpoint: str) -> bool:
    """Return whether ``endpoint`` needs keys."""
    return endpoint.startswith("tcp://")


def check_endpoint(endpoint: str) -> None:
    """Raise EndpointError unless ``endpoint`` is an ipc path or a tcp address with a port.

    >>> check_endpoint("ipc://@name")
    Traceback (most recent call last):
    specpilot.sglang_hooks.connection.EndpointError: use ipc:// and an absolute path, or tcp://host:port
    """
    if tcp := _TCP.fullmatch(endpoint):
        if not 0 < int(tcp[2]) < 1 << 16:
            raise EndpointError("the port must be 1 to 65535")
        return
    # An abstract socket (ipc://@name) has no owner and no mode: any user may bind or open it.
    if not re.fullmatch(r"ipc:///[^\0]*[^/\0]", endpoint, re.DOTALL):
        raise EndpointError("use ipc:// and an absolute path, or tcp://host:port")
    if len(os.fsencode(endpoint.removeprefix("ipc://"))) > MAX_PATH_BYTES:
        raise EndpointError(f"the path of a socket can hold {MAX_PATH_BYTES} bytes")


def check_keys_named(endpoint: str, keys: KeyFiles) -> None:
    """Raise EndpointError unless both key files are named for tcp, and none for ipc."""
    if is_tcp(endpoint) and not (keys.client and keys.controller):
        raise EndpointError(
            "tcp:// needs SPECPILOT_CLIENT_KEY and SPECPILOT_CONTROLLER_KEY: make the keys with `specpilot keygen`"
        )
    if not is_tcp(endpoint) and (keys.client or keys.controller):
        raise EndpointError("ipc:// uses no keys: unset SPECPILOT_CLIENT_KEY and SPECPILOT_CONTROLLER_KEY")


class Keys(NamedTuple):
    """What a client needs over tcp, Z85."""

    public: bytes
    secret: bytes
    controller: bytes


def read_keys(files: KeyFiles) -> Keys:
    """Return a client's keys; EndpointError says which file cannot be used and why."""
    return Keys(*read_key_pair(files.client), read_public_key(files.controller))


def socket_path(endpoint: str) -> Path:
    """Return the file of an ``ipc://`` endpoint."""
    return Path(endpoint.removeprefix("ipc://"))


def check_folder(folder: Path, any_owner: bool = False) -> None:
    """Raise EndpointError unless the folder of a socket is closed to other users; OSError if there is none.

    It belongs to this user or root, or, with ``any_owner``, to whoever it may be. A link on the way
    to it, such as /var/run, is followed if one of them made it.
    """
    link, found = folder.lstat(), folder.stat()
    if found.st_uid not in (os.getuid(), 0) and not any_owner:
        raise EndpointError(f"the socket's folder {folder} belongs to user {found.st_uid}: choose another endpoint")
    if link.st_uid not in (os.getuid(), 0, found.st_uid):
        raise EndpointError(f"the socket's folder {folder} is a link of user {link.st_uid}: choose another endpoint")
    if not stat.S_ISDIR(found.st_mode):
        raise EndpointError(f"the socket's folder {folder} is no folder: choose another endpoint")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise EndpointError(
            f"others may write into the socket's folder {folder}: chmod 700 it, or choose another endpoint"
        )


def read_public_key(path: str | Path) -> bytes:
    """Return the public key in a file (Z85, 40 bytes); EndpointError says why it cannot be used."""
    return _read_certificate(path, secret=False)[0]


def read_key_pair(path: str | Path) -> tuple[bytes, bytes]:
    """Return (public, secret) of a ``.key_secret`` file, Z85; EndpointError says why it cannot be used.

    Only its owner may read it; if that is root, its group may too (Kubernetes gives secrets that way).
    """
    public, secret = _read_certificate(path, secret=True)
    if secret is None:
        raise EndpointError(f"{path} holds no secret key: name the file that ends in .key_secret")
    try:
        matches = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        matches = False
    if not matches:
        raise EndpointError(f"{path}: its public and secret keys do not belong together")
    return public, secret


def _read_certificate(path: str | Path, secret: bool) -> tuple[bytes, bytes | None]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise EndpointError(f"key file {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        _check_key_file(path, os.fstat(file), secret)
        # By descriptor: what is read is what was checked.
        public, private = load_certificate(f"/dev/fd/{file}")
        for key in (public, private):
            if key is not None and (len(key) != 40 or len(z85.decode(key)) != 32):
                raise ValueError("a key has 40 characters")
    except EndpointError:
        raise
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise EndpointError(f"{path} is no key file of `specpilot keygen`") from error
    finally:
        os.close(file)
    return public, private


def _check_key_file(path: str | Path, found: os.stat_result, secret: bool) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_KEY_BYTES:
        raise EndpointError(f"{path} is no key file of `specpilot keygen`")
    if found.st_uid not in (os.getuid(), 0):
        raise EndpointError(f"key file {path} belongs to user {found.st_uid}: it must be yours, or root's")
    mode = stat.S_IMODE(found.st_mode)
    root_for_group = found.st_uid == 0 and os.getuid() != 0
    if secret and mode & (0o037 if root_for_group else 0o077):
        raise EndpointError(f"others may read key file {path} (mode {mode:04o}): chmod 600 it, and make new keys")
    if mode & 0o022:
        raise EndpointError(f"others may write key file {path} (mode {mode:04o}): chmod 600 it")


def secure(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Set what either end of a tcp connection wants, beside its keys."""
    if not is_tcp(endpoint):
        return
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
    # The kernel looks whether the peer is there. ZMTP's heartbeats would as well, but libzmq (4.3.5) aborts the process
    # where one falls due on a connection that ended before all it brought was read: after a flood, say.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
    socket.setsockopt(zmq.TCP_MAXRT, 3 * KEEPALIVE_SECONDS * 1000)  # the same for what was sent and not acknowledged


def connect(socket: zmq.Socket[bytes], endpoint: str, keys: KeyFiles) -> None:
    """Connect a client; EndpointError if the folder or a key is not to be trusted, OSError if there is no folder."""
    if is_tcp(endpoint):
        check_keys_named(endpoint, keys)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = read_keys(keys)
    else:
        # Root was told this path, and may be served by a controller of another user: what counts then is
        # that no third one can write there.
        check_folder(socket_path(endpoint).parent, any_owner=os.getuid() == 0)
    secure(socket, endpoint)
    socket.connect(endpoint)


class Failure(NamedTuple):
    """A handshake that failed, as libzmq reports it."""

    event: int
    value: int

    @property
    def final(self) -> bool:
        """Whether libzmq has given this connection up: only a new socket tries again."""
        return self.event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

    def seen_by_client(self, endpoint: str) -> str:
        """Return what it means at a client, and what to do."""
        if not is_tcp(endpoint):
            return "what listens there is no controller of specpilot"
        if self.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it refuses this client's key: put NAME.key of the pair into its controller.authorized_keys"
        if self.value == _MECHANISM:
            return "what listens there does not speak CURVE: it is no controller of specpilot"
        return (
            "the handshake fails: the controller key given (SPECPILOT_CONTROLLER_KEY) is another controller's, "
            "or what listens there is none"
        )

    def seen_by_controller(self) -> str:
        """Return what it means at the controller, and what to do."""
        if self.value == _CRYPTOGRAPHIC:
            return "a client holds another controller's public key: give it this one's controller.key"
        return "a client has no keys, or is none of specpilot"


class HandshakeMonitor:
    """Failed handshakes of one socket, and with ``ends`` the end of a connection; close it before the socket."""

    def __init__(self, socket: zmq.Socket[bytes], ends: bool = False) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_FAILURES | (zmq.EVENT_DISCONNECTED if ends else 0))
        self.ended = False
        """Whether a connection has ended, as far as ``failures`` has read."""

    def failures(self, limit: int = 1000) -> list[Failure]:
        """Return what was reported since the last call, at most ``limit``; never waits."""
        found: list[Failure] = []
        while len(found) < limit:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.ended = True
            else:
                found.append(Failure(event["event"], event["value"]))
        return found

    def close(self) -> None:
        """Stop watching."""
        self.failures()  # its queue is bounded and may be full: ending it would wait for room
        # Before its reader is closed: ZMQ's own thread would wait for one for ever.
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def __enter__(self) -> HandshakeMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
