"""A simulated server with SGLang's HTTP interface, as far as its load generator uses it: a process of its own.

    python -m tests.support.http_server ENDPOINT PORT_FILE

Tokens are streamed as the simulated scheduler emits them, steered by a real controller through the real hooks.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from specpilot.controller.simulation.batch import SimRequest
from specpilot.controller.simulation.clock import WallClock
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.surface import H200_8B
from specpilot.controller.simulation.workload import Arrival, Phase, Workload
from specpilot.sglang_hooks.settings import Settings


class HttpSimServer(SimServer):
    """Takes requests from other threads and tells them of their tokens."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lock = threading.Lock()
        self._clients: list[queue.SimpleQueue[int]] = []

    def submit(self, prompt_tokens: int, output_tokens: int) -> queue.SimpleQueue[int]:
        """Return where the count of tokens so far will arrive, after each step."""
        with self._lock:
            client: queue.SimpleQueue[int] = queue.SimpleQueue()
            self._clients.append(client)
            self._admission.to_come.append(Arrival(0.0, prompt_tokens, output_tokens))
        return client

    def _emit(self, req: SimRequest, tokens: int) -> None:
        super()._emit(req, tokens)
        self._clients[req.index].put(min(len(req.output_ids), req.output_tokens))


class Handler(BaseHTTPRequestHandler):
    server_version = "simulated"
    sim: HttpSimServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def do_GET(self) -> None:
        models = {"data": [{"id": "simulated", "root": "simulated"}]}
        self._reply(models if self.path == "/v1/models" else {"internal_states": [{}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith("/generate"):
            self._reply({})
            return
        request = json.loads(body)
        prompt = request.get("input_ids") or request["text"].split()
        wanted = request["sampling_params"]["max_new_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        client = self.sim.submit(len(prompt), wanted)
        done = 0
        while done < wanted:
            done = client.get()
            meta = {"completion_tokens": done, "prompt_tokens": len(prompt)}
            self.wfile.write(b"data: " + json.dumps({"text": "a " * done, "meta_info": meta}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(endpoint: str, port_file: Path) -> None:
    settings = Settings(endpoint=endpoint, server_id="sim", min_table_interval_seconds=0.0)
    workload = Workload((), (Phase(0.0, "text", 0.8),))
    sim = HttpSimServer(settings, workload, H200_8B, random.Random(1), WallClock())
    Handler.sim = sim
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 512
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    port_file.write_text(str(http.server_port))
    sim.run(600.0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
