"""The account of skipped steps against a brute-force one, under joins, ends, retractions and overshoot."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.sglang_hooks.gaps import Gaps


@dataclass
class Request:
    """A request with the truth about its draft KV: whether each position has it."""

    rid: str
    prompt: int
    row: int | None = None
    known: int = 0
    """Committed length as the host knows it: behind by a step under overlap."""
    filled: list[bool] = field(default_factory=list)
    skipped: int = 0
    """Steps since the last time the gap was closed."""


def account() -> Gaps:
    return Gaps(lambda req: req.row, lambda req: req.known)


class Model:
    """A server that keeps its running requests in a list it replaces when members change, as SGLang does."""

    def __init__(self, kept: int, lag: bool) -> None:
        self.gaps, self.kept, self.lag = account(), kept, lag
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.rows = list(range(1, 7))
        self.born = 0

    def join(self, prompt: int) -> None:
        if not self.rows:
            return
        req = self.waiting.pop() if self.waiting else Request(f"r{self.born}", prompt)
        self.born += 1
        req.row = self.rows.pop(0)
        length = max(len(req.filled), req.prompt)
        req.filled, req.known, req.skipped = [True] * length, length, 0
        self.gaps.prefilled([req])
        self.running = [*self.running, req]

    def leave(self, pick: int, retract: bool, overshoot: bool) -> None:
        if not self.running:
            return
        req = self.running[pick % len(self.running)]
        if overshoot and not retract:
            self.gaps.skipped(self.running)  # launched before the host knew of the end
            for other in self.running:
                other.skipped += 1
                if other is not req:
                    other.filled.append(False)
        self.check(req)
        self.gaps.released(req)
        assert self.gaps.whole_length(req) is None
        assert req.row is not None
        self.rows.append(req.row)
        req.row = None
        self.running = [other for other in self.running if other is not req]
        if retract:
            self.waiting.append(req)

    def skip(self) -> None:
        if not self.running:
            return
        self.gaps.skipped(self.running)
        for req in self.running:
            req.known = len(req.filled) if self.lag else len(req.filled) + 1
            req.filled.append(False)
            req.skipped += 1
            self.check(req)

    def speculate(self, accepted: int) -> None:
        found = dict(self.gaps.close(self.running, self.kept))
        for index, req in enumerate(self.running):
            missing = min(req.skipped, self.kept)
            assert found.get(index, 0) == missing
            if missing:
                assert not any(req.filled[-missing:])
                req.filled[-missing:] = [True] * missing
            req.skipped = 0
        holed = self.gaps.holed(self.running)
        assert holed == [index for index, req in enumerate(self.running) if not all(req.filled)]
        for req in self.running:
            req.filled += [True] * accepted
            self.check(req)

    def check(self, req: Request) -> None:
        """What may be cached is never more than what is there, and never less than the prompt."""
        whole = self.gaps.whole_length(req)
        if whole is None:
            assert all(req.filled)
        else:
            assert all(req.filled[:whole])
            assert whole >= req.prompt


OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 5)),
    st.tuples(st.just("leave"), st.integers(0, 5), st.booleans(), st.booleans()),
    st.tuples(st.just("skip")),
    st.tuples(st.just("skip")),
    st.tuples(st.just("speculate"), st.integers(1, 4)),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([0, 1, 2, 4]), st.booleans(), st.lists(OPERATIONS, max_size=60))
def test_the_account_is_that_of_counting_every_position(kept: int, lag: bool, operations: list[tuple]) -> None:
    model = Model(kept, lag)
    for name, *arguments in operations:
        getattr(model, name)(*arguments)
    for req in list(model.running):
        model.leave(model.running.index(req), False, False)
    assert model.gaps._entries == {}
    assert model.gaps._holed == 0


def request(rid: str, row: int, known: int = 10) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, row=row, known=known)


def test_another_request_in_the_row_has_no_gap() -> None:
    gaps, old, new = account(), [request("a", 3)], [request("b", 3)]
    gaps.skipped(old)
    assert gaps.close(new, 8) == []
    assert gaps.whole_length(new[0]) is None
    gaps.skipped(new)
    assert gaps.close(new, 8) == [(0, 1)]


def test_steps_of_a_batch_count_though_its_list_is_replaced() -> None:
    gaps, reqs = account(), [request("a", 1), request("b", 2)]
    gaps.skipped(reqs)
    gaps.skipped(reqs)
    gaps.skipped(reqs[:1])
    assert gaps.close(reqs, 8) == [(0, 3), (1, 2)]
    assert gaps.close(reqs, 8) == []


def test_a_hole_stays_until_the_prefill() -> None:
    gaps, reqs = account(), [request("a", 1, known=10)]
    for _ in range(3):
        gaps.skipped(reqs)
    assert gaps.close(reqs, 2) == [(0, 2)]
    assert gaps.holed(reqs) == [0]
    gaps.skipped(reqs)
    assert gaps.close(reqs, 2) == [(0, 1)]
    assert gaps.holed(reqs) == [0]
    assert gaps.whole_length(reqs[0]) == 10
    gaps.prefilled(reqs)
    assert gaps.holed(reqs) == []
    assert gaps.whole_length(reqs[0]) is None
