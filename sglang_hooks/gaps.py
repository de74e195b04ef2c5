"""Which positions of each request the draft model has not seen: the host's exact account of skipped steps.

A skipped step leaves the draft's KV without the newest position of every request in the batch. So a
request's gap is always its last positions, ``[length - gap, length)``, and its size is a count of
steps: no look at the GPU is needed, and every rank counts alike. What the ring of ``resume.py`` still
holds when speculation resumes is filled in; what it no longer holds stays a hole for the request's
life, and everything from the first hole on is worth less to the draft and to a prefix cache.

Counting is done at launch, in the order in which the GPU works, and costs a step whose batch has the
members of the last one a single addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Entry:
    """What is missing of one request."""

    rid: str
    whole: int
    """Leading positions whose draft KV is right, at least; as the host knew them before the first skip."""
    gap: int = 0
    """Skipped steps since the draft was last complete up to the newest position."""
    holed: bool = False
    """Something before the gap is missing for good."""


class Gaps:
    """Skipped steps of every request, keyed by its row in the request pool and its id.

    A row is given to another request when its own has ended, and a request may come back to the same
    row after a retraction: ``prefilled`` says when the draft has seen all of a request again.
    """

    def __init__(self, row_of: Callable[[Any], int], committed_of: Callable[[Any], int]) -> None:
        """``row_of`` and ``committed_of`` read a request's pool row and committed length."""
        self._row_of = row_of
        self._committed_of = committed_of
        self._entries: dict[int, _Entry] = {}
        self._holed = 0
        # The batch skipped last, and its steps that are not yet in its entries. SGLang replaces the
        # list when members change; holding it keeps its identity from being reused.
        self._members: Sequence[Any] | None = None
        self._member_entries: list[_Entry] = []
        self._uncounted = 0
        self._closed: Sequence[Any] | None = None
        """The batch whose gaps were closed last, with no skip since."""

    def skipped(self, reqs: Sequence[Any]) -> None:
        """Count one skipped step of ``reqs``; call when it has been launched."""
        if reqs is not self._members:
            self._settle()
            self._members = reqs
            self._member_entries = [self._entry(req) for req in reqs]
            self._closed = None
        self._uncounted += 1

    def close(self, reqs: Sequence[Any], kept: int) -> list[tuple[int, int]]:
        """Return (index in ``reqs``, positions to fill in) where the last ``kept`` steps can be, at most.

        A larger gap leaves a hole. The positions count as filled in from now on.
        """
        if not self._entries or reqs is self._closed:
            return []
        self._settle()
        self._closed = reqs
        found: list[tuple[int, int]] = []
        for index, req in enumerate(reqs):
            row = self._row_of(req)
            entry = self._entries.get(row)
            if entry is None or entry.rid != req.rid or entry.gap == 0:
                continue
            if entry.gap > kept and not entry.holed:
                entry.holed = True
                self._holed += 1
            if kept:
                found.append((index, min(entry.gap, kept)))
            entry.gap = 0
            if not entry.holed:
                del self._entries[row]
        return found

    def prefilled(self, reqs: Sequence[Any]) -> None:
        """The draft has seen all of ``reqs``: whatever was known of their rows is over."""
        if self._entries:
            for req in reqs:
                self._forget(self._row_of(req))

    def released(self, req: Any) -> None:
        """``req`` is about to give back its row."""
        if self._entries:
            self._forget(self._row_of(req))

    def whole_length(self, req: Any) -> int | None:
        """Return how many leading positions have their draft KV, at least; None where all have."""
        entry = self._entries.get(self._row_of(req)) if self._entries else None
        return entry.whole if entry is not None and entry.rid == req.rid else None

    def holed(self, reqs: Sequence[Any]) -> list[int]:
        """Return the indices in ``reqs`` of those that have a hole."""
        if not self._holed:
            return []
        found = []
        for index, req in enumerate(reqs):
            entry = self._entries.get(self._row_of(req))
            if entry is not None and entry.holed and entry.rid == req.rid:
                found.append(index)
        return found

    def _entry(self, req: Any) -> _Entry:
        row = self._row_of(req)
        entry = self._entries.get(row)
        if entry is not None and entry.rid == req.rid:
            return entry
        self._forget(row)
        made = self._entries[row] = _Entry(req.rid, self._committed_of(req))
        return made

    def _forget(self, row: int) -> None:
        entry = self._entries.pop(row, None)
        if entry is not None and entry.holed:
            self._holed -= 1

    def _settle(self) -> None:
        """Put the steps counted for the last batch into its entries."""
        for entry in self._member_entries:
            entry.gap += self._uncounted
        self._members, self._member_entries, self._uncounted = None, [], 0
