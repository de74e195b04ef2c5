"""The page: who may read it, what it says, and that nothing that happens to it reaches the controller's loop."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from specpilot.controller.client.status import fetch_status
from specpilot.controller.config import Config, ControllerConfig, PriorConfig, TraceConfig, WebConfig, load_config
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.service import Service
from specpilot.controller.serve.snapshot import Board, Snapshot
from specpilot.controller.web import Page, server
from specpilot.controller.web.app import COOKIE, cookie_value, make_app
from specpilot.controller.web.metrics import names
from specpilot.controller.web.view import HourView, PageView, ServerView, hour_view, page_view
from specpilot.policies.threshold import Threshold
from specpilot.sglang_hooks.wire import DecisionTable
from tests.support.messages import hello
from tests.support.ports import own_port
from tests.support.snapshots import snapshot, status
from tests.support.waiting import PATIENCE, until
from tests.support.web_rig import GOODPUT, Rig, running

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
TOKEN = "a-token-of-32-characters-or-more!"


@pytest.fixture(scope="module")
def known() -> Snapshot:
    return snapshot(servers=2)


@pytest.fixture
def board(known: Snapshot) -> Iterator[Board]:
    """A board with a loop behind it."""
    board = Board()
    stopping = threading.Event()

    def loop() -> None:
        while not stopping.wait(0.005):
            board.answer(lambda: known)

    thread = threading.Thread(target=loop)
    thread.start()
    yield board
    stopping.set()
    thread.join()
    board.close()


def client(board: Board, token: str = "", check_host: bool = True, host: str = "127.0.0.1:7411") -> TestClient:
    return TestClient(make_app(board, token, check_host), base_url=f"http://{host}", follow_redirects=False)


# -- what a board promises --


def test_one_snapshot_answers_all_who_ask(known: Snapshot) -> None:
    board = Board()
    made = []

    def make() -> Snapshot:
        made.append(1)
        return known

    board.answer(make)
    assert not made, "nobody has asked"
    asked = [board.ask() for _ in range(50)]
    assert not asked[0].cancel(), "who gives up takes nothing from the others"
    board.answer(make)
    assert not wait(asked, PATIENCE).not_done
    assert board.ask().result(0) is known
    assert len(made) == 1
    board.close()
    Board.ask(board)  # after the loop's end: no answer, and no error


def test_an_error_in_the_telling_is_not_the_loops(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    asked = board.ask()
    board.answer(lambda: [][0])
    with pytest.raises(IndexError):
        asked.result(0)
    assert "it goes on deciding" in caplog.text
    board.close()


# -- who may read --


def test_every_path_answers_with_headers_that_forbid_the_rest(board: Board) -> None:
    page = client(board)
    for path in ("/", "/api/view", "/api/status", "/metrics", "/healthz", "/static/page.js", "/nothing"):
        answer = page.get(path)
        assert answer.status_code == (404 if path == "/nothing" else 200), path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_inline() -> None:
    static = Path(server.__file__).parent / "static"
    pages = list(static.glob("*.html"))
    assert len(pages) == 2
    for path in static.iterdir():
        addresses = re.findall(r"\w+://[^\"' ]+", path.read_text())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path
    for path in pages:
        text = path.read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text), path


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7411", "127.0.0.1.evil.example", "", "[::1", "10.0.0.7:7411"]
)
def test_a_name_that_does_not_mean_this_machine_is_refused(board: Board, host: str) -> None:
    answer = client(board).get("/api/view", headers={"host": host})
    assert answer.status_code == 403
    assert "web.token_file" in answer.text


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:7411", "LOCALHOST:7411".lower(), "[::1]:7411", "127.8.8.8:80"]
)
def test_names_of_this_machine_are_served_on_any_port(board: Board, host: str) -> None:
    """Any port: what an SSH tunnel listens on."""
    assert client(board).get("/api/view", headers={"host": host}).status_code == 200


def test_with_a_token_nothing_is_told_without_it(board: Board) -> None:
    page = client(board, TOKEN, check_host=False, host="gpu.example:7411")
    for path in ("/api/view", "/api/hour", "/api/status", "/metrics"):
        for headers in (
            {},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": TOKEN},
            {"cookie": f"{COOKIE}={TOKEN}"},
        ):
            answer = page.get(path, headers=headers)
            assert answer.status_code == 401
            assert "target-8b" not in answer.text
        assert page.get(path + "?server=node:30000/0", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    assert page.get("/healthz").status_code == 200
    assert page.get("/").status_code == 401
    assert "<form" in page.get("/").text


def test_the_token_is_given_once_and_is_not_in_the_cookie(board: Board) -> None:
    page = client(board, TOKEN, check_host=False, host="gpu.example")
    wrong = page.post("/login", data={"token": "wrong"})
    assert wrong.status_code == 401
    assert "not the token" in wrong.text
    assert page.post("/login", content=b"x" * 10_000).status_code == 413
    right = page.post("/login", data={"token": TOKEN})
    assert (right.status_code, right.headers["location"]) == (303, "/")
    cookie = right.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert page.get("/api/view").status_code == 200, "the cookie is enough from here on"
    other = client(board, TOKEN + "2", check_host=False)
    assert other.get("/api/view", headers={"cookie": f"{COOKIE}={cookie_value(TOKEN)}"}).status_code == 401


def test_no_token_no_login(board: Board) -> None:
    assert client(board).post("/login", data={"token": ""}).status_code == 401


@pytest.mark.parametrize("listen", ["0.0.0.0:7411", "[::]:7411", "10.0.0.7:7411", "gpu.example:80"])
def test_an_open_address_needs_a_token(tmp_path: Path, listen: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[web]\nlisten = "{listen}"\n')
    with pytest.raises(ConfigError, match=r"c\.toml: .*needs a token.*openssl rand.*web\.token_file"):
        load_config(path)
    path.write_text(f'[web]\nlisten = "{listen}"\ntoken_file = "{tmp_path}/token"\n')
    config = load_config(path).web
    with pytest.raises(ConfigError, match=r"token cannot be read: No such file"):
        Page(config)
    for short in ("", "short", "two words of enough length", "line\nand another line of it"):
        (tmp_path / "token").write_text(short)
        with pytest.raises(ConfigError, match="16 characters or more"):
            Page(config)
    (tmp_path / "token").write_text(TOKEN + "\n")
    Page(config)


@pytest.mark.parametrize("listen", ["7411", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", ":7411"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r"use HOST:PORT"):
        WebConfig(listen=listen)


# -- what it says --


def chosen(view: PageView) -> ServerView:
    assert view.server is not None
    return view.server


def test_the_view_explains_8_and_64(known: Snapshot) -> None:
    view = chosen(page_view(known, "node:30001/0"))
    assert view.name == "node:30001/0"
    assert len(view.cells) == len(view.batches) * len(view.contexts) == len(view.batch_sizes) * len(view.contexts)
    for batch, wanted in (("8", 3), ("61-64", 0)):
        cell = view.cells[view.batches.index(batch) * len(view.contexts)]
        assert cell.steps == wanted
        assert cell.why.startswith(f"K={wanted} is expected to make ")
        rates = {option.steps: option.tokens_per_second for option in cell.options}
        assert max(rates, key=rates.__getitem__) == wanted
        for option in cell.options:
            size = view.batch_sizes[view.batches.index(batch)]
            assert option.tokens_per_second == pytest.approx(size * option.tokens[0] / option.seconds[0], rel=2e-3)
    assert view.cells[view.busiest].visits > 0
    assert view.problems == []


def test_views_are_json_and_small(known: Snapshot) -> None:
    body = msgspec.json.encode(page_view(known, "node:30000/0"))
    assert len(body) < 100_000
    assert msgspec.json.decode(body, type=PageView) == page_view(known, "node:30000/0")
    hour = hour_view(known.at, known.servers["node:30000/0"])
    assert msgspec.json.decode(msgspec.json.encode(hour), type=HourView) == hour
    assert sum(sum(steps.values()) for steps in hour.steps) == 4000


def test_a_policy_that_does_not_tell_is_shown_by_its_table() -> None:
    plan = Threshold(8, 3).decide(hello(candidate_steps=[0, 1, 3]), 0.0)
    one = snapshot()
    (name,) = one.servers
    told = status(table=plan.table(3, 5.0, "threshold"), reason=plan.reason, server=name)
    silent = Snapshot(one.at, one.status, {name: untold(one, name, told)})
    view = chosen(page_view(silent, name))
    assert [cell.steps for cell in view.cells] == list(plan.choice)
    assert view.cells[0].why == f"Policy threshold: {plan.reason}."
    assert view.positions == []
    assert view.gain is None


def untold(one: Snapshot, name: str, told: Any) -> Any:
    return dataclasses.replace(one.servers[name], status=told, knowledge=None)


def test_no_table_is_the_fallback() -> None:
    one = snapshot(table=None, source="FALLBACK", steps=3)
    (name,) = one.servers
    view = chosen(page_view(one, name))
    assert "fallback" in view.problems[0].text
    bare = Snapshot(one.at, one.status, {name: untold(one, name, one.servers[name].status)})
    assert [cell.steps for cell in chosen(page_view(bare, name)).cells] == [3]


def test_a_table_that_differs_from_the_choice_is_said() -> None:
    """As under a veto: the table is what runs."""
    one = snapshot()
    (name,) = one.servers
    table = one.servers[name].status.table
    assert isinstance(table, DecisionTable)
    capped = msgspec.structs.replace(table, choice=[0] * len(table.choice))
    told = msgspec.structs.replace(one.servers[name].status, table=capped, reason="at most K=0: maintenance")
    vetoed = Snapshot(one.at, one.status, {name: dataclasses.replace(one.servers[name], status=told)})
    view = chosen(page_view(vetoed, name))
    cell = view.cells[view.batches.index("8") * len(view.contexts)]
    assert cell.steps == 0
    assert "But the table has K=0: at most K=0: maintenance." in cell.why


def test_every_trouble_is_in_the_health() -> None:
    one = snapshot(
        source="HALTED", silent_seconds=99.0, note="drafter broken: …", records_lost=7, mode="shadow", pending_epoch=9,
        tp_size=2, counters={"tables_received": 3, "records_dropped": 5, "lease_expiries": 0},
    )  # fmt: skip
    view = page_view(one, next(iter(one.servers)))
    texts = [problem.text for problem in chosen(view).problems]
    for part in (
        "Halted",
        "Silent for 99",
        "drafter broken",
        "7 step records",
        "Shadow",
        "Table 9",
        "1 of 2 ranks",
        "records_dropped 5",
    ):
        assert any(part in text for text in texts), part
    assert not any("tables_received" in text or "lease_expiries" in text for text in texts)
    assert [problem.severity for problem in chosen(view).problems] == sorted(
        (problem.severity for problem in chosen(view).problems), key=("bad", "warn", "info").index
    )
    assert view.servers[0].severity == "bad"


def test_paths_answer(board: Board, known: Snapshot) -> None:
    page = client(board)
    assert page.get("/api/status").json() == json.loads(msgspec.json.encode(known.status))
    assert page.get("/api/view?server=nobody").json()["server"]["name"] == "node:30000/0"
    assert page.get("/api/hour?server=nobody").status_code == 404
    text = page.get("/metrics").text
    assert all(name in text for name in names())
    openmetrics = page.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_a_loop_that_hangs_is_told_and_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpilot.controller.web.app.ANSWER_SECONDS", 0.1)
    board = Board()
    answer = client(board).get("/healthz")
    assert answer.status_code == 503
    assert "has not turned" in answer.text
    board.close()


# -- beside the loop --


def service(tmp_path: Path) -> Service:
    endpoint = f"ipc://{tmp_path}/c.ipc"
    return Service(Config(controller=ControllerConfig(endpoint), trace=TraceConfig(""), prior=PriorConfig("")))


def test_a_port_that_is_taken_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RETRY_SECONDS", 0.05)
    one = service(tmp_path)
    running = threading.Thread(target=one.run)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", own_port()))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        stack = ExitStack()
        stack.enter_context(Page(WebConfig(listen=listen)).served(one.board))
        running.start()
        until(lambda: "cannot be listened on" in fetch_status(one.endpoint).page)
    until(lambda: fetch_status(one.endpoint).page == f"http://{listen}/")
    stack.close()
    one.stop()
    running.join(PATIENCE)
    assert not running.is_alive()


def test_a_page_that_fails_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RETRY_SECONDS", 0.05)
    failures = [RuntimeError("made up")]
    real = server.make_app

    def make(*given: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*given, **named)

    monkeypatch.setattr(server, "make_app", make)
    one = service(tmp_path)
    running = threading.Thread(target=one.run)
    with Page(WebConfig(listen="127.0.0.1:0")).served(one.board):
        running.start()
        until(lambda: fetch_status(one.endpoint).page.startswith("http://"))
    one.stop()
    running.join(PATIENCE)
    assert not running.is_alive()


def test_no_page_is_no_thread(tmp_path: Path) -> None:
    one = service(tmp_path)
    before = threading.active_count()
    with Page(WebConfig(listen="")).served(one.board):
        assert threading.active_count() == before
    one.stop()
    one.run()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("web")
    folder.chmod(0o700)
    with running(folder, ("gpu-a:30000", "gpu-b:30000"), seconds=600.0) as one:
        yield one


def test_clients_that_stall_do_not_hold_the_loop(rig: Rig) -> None:
    """Two hundred that ask for much and read nothing, and half of them not even ask."""
    host, port = rig.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for number in range(200):
            stalled = stack.enter_context(socket.socket())
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.settimeout(PATIENCE)
            stalled.connect((host, int(port)))
            if number % 2:
                try:
                    stalled.sendall(b"GET /api/view HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50)
                except OSError:
                    continue  # one too many: closed at once
        before = {one.server: one.records for one in rig.status().servers}
        for _ in range(20):
            rig.status()  # the loop answers as ever: those who hold it would hold it for good
        until(lambda: all(one.records > before[one.server] + 20 for one in rig.status().servers))
        after = rig.status()
        assert all(one.source == "TABLE" and one.counters["lease_expiries"] == 0 for one in after.servers)
        descriptors = len(list(Path(f"/proc/{rig.controller.pid}/fd").iterdir()))
        assert descriptors < server.CONNECTIONS + 60


# -- in a browser --


@pytest.fixture
def open_page(chromium: Any, rig: Rig) -> Iterator[Any]:
    """Open the page; whatever it logs as an error fails the test."""
    errors: list[str] = []
    contexts = []

    def factory(width: int = 1280, height: int = 900, scheme: str = "light", url: str = "", clock: bool = False) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(rig.url) else errors.append(request.url))
        if clock:
            page.clock.install()
        page.goto(url or f"{rig.url}/")
        page.wait_for_selector("[data-cell]")
        return page

    yield factory
    for context in contexts:
        context.close()
    assert errors == []


def updates(page: Any) -> int:
    """How often the page has shown what the controller told it."""
    return int(page.evaluate("Number(document.documentElement.dataset.updates)"))


def test_the_map_appears_and_the_keyboard_explains_it(open_page: Any) -> None:
    page = open_page()
    assert page.locator("[data-cell]").count() == 28 * 3
    assert page.locator('[data-cell][tabindex="0"]').count() == 1, "one stop for the tab key"
    page.locator('[data-cell][aria-label^="batch 8, 0"]').focus()
    title, why = page.locator("#why-title"), page.locator("#why-text")
    assert f"at batch 8, 0{DASH}1k tokens" in title.inner_text()
    assert "is expected to make" in why.inner_text()
    assert page.locator("#why-table tbody tr").count() == 3
    tokens, seconds, rate = (page.locator("#why-table tr.chosen td").nth(n).inner_text().split()[0] for n in (1, 2, 3))
    assert float(rate.replace(",", "")) == pytest.approx(8 * float(tokens) / float(seconds) * 1e3, rel=0.02)
    page.keyboard.press("ArrowRight")
    assert f"at batch 9{DASH}10" in title.inner_text()
    page.keyboard.press("ArrowDown")
    assert f"1k{DASH}4k tokens" in title.inner_text()
    page.keyboard.press("Home")
    assert "at batch 1," in title.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "at batch 1," in title.inner_text(), "no way over the edge"
    page.keyboard.press("End")
    assert "at batch 65+" in title.inner_text()
    page.keyboard.press("ArrowLeft")
    assert f"at batch 61{DASH}64" in title.inner_text()
    focused = page.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert focused == "why-text", "a screen reader reads the reason with the cell"
    seen = updates(page)
    until(lambda: updates(page) >= seen + 3)
    assert f"at batch 61{DASH}64" in title.inner_text(), "the focus and the choice outlast updates"
    assert page.evaluate("document.activeElement.dataset.cell") is not None


def test_it_follows_the_load_until_told_otherwise(open_page: Any) -> None:
    page = open_page()
    follow = page.locator("#follow")
    assert follow.get_attribute("aria-pressed") == "true"
    page.locator("[data-cell]").first.click()
    assert follow.get_attribute("aria-pressed") == "false"
    follow.click()
    assert follow.get_attribute("aria-pressed") == "true"
    assert page.locator('[data-cell][aria-pressed="true"].now').count() == 1


def test_it_updates_twice_a_second(open_page: Any, rig: Rig) -> None:
    page = open_page(clock=True)
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    before, records = updates(page), rig.status().servers[0].records
    for count in range(1, 11):
        page.clock.run_for(500)  # the page's time; the answer takes what it takes
        until(lambda count=count: updates(page) >= before + count)
    assert updates(page) <= before + 20, "and no more often than needed"
    page.clock.resume()
    until(lambda: rig.status().servers[0].records > records)
    page.wait_for_selector("#hour-chart rect")
    assert page.locator("#link").inner_text() == "live"
    assert page.locator("#tokens-now").inner_text() != "0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(open_page: Any, scheme: str) -> None:
    page = open_page(scheme=scheme)
    page.wait_for_selector("#gain-chart svg")
    contrasts = page.evaluate(
        """() => {
          const linear = (s) => s <= .04045 ? s / 12.92 : ((s + .055) / 1.055) ** 2.4;
          const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((v) => linear(v / 255));
            return .2126 * r + .7152 * g + .0722 * b; };
          const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
            if (c.startsWith("rgb(")) return c; } return "rgb(255,255,255)"; };
          return [...document.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,small,li,[data-cell]:not(.predicted),.chip")]
            .filter((e) => e.offsetParent && e.textContent.trim())
            .map((e) => { const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
              return [(a + .05) / (b + .05), e.tagName + "#" + e.id + " " + e.textContent.trim().slice(0, 30)]; });
        }"""
    )
    assert len(contrasts) > 100
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    body = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, body[4:-1].split(","))) > 380) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 375, 768])
def test_no_sideways_scrolling_on_a_phone(open_page: Any, width: int) -> None:
    page = open_page(width=width, height=700)
    page.wait_for_selector("#hour-chart svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator('[data-cell][aria-label^="batch 8, 0"]').focus()
    page.keyboard.press("ArrowDown" if width < 640 else "ArrowRight")
    assert f"at batch 9{DASH}10" in page.locator("#why-title").inner_text()
    clipped = page.evaluate(
        "[...document.querySelectorAll('.card')].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id)"
    )
    assert clipped == []


def test_another_server_is_picked_and_kept(open_page: Any) -> None:
    page = open_page()
    names_of = page.locator("#server option").evaluate_all("all => all.map((one) => one.value)")
    assert sorted(names_of) == ["gpu-a:30000/0", "gpu-b:30000/0"]
    other = next(name for name in names_of if name != page.locator("#server").input_value())
    page.locator("#server").select_option(other)
    page.wait_for_function("name => document.title.startsWith(name)", arg=other)
    page.reload()
    page.wait_for_function("name => document.title.startsWith(name)", arg=other)


def test_charts_say_what_they_show(open_page: Any) -> None:
    page = open_page()
    page.locator('[data-cell][aria-label^="batch 61"]').first.click()
    page.wait_for_selector("#acceptance-chart svg")
    assert "At batch 61-64: K=0" in page.locator("#cost-chart svg").get_attribute("aria-label")
    assert f"K=3 {MINUS}" in page.locator("#gain-chart svg").get_attribute("aria-label"), "speculation costs there"
    assert "1: " in page.locator("#acceptance-chart svg").get_attribute("aria-label")
    named = "(e) => e.ariaLabel || e.textContent.trim() || e.labels?.length"
    assert page.evaluate(f"[...document.querySelectorAll('button, select, svg[role=img]')].every({named})")


def test_token_and_the_end_of_the_controller(chromium: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "token").write_text(TOKEN)
    web = f'listen = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n'
    with running(tmp_path, web=web, policy=GOODPUT) as one:
        page = chromium.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(f"{one.url}/")
        assert page.locator("[data-cell]").count() == 0
        page.get_by_label("Token").fill("not the token at all")
        page.get_by_role("button").click()
        assert page.get_by_role("alert").inner_text() == "That is not the token."
        page.get_by_label("Token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-cell]")
        assert page.locator("#link").inner_text() == "live"
        one.controller.terminate()
        assert one.controller.wait(PATIENCE) == 0
        page.wait_for_selector("#link.lost")
        assert "no answer from the controller" in page.locator("#link").inner_text()
        page.close()
