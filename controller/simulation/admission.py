"""Requests from their arrival to their prefill, and the KV cache that is set aside for them."""

from __future__ import annotations

from bisect import insort_right
from collections import deque
from collections.abc import Iterable

from specpilot.controller.simulation.batch import ForwardMode, SimBatch, SimRequest
from specpilot.controller.simulation.workload import Arrival

MAX_PREFILL_TOKENS = 8192
"""Prompt tokens that one prefill takes at most, unless its first request alone has more."""


class KvPool:
    """The KV cache: tokens set aside for the running requests, and tokens that they use so far.

    All that a request will ever use is set aside at its start. SGLang takes a part of that, and
    retracts requests when it was too little, which is not simulated.
    """

    def __init__(self, tokens: int, slack: int) -> None:
        """``tokens``: size of the cache; 0: no limit. ``slack``: tokens of each request for drafts in flight."""
        self.used = 0
        """Tokens of all running requests."""
        self._tokens = tokens
        self._slack = slack
        self._reserved = 0

    def needed(self, request: SimRequest | Arrival) -> int:
        """Return the tokens set aside for a request as long as it runs."""
        return request.prompt_tokens + request.output_tokens + self._slack

    def reserve(self, request: SimRequest) -> bool:
        """Set aside what a request needs, and store its prompt; False if there is no room."""
        needed = self.needed(request)
        if self._tokens and self._reserved + needed > self._tokens:
            return False
        self._reserved += needed
        self.used += request.prompt_tokens
        return True

    def release(self, request: SimRequest) -> None:
        """Give free what was set aside for a request that ends."""
        self._reserved -= self.needed(request)


class Admission:
    """Requests that are still to come, and those that wait for their prefill."""

    def __init__(self, arrivals: Iterable[Arrival], max_running_requests: int, kv: KvPool) -> None:
        """``arrivals``: by rising time."""
        self.to_come = deque(arrivals)
        self.waiting: deque[SimRequest] = deque()
        self._max_running = max_running_requests
        self._kv = kv
        self._received = 0

    def expect(self, arrival: Arrival) -> None:
        """Add a request that will arrive in its turn."""
        insort_right(self.to_come, arrival, key=lambda other: other.at)

    def arrived(self, elapsed: float) -> list[SimRequest]:
        """Return the requests that arrived up to now, ``elapsed`` seconds after the start; they do not wait yet."""
        requests = []
        while self.to_come and self.to_come[0].at <= elapsed:
            arrival = self.to_come.popleft()
            requests.append(
                SimRequest(arrival.prompt_tokens, arrival.output_tokens, self._received, acceptance=arrival.acceptance)
            )
            self._received += 1
        return requests

    def next_prefill(self, running: int) -> SimBatch | None:
        """Return a prefill of what waits and fits beside ``running`` requests; None if nothing does."""
        admitted: list[SimRequest] = []
        tokens = 0
        while self.waiting and running + len(admitted) < self._max_running:
            request = self.waiting[0]
            if admitted and tokens + request.prompt_tokens > MAX_PREFILL_TOKENS:
                break
            if not self._kv.reserve(request):
                break
            tokens += request.prompt_tokens
            admitted.append(self.waiting.popleft())
        return SimBatch(admitted, ForwardMode.EXTEND, extend_num_tokens=tokens) if admitted else None
