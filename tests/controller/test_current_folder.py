"""No command imports anything from the current folder, whatever its files are called; nor does what it starts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specpilot.controller.processes import python_module, specpilot_command
from tests.controller.test_launch import EAGLE

ROOT = Path(__file__).parents[2]
SPECPILOT = Path(sys.executable).with_name("specpilot")
"""The installed entry point."""
PACKAGES = ("controller", "policies", "sglang_hooks", "specpilot", "sglang", "rich")
MODULES = ("numpy", "msgspec", "zmq", "pyarrow", "matplotlib", "torch")
TRAP = """
import os, sys
with open({caught!r}, "a") as file:
    file.write(f"{{__name__}} by {{sys.orig_argv}}\\n")
raise ImportError(f"{{__name__}} of the current folder was imported")
"""

pytestmark = pytest.mark.timeout(600)  # doctor and launch import SGLang, which takes long on a busy machine


class Folder:
    """A user's folder with modules of its own, which tell when they are imported."""

    def __init__(self, path: Path) -> None:
        self.path = path / "here"
        self._caught = path / "caught"
        trap = TRAP.format(caught=str(self._caught))
        for name in PACKAGES:
            (self.path / name).mkdir(parents=True)
            (self.path / name / "__init__.py").write_text(trap)
        for name in MODULES:
            (self.path / f"{name}.py").write_text(trap)

    @property
    def caught(self) -> str:
        return self._caught.read_text() if self._caught.exists() else ""

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPECPILOT_", "PYTHONSAFE"))}
        return kept | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(self.path.parent)}

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, command)], cwd=self.path, env=self.environment(), capture_output=True, text=True, check=False
        )


@pytest.fixture
def folder() -> Iterator[Folder]:
    with tempfile.TemporaryDirectory(prefix="sp-") as path:  # a socket's path is short
        yield Folder(Path(path))


def test_the_traps_catch_a_program_that_looks_there(folder: Folder) -> None:
    assert folder.run(sys.executable, "-m", "specpilot.controller.cli", "--version").returncode != 0
    assert folder.caught.startswith("specpilot by ")


def test_what_commands_start_is_not_looked_for_there(folder: Folder) -> None:
    done = folder.run(*specpilot_command("--version"))
    assert done.returncode == 0, done.stderr
    assert folder.run(*python_module("specpilot.controller.simulation.server", "--help")).returncode == 0
    assert not folder.caught


def test_the_demo(folder: Folder) -> None:
    picture = folder.path.parent / "demo.png"
    done = folder.run(SPECPILOT, "demo", "--seconds", "2", "--png", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 10_000
    assert not folder.caught


def test_the_doctor(folder: Folder) -> None:
    done = folder.run(SPECPILOT, "doctor", "--json")
    assert not folder.caught
    checks = json.loads(done.stdout)
    assert any(check["found"].startswith("specpilot ") for check in checks)


@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs an installed SGLang")
def test_launch_says_what_it_would_start(folder: Folder) -> None:
    done = folder.run(SPECPILOT, "launch", "--dry-run", "--", *EAGLE)
    assert done.returncode == 0, done.stderr
    assert "-P -m sglang.launch_server" in done.stdout
    assert not folder.caught
