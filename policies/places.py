"""Which cells the plans for a server have, and the batch size and context that stand for each of them."""

from __future__ import annotations

from bisect import bisect_left

from specpilot.policies.interface import Grid
from specpilot.sglang_hooks.wire import Hello

CONTEXT_EDGES = (1024, 4096, 16384)
"""Tokens per request; attention's share of a step differs by more than noise between these."""

FIRST_CONTEXTS = (512.0, 2048.0, 8192.0, 32768.0)
"""Tokens per request that stand for a context region until a step was seen there."""


def server_grid(server: Hello) -> Grid:
    """Return the cells for a server: its captured batch sizes, and CONTEXT_EDGES up to its context length."""
    sizes = tuple(size for size in sorted(server.captured_batch_sizes) if size <= server.max_running_requests)
    return Grid(sizes, tuple(edge for edge in CONTEXT_EDGES if edge < max(server.context_length, 1)))


class CellPlaces:
    """The place of each cell: the padded batch size, and the mean context of the steps that were seen there.

    >>> from tests.support.messages import hello
    >>> places = CellPlaces(hello(captured_batch_sizes=[4, 8], context_length=4096))
    >>> places.observe(600.0, weight=0.5)
    >>> [places.of(cell) for cell in range(places.grid.cells)]
    [(4, 556.0), (4, 2048.0), (8, 556.0), (8, 2048.0), (11, 556.0), (11, 2048.0)]
    """

    def __init__(self, server: Hello) -> None:
        self.grid = server_grid(server)
        sizes = self.grid.batch_edges
        above = sizes[-1] * 1.25 + 1.0 if sizes else 1.0
        self.batch_sizes = (*map(float, sizes), above)
        """Requests, by row of the grid; the last row stands for what lies above the largest graph."""
        # The last column has whatever contexts are above its edge, also beyond the server's context length.
        self.contexts = list(FIRST_CONTEXTS[: len(self.grid.context_edges) + 1])
        """Tokens per request, by column of the grid."""

    def of(self, cell: int) -> tuple[int, float]:
        """Return batch size (requests) and mean context (tokens per request) of a cell."""
        row, column = divmod(cell, len(self.contexts))
        return int(self.batch_sizes[row]), self.contexts[column]

    def observe(self, mean_context: float, weight: float) -> None:
        """Move the context of a step's column towards that of the step (tokens per request), by ``weight``."""
        column = bisect_left(self.grid.context_edges, mean_context)
        self.contexts[column] += weight * (mean_context - self.contexts[column])
