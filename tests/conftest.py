"""What decides whether a test can run here, so that no test module has to."""

from __future__ import annotations

import _posixsubprocess
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from tests.support.browser import NoBrowserError, browser

NO_PROCESSES = "--no-processes"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        NO_PROCESSES, action="store_true", help="skip a test at the moment when it starts a process (make check)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(NO_PROCESSES):
        for module, name in (
            (os, "fork"),
            (os, "posix_spawn"),
            (subprocess, "_fork_exec"),
            (_posixsubprocess, "fork_exec"),  # multiprocessing's
        ):
            setattr(module, name, _starts_a_process)
    if importlib.util.find_spec("sglang") is None:
        config.pluginmanager.register(WithoutSGLang())


def _starts_a_process(*_: object, **__: object) -> NoReturn:
    pytest.skip("starts a process")


class WithoutSGLang:
    """Skips the tests, doctests among them, of a module that cannot be imported where SGLang is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Be asked by the import system for a module that nothing else has found."""
        if name in ("sglang", "torch"):
            pytest.skip("needs SGLang", allow_module_level=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Any:
        sys.meta_path.append(self)
        try:
            return (yield)
        finally:
            sys.meta_path.remove(self)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("sglang"):
            pytest.skip("needs SGLang")


@pytest.fixture(scope="module")
def chromium(pytestconfig: pytest.Config) -> Iterator[Any]:
    """Yield a headless browser; where there is none, its tests are skipped, unless ``REQUIRE_BROWSER`` is set."""
    if pytestconfig.getoption(NO_PROCESSES):
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
