"""The wheels of the supported SGLang versions, whose source the contract is held against.

    python -m tests.contract.wheels [FOLDER]     download what is missing (150 MB in all, no dependencies)

``make test`` does this. Nothing of a wheel is installed or run.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specpilot.sglang_hooks.contract import RIG_VERSION, TESTED_VERSIONS
from specpilot.sglang_hooks.source import Source

FOLDER = Path(__file__).parents[2] / ".venv" / "sglang"
VERSIONS = (RIG_VERSION, *TESTED_VERSIONS)


class Edited(Source):
    """A source some of whose text is another: SGLang as it may be in a version to come."""

    def __init__(self, of: Source, module: str, *edits: tuple[str, str]) -> None:
        """``edits``: (text, what stands in its place) in ``module``, an empty text for all of it gone."""
        super().__init__(of._root)
        self._module, self._edits = module, edits

    def read(self, name: str) -> bytes | None:
        found = super().read(name)
        if name != self._module or found is None:
            return found
        text = found.decode()
        for old, new in self._edits:
            if not old:
                return None
            assert old in text, f"{old!r} is not in {name}"
            text = text.replace(old, new)
        return text.encode()


@functools.cache
def source(version: str, folder: Path = FOLDER) -> Source:
    """Return the source in the wheel of a version; fails where there is none."""
    found = wheel(version, folder)
    if found is None:
        raise FileNotFoundError(
            f"no wheel of SGLang {version} in {folder}: run `make test`, or `python -m tests.contract.wheels`, "
            "once with a package index in reach; or put the wheel there by hand"
        )
    return Source(zipfile.Path(found))


def wheel(version: str, folder: Path) -> Path | None:
    """Return the wheel of a version, or None."""
    return next(iter(sorted(folder.glob(f"sglang-{version}-*.whl"))), None)


def download(folder: Path) -> None:
    """Get every wheel that is missing; SystemExit says which could not be had, and what to do."""
    folder.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        if wheel(version, folder) is not None:
            continue
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        # The same wheel on every machine: only its text is read.
        machine = ["--platform", "manylinux_2_34_x86_64", "--implementation", "cp", "--python-version", "3.11"]
        # To a folder of its own first: a download that is broken off leaves no half wheel under a whole one's name.
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            done = subprocess.run([*pip, *machine, "--dest", fresh, f"sglang=={version}"], check=False)
            had = None if done.returncode else wheel(version, Path(fresh))
            if had is not None:
                had.rename(folder / had.name)
        if had is None:
            raise SystemExit(
                f"the wheel of SGLang {version} could not be had (see pip above), and without it the contract tests "
                f"cannot run: set PIP_INDEX_URL to an index that has it, or put it into {folder} by hand"
            )


if __name__ == "__main__":
    download(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
