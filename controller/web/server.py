"""A thread that serves the page, so that whatever it does the controller's loop goes on.

What is wrong in the configuration refuses the start. What is wrong around it, a port that is taken, does not:
it is logged, shown by ``specpilot status``, and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specpilot.controller.config import WebConfig, is_loopback
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.snapshot import Board
from specpilot.controller.web.app import make_app

logger = logging.getLogger(__name__)

CONNECTIONS = 128
"""Connections at a time; further ones are closed at once, so that they cannot take all file descriptors."""
IDLE_SECONDS = 10.0
RETRY_SECONDS = 10.0
STOP_SECONDS = 2.0
TOKEN_CHARACTERS = 16


class _BoundedProtocol(H11Protocol):
    """uvicorn's, with a bound on connections and on how long one may say nothing at all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)


class Page:
    """The page of one controller."""

    def __init__(self, config: WebConfig) -> None:
        """Read the token; ConfigError if that cannot be done."""
        self._config = config
        self._token = _read_token(Path(config.token_file)) if config.listen and config.token_file else ""
        self._stopping = threading.Event()
        self._server: uvicorn.Server | None = None

    @contextmanager
    def served(self, board: Board) -> Iterator[None]:
        """Serve what ``board`` tells, as long as the context lasts."""
        if not self._config.listen:
            yield
            return
        thread = threading.Thread(target=self._run, args=(board,), name="specpilot-web", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            if self._server is not None:
                self._server.should_exit = self._server.force_exit = True
            thread.join(STOP_SECONDS)

    def _run(self, board: Board) -> None:
        told = ""
        while not self._stopping.is_set():
            try:
                self._serve(board)
            except OSError as error:
                board.page = (
                    f"is not served: {self._config.listen} cannot be listened on ({error.strerror or error}); it is "
                    "tried again every 10 s: set web.listen to another port, or to '' for no page"
                )
            except Exception:
                logger.exception("the web page failed; it is started again")
                board.page = "is not served: it failed, see the controller's log"
            if board.page != told and not self._stopping.is_set():
                told = board.page
                logger.error("the web page %s", told)
            self._stopping.wait(RETRY_SECONDS)

    def _serve(self, board: Board) -> None:
        host, port = self._config.address
        bound = _bind(host, port)
        with bound:
            port = bound.getsockname()[1]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
            config = uvicorn.Config(
                make_app(board, self._token, check_host=is_loopback(host) and not self._token),
                http=_BoundedProtocol,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(IDLE_SECONDS),
            )
            self._server = uvicorn.Server(config)
            if self._stopping.is_set():
                return
            board.page = address
            logger.info("the web page is at %s", address)
            self._server.run([bound])


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(CONNECTIONS)
    except OSError:
        bound.close()
        raise
    return bound


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"web.token_file = {path} cannot be read: {reason}") from error
    if len(token) < TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"web.token_file = {path} must hold {TOKEN_CHARACTERS} characters or more on one line, without spaces: "
            "`openssl rand -hex 32` makes some"
        )
    return token
