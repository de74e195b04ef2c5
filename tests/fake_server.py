"""Stands for SGLang's server process, which needs a GPU: answers /health after a while, ends on SIGTERM.

Writes what it was started with and what happened to it into the JSON lines file FAKE_SERVER_LOG.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

LOG = Path(os.environ["FAKE_SERVER_LOG"])
READY_SECONDS = float(os.environ.get("FAKE_SERVER_READY_SECONDS", "1"))
EXIT_CODE = int(os.environ.get("FAKE_SERVER_EXIT_CODE", "0"))
ENDS_AT_ONCE = "FAKE_SERVER_ENDS" in os.environ
stop = threading.Event()


def note(**what: Any) -> None:
    with LOG.open("a") as file:
        file.write(json.dumps(what) + "\n")


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if time.monotonic() - begun > READY_SECONDS else 503)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def signalled(number: int, frame: object) -> None:
    note(signal=signal.Signals(number).name)
    if number != signal.SIGUSR1:
        stop.set()


begun = time.monotonic()
note(arguments=sys.argv[1:], endpoint=os.environ["SPECPILOT_ENDPOINT"])
if ENDS_AT_ONCE:
    sys.exit(EXIT_CODE)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signalled)
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
note(up=True)
stop.wait()
server.shutdown()
sys.exit(EXIT_CODE)
