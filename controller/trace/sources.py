"""Whose traces are where: segments grouped by server and fingerprint; only their headers are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specpilot.controller.trace.findings import EXCLUDED, NOT_JOINED, Finding, Findings
from specpilot.controller.trace.format import server_key
from specpilot.controller.trace.reader import Segment, TraceError, segments
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import Hello


@dataclass(frozen=True)
class TraceSource:
    """The segments of one server with one fingerprint, in order."""

    server: str
    """The server's name, NAME/RANK."""
    fingerprint: str
    hello: Hello
    """The Hello in the newest segment."""
    segments: tuple[Path, ...]


def survey(paths: Iterable[Path], findings: Findings) -> list[TraceSource]:
    """Return what ``paths`` hold, by server and fingerprint, in order of both.

    Raises TraceError where a path cannot be listed, or nothing there is a trace.
    """
    headers: dict[tuple[str, str], list[tuple[Path, Hello]]] = {}
    paths = list(paths)
    before: Path | None = None
    for path in segments(paths):
        if before is not None and path.parent == before.parent:
            _check_numbers(before, path, findings)
        before = path
        segment = open_segment(path, findings)
        if segment is None:
            continue
        if segment.hello is None:
            findings.add(Finding(str(path), "torn tail", EXCLUDED, "it ends within its header"))
            continue
        hello = segment.hello
        headers.setdefault((server_key(hello), fingerprint(hello)), []).append((path, hello))
    if not headers:
        where = ", ".join(map(str, paths)) or "no path"
        reasons = "".join(f"\n  {line}" for line in findings.lines())
        raise TraceError(f"{where}: no trace is there: name a trace folder, a server's folder or a segment{reasons}")
    return [
        TraceSource(server, key, parts[-1][1], tuple(path for path, _ in parts))
        for (server, key), parts in sorted(headers.items())
    ]


def open_segment(path: Path, findings: Findings) -> Segment | None:
    """Return the segment at ``path``; None, with a finding, for a file that is no segment of this version."""
    try:
        return Segment(path)
    except TraceError as error:
        findings.add(Finding(str(path), "unreadable file", EXCLUDED, str(error).removeprefix(f"{path} ")))
        return None


def _check_numbers(before: Path, path: Path, findings: Findings) -> None:
    if before.stem.isdecimal() and path.stem.isdecimal() and int(path.stem) > int(before.stem) + 1:
        missing = int(path.stem) - int(before.stem) - 1
        text = f"{missing:,} segments are missing between {before.name} and this one"
        findings.add(Finding(str(path), "missing segment", NOT_JOINED, text))


def select_sources(paths: Iterable[Path], server: str | None, findings: Findings) -> list[TraceSource]:
    """Return the sources whose server or fingerprint is ``server``, all for None; TraceError if there is none."""
    sources = survey(paths, findings)
    selected = [source for source in sources if server in (None, source.server, source.fingerprint)]
    if not selected:
        raise TraceError(f"no server or fingerprint {server!r} in these traces; they hold {describe(sources)}")
    return selected


def single_source(paths: Iterable[Path], server: str | None, findings: Findings) -> TraceSource:
    """Return the one source that ``server`` selects; TraceError, naming them, where there are several, or none."""
    sources = select_sources(paths, server, findings)
    if len(sources) > 1:
        raise TraceError(
            f"these traces are of several servers or fingerprints, which are not mixed: {describe(sources)}. "
            "Choose one with --server, by its name or its fingerprint, or give its segments alone"
        )
    return sources[0]


def describe(sources: Iterable[TraceSource]) -> str:
    """Return which servers there are, for an operator."""
    return ", ".join(
        f"{source.server} (fingerprint {source.fingerprint}, {len(source.segments)} segments, {source.segments[0]} …)"
        for source in sources
    )


def why_empty(source: TraceSource, findings: Findings) -> str:
    """Return why no record of ``source`` can be used, for an operator."""
    where = ", ".join(map(str, source.segments[:3])) + (", …" if len(source.segments) > 3 else "")
    if not findings.rows:
        return f"the trace of {source.server} is empty: no whole record batch in {where}"
    reasons = "".join(f"\n  {line}" for line in findings.lines())
    return f"no record of {source.server} in {where} passes the checks:{reasons}"
