"""The pictures of the web page in the documentation, taken from a real controller with simulated servers.

    python -m benchmarks.page_pictures docs/images      web-light.png, web-dark-phone.png

Needs Chromium, Chrome or Edge (``CHROMIUM`` names one) and, in the checkout, ``pip install '.[test]'``.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import browser
from tests.support.web_rig import running

SECONDS = 135.0
"""To wait: both kinds of text and some bursts are in the picture then, and the first kind has come back."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="to wait before they are taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        servers = ("gpu-a:30000", "gpu-b:30000")
        with running(Path(folder), servers, seconds=options.seconds + 25.0) as rig:
            for name, width, height, scheme, batch in (
                ("web-light", 1280, 968, "light", "8,"),
                ("web-dark-phone", 390, 1300, "dark", "61"),
            ):
                page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(f"{rig.url}/")
                page.wait_for_selector("[data-cell]")
                page.wait_for_timeout(max(1000.0 * (options.seconds if name == "web-light" else 0.0), 2000.0))
                page.locator(f'[data-cell][aria-label^="batch {batch}"]').first.click()
                page.wait_for_timeout(1000.0)
                page.mouse.move(0, 0)
                page.evaluate("document.activeElement.blur()")
                picture = Image.open(io.BytesIO(page.screenshot()))
                picture.convert("RGB").quantize(256, kmeans=4).save(options.folder / f"{name}.png", optimize=True)
                page.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
