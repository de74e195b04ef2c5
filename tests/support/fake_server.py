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


class Server:
    """What the environment says of it, and its answers."""

    def __init__(self, arguments: list[str]) -> None:
        self.log = Path(os.environ["FAKE_SERVER_LOG"])
        self.begun = time.monotonic()
        self.stop = threading.Event()
        self.note(arguments=arguments, endpoint=os.environ["SPECPILOT_ENDPOINT"])
        self.port = int(arguments[arguments.index("--port") + 1])

    def note(self, **what: Any) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def signalled(self, number: int, frame: object) -> None:
        self.note(signal=signal.Signals(number).name)
        if number != signal.SIGUSR1:
            self.stop.set()

    def run(self) -> None:
        ready_seconds = float(os.environ.get("FAKE_SERVER_READY_SECONDS", "1"))
        begun = self.begun

        class Health(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if time.monotonic() - begun > ready_seconds else 503)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.signalled)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Health)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.note(up=True)
        self.stop.wait()
        server.shutdown()


if __name__ == "__main__":
    started = Server(sys.argv[1:])
    if "FAKE_SERVER_ENDS" not in os.environ:
        started.run()
    sys.exit(int(os.environ.get("FAKE_SERVER_EXIT_CODE", "0")))
