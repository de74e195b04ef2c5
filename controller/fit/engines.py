"""What reads the segments of a fit: one after the other, processes, or a Ray cluster.

An *engine* reads each segment by itself, and gives the statistics back in the order of the trace, where they are
joined. So the result does not depend on the engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from specpilot.controller.errors import ConfigError
from specpilot.controller.fit.joining import Joined, SegmentStatistics, read_segment
from specpilot.controller.fit.statistics import TraceStatistics
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.sources import TraceSource, why_empty

ENGINES = ("serial", "processes", "ray")

Engine = Callable[[Sequence[Path]], Iterator[SegmentStatistics]]
"""Reads segments, and gives their statistics in the order of the paths."""


def read_fleet(sources: Sequence[TraceSource], engine: str, workers: int | None, console: Console) -> TraceStatistics:
    """Return the statistics of servers that share a fingerprint; TraceError if no record of them passes."""
    joined = Joined(sources[-1].hello)
    paths = [path for source in sources for path in source.segments]
    with (
        _engine(engine, workers, len(paths)) as read,
        Progress(console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("reading", total=len(paths))
        for part in read(paths):
            joined.add(part)
            bar.advance(task)
    findings = joined.part.findings
    if findings.rows == findings.excluded:
        raise TraceError(why_empty(sources[0], findings))
    return joined.part


@contextmanager
def _engine(name: str, workers: int | None, segments: int) -> Iterator[Engine]:
    """Give an engine, and end afterwards what it started."""
    if name == "serial":
        yield lambda paths: map(read_segment, paths)
    elif name == "processes":
        count = min(workers or os.cpu_count() or 1, segments)
        # Not forked: Arrow has threads, and a fork would copy their locks as they are.
        pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
        try:
            yield lambda paths: _ahead(paths, 2 * count, lambda path: pool.submit(read_segment, path).result)
        except BrokenProcessPool as error:
            raise ConfigError(
                "a process that reads traces was killed, perhaps because memory ran out: "
                f"give fewer --workers than {count}"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            # A cluster named by RAY_ADDRESS, or a local one for as long as this takes.
            try:
                ray.init(logging_level="warning", log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = os.environ.get("RAY_ADDRESS", "") or "of this machine"
                raise ConfigError(f"the Ray cluster {where} cannot be used: {error}") from error
        try:
            remote = ray.remote(read_segment)
            count = max(int(ray.cluster_resources().get("CPU", 1)), 1) if workers is None else workers
            yield lambda paths: _ahead(paths, 2 * count, lambda path: _getter(ray, remote.remote(path.absolute())))
        finally:
            if started:
                ray.shutdown()


def _getter(ray: Any, reference: Any) -> Callable[[], SegmentStatistics]:
    def get() -> SegmentStatistics:
        try:
            part: SegmentStatistics = ray.get(reference)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            raise TraceError(
                f"a worker of the Ray cluster failed: {cause}. Every node needs this version of specpilot, and the "
                "traces under the same path"
            ) from error
        return part

    return get


def _ahead(
    paths: Sequence[Path], most: int, submit: Callable[[Path], Callable[[], SegmentStatistics]]
) -> Iterator[SegmentStatistics]:
    """Yield the results in order, with at most ``most`` of them under way: memory does not grow with the trace."""
    under_way: deque[Callable[[], SegmentStatistics]] = deque()
    for path in paths:
        under_way.append(submit(path))
        if len(under_way) >= most:
            yield under_way.popleft()()
    while under_way:
        yield under_way.popleft()()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray: pip install '.[ray]' in Specpilot's checkout ({error})") from error
    return ray
