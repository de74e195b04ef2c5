"""Paths of the page, who may read them, and the headers that keep a browser from doing anything else.

    /            the page              /api/view?server=NAME   what it shows, as JSON, at least twice a second
    /metrics     for Prometheus        /api/hour?server=NAME   the last hour by ten seconds
    /healthz     does the loop turn?   /api/status             the report of ``specpilot status --json``

Without a token only this machine is served, by the names that mean it: a web site that makes its own name
point here (DNS rebinding) sends that name. With a token there is a cookie after the first use, which such
a site does not get.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from importlib.resources import files
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specpilot.controller.config import is_loopback
from specpilot.controller.serve.snapshot import Board, Snapshot
from specpilot.controller.web.metrics import exposition
from specpilot.controller.web.view import hour_view, page_view

ANSWER_SECONDS = 2.0
"""Seconds in which the loop, which turns ten times a second, must answer; else it is stuck."""
COOKIE = "specpilot"
FORM_BYTES = 4096
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)
_STATIC = files("specpilot.controller.web") / "static"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:\d+)?")


def make_app(board: Board, token: str = "", check_host: bool = True) -> Starlette:
    """Return the application; ``token`` is asked of every reader unless it is empty."""
    guard = Middleware(_Guard, token=token, check_host=check_host)
    reader = _Reader(board)
    routes = [
        Route("/", reader.page),
        Route("/api/view", reader.view),
        Route("/api/hour", reader.hour),
        Route("/api/status", reader.status),
        Route("/metrics", reader.metrics),
        Route("/healthz", reader.healthz),
        Route("/login", _Login(token).post, methods=["POST"]),
        Mount("/static", StaticFiles(packages=[("specpilot.controller.web", "static")])),
    ]
    return Starlette(routes=routes, middleware=[guard], exception_handlers={TimeoutError: _stuck})


class _Reader:
    """Answers from the newest snapshot; a view that many ask for is made once."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._views: dict[str, bytes] = {}
        self._of: Snapshot | None = None
        self._page = (_STATIC / "index.html").read_bytes()

    async def _snapshot(self) -> Snapshot:
        return await asyncio.wait_for(asyncio.wrap_future(self._board.ask()), ANSWER_SECONDS)

    async def page(self, _: Request) -> Response:
        return HTMLResponse(self._page)

    async def view(self, request: Request) -> Response:
        snapshot = await self._snapshot()
        if snapshot is not self._of:
            self._of = snapshot
            self._views.clear()
        name = request.query_params.get("server", "")
        name = name if name in snapshot.servers else next(iter(snapshot.servers), "")
        if name not in self._views:
            self._views[name] = msgspec.json.encode(page_view(snapshot, name))
        return _json(self._views[name])

    async def hour(self, request: Request) -> Response:
        snapshot = await self._snapshot()
        server = snapshot.servers.get(request.query_params.get("server", ""))
        if server is None:
            return PlainTextResponse("no such server\n", 404)
        return _json(msgspec.json.encode(hour_view(snapshot.at, server)))

    async def status(self, _: Request) -> Response:
        return _json(msgspec.json.encode((await self._snapshot()).status))

    async def metrics(self, request: Request) -> Response:
        body, content_type = exposition(await self._snapshot(), request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def healthz(self, _: Request) -> Response:
        await self._snapshot()
        return PlainTextResponse("ok\n")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _stuck(_: Request, __: Exception) -> Response:
    return PlainTextResponse(f"the controller's loop has not turned for {ANSWER_SECONDS:g} s\n", 503)


class _Guard:
    """Refuses who may not read, and adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, token: str, check_host: bool) -> None:
        self._app = app
        self._token = token
        self._check_host = check_host
        self._login = (_STATIC / "login.html").read_text()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        refusal = self._refusal(HTTPConnection(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        host = _HOST.fullmatch(request.headers.get("host", ""))
        if self._check_host and (host is None or not is_loopback(host[1].strip("[]"))):
            return PlainTextResponse(
                "specpilot serves this machine alone, by the names 127.0.0.1, [::1] and localhost: "
                "for other names set web.token_file\n",
                403,
            )
        path = request.scope["path"]
        if not self._token or path in ("/healthz", "/login") or path.startswith("/static/") or self._known(request):
            return None
        if path == "/":
            return HTMLResponse(self._login.replace("{wrong}", ""), 401)
        return PlainTextResponse(
            "a token is needed: Authorization: Bearer TOKEN, that of web.token_file\n",
            401,
            {"www-authenticate": "Bearer"},
        )

    def _known(self, request: HTTPConnection) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return True
        return _same(request.cookies.get(COOKIE, ""), cookie_value(self._token))


class _Login:
    def __init__(self, token: str) -> None:
        self._token = token
        self._page = (_STATIC / "login.html").read_text()

    async def post(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > FORM_BYTES:
                return PlainTextResponse("too long\n", 413)
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0]
        if not self._token or not _same(given.strip(), self._token):
            wrong = '<p class="wrong" role="alert">That is not the token.</p>'
            return HTMLResponse(self._page.replace("{wrong}", wrong), 401)
        response = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, cookie_value(self._token), httponly=True, samesite="strict", secure=secure)
        return response


def cookie_value(token: str) -> str:
    """Return what a browser keeps: it ends with the token, and does not tell it."""
    return hmac.new(token.encode(), b"specpilot page", hashlib.sha256).hexdigest()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
