"""The browser that the page is looked at with: which one there is, and what to do where there is none.

python -m tests.support.browser              say which one; exit 1 if there is none
python -m tests.support.browser --install    let Playwright put one into the user's cache if there is none; never fails
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
REMEDY = "apt-get install chromium, or .venv/test/bin/playwright install chromium, or name one in the variable CHROMIUM"
INSTALL_SECONDS = 600.0


class NoBrowserError(Exception):
    """There is none that starts; the message says so, and what to do."""


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a headless Chromium, Chrome or Edge: the one that ``CHROMIUM`` names, or the first that starts.

    NoBrowserError if there is none.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        one = _launch(playwright.chromium)
        yield one
        one.close()


def _launch(kind: Any) -> Any:
    from playwright.sync_api import Error

    named = os.environ.get("CHROMIUM")
    here = [named] if named else [found for name in NAMES if (found := shutil.which(name))]
    if not named and Path(kind.executable_path).exists():  # what Playwright brought
        here.append(kind.executable_path)
    failed = ""
    for path in here:
        try:
            return kind.launch(executable_path=path, args=OPTIONS)
        except Error as error:
            reason = next(iter(str(error).splitlines()), "")
            failed += f"; {path} does not start ({reason})"
    raise NoBrowserError(f"the page's tests need Chromium, Chrome or Edge, and none was found{failed}: {REMEDY}")


def main() -> int:
    install = sys.argv[1:] == ["--install"]
    try:
        with browser() as one:
            if not install:
                sys.stdout.write(f"browser {one.version}\n")
            return 0
    except NoBrowserError as error:
        if not install:
            sys.stderr.write(f"{error}\n")
            return 1
    try:
        done = subprocess.run(
            [sys.executable, "-m", "playwright", "install", "chromium"], capture_output=True, timeout=INSTALL_SECONDS
        )
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        failed = True
    had = "none could be had" if failed else "Playwright put Chromium into its cache"
    sys.stdout.write(f"specpilot: there was no browser for the page's tests; {had}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
