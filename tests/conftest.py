"""What decides whether a test can run here, so that no test module has to."""

from __future__ import annotations

import _posixsubprocess
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.browser import NoBrowserError, browser

QUICK = "--quick"
WITHOUT_SGLANG = importlib.util.find_spec("sglang") is None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        QUICK,
        action="store_true",
        help="make check: skip what is slow, and a test at the moment when it imports SGLang or starts a process",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # its workers run the tests
    quick = config.getoption(QUICK)
    if quick:
        for module, name in (
            (os, "fork"),
            (os, "posix_spawn"),
            (subprocess, "_fork_exec"),
            (_posixsubprocess, "fork_exec"),  # multiprocessing's
        ):
            setattr(module, name, _starts_a_process)
    if quick or WITHOUT_SGLANG:
        sys.meta_path.insert(0, NoSGLang())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption(QUICK) and collection_path.name == "contract" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (WITHOUT_SGLANG or item.config.getoption(QUICK)) and item.get_closest_marker("sglang"):
        pytest.skip("needs SGLang")
    if item.config.getoption(QUICK) and item.get_closest_marker("slow"):
        pytest.skip("computes for more than a second")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line for each reason what was left out."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason}")


def _starts_a_process(*_: object, **__: object) -> NoReturn:
    pytest.skip("starts a process")


class NoSGLang:
    """Asked by the import system before all others: skips the test or the module that imports SGLang or torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing, or skip."""
        if name in ("sglang", "torch"):
            pytest.skip("needs SGLang", allow_module_level=True)


@pytest.fixture(scope="module")
def chromium(pytestconfig: pytest.Config) -> Iterator[Any]:
    """Yield a headless browser; where there is none, its tests are skipped, unless ``REQUIRE_BROWSER`` is set."""
    if pytestconfig.getoption(QUICK):
        _starts_a_process()
    try:
        with browser() as one:
            yield one
    except NoBrowserError as error:
        if os.environ.get("REQUIRE_BROWSER") or os.environ.get("CHROMIUM"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give traces and priors of a controller with default settings a home of their own, never the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
