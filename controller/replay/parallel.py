"""Many calls of one function on all cores, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from rich.progress import Progress


@contextmanager
def workers(count: int | None, jobs: int) -> Iterator[Executor | None]:
    """Give a pool of ``count`` processes (None: one a core), not more than ``jobs``; None where one is enough."""
    count = min(count or os.cpu_count() or 1, jobs)
    if count <= 1:
        yield None
        return
    # Not forked: a thread draws the progress, and a fork would copy its lock as it is.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


Returned = TypeVar("Returned")


def run_all(
    function: Callable[..., Returned],
    calls: Sequence[tuple[object, ...]],
    pool: Executor | None,
    progress: Progress,
    label: str,
) -> list[Returned]:
    """Return ``function(*call)`` of every call, in their order; without a pool, one after the other."""
    task = progress.add_task(label, total=len(calls))
    if pool is None:
        returned = []
        for call in calls:
            returned.append(function(*call))
            progress.advance(task)
        return returned
    futures: list[Future[Returned]] = [pool.submit(function, *call) for call in calls]
    for future in as_completed(futures):
        future.result()
        progress.advance(task)
    return [future.result() for future in futures]
