"""Inside an SGLang scheduler process: drafts that are right with a chosen probability, whatever the draft model.

Random weights accept nothing, and a verify that accepts nothing does not tell whether its masks, positions
and the move of accepted KV are right. SGLang's simulated acceptance accepts wrong tokens. Here the answers
that the target is known to give are written into the drafted tokens, so that what is accepted is accepted
by the target's own verify, and the answers must be those of a server without speculation.

The main process writes ``texts.json`` in the folder of ``skip_steps.py``: a list of token ids, prompt and
answer. A plan with ``oracle``, a probability, has each further draft of a request be right with it. In a
tree the right token goes to the last sibling that has a child, where a wrong mask would show most.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import skip_steps

KEY = 12
"""Leading tokens of a prompt by which its text is found."""


def install() -> None:
    """Have SGLang's plugin loader set this up in the process; call at import in ``__mp_main__``."""
    if skip_steps.FOLDER not in os.environ:
        return
    from specpilot.sglang_hooks import plugin

    original = plugin.activate

    def activate() -> None:
        original()
        if "sglang.srt.managers.scheduler" in sys.modules:
            Oracle(Path(os.environ[skip_steps.FOLDER])).attach()

    plugin.activate = activate


class Oracle:
    """Rewrites drafted tokens after each draft."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_at = (0, 0)
        self.probability = 0.0
        self.texts: dict[tuple[int, ...], list[int]] = {}

    def attach(self) -> None:
        from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

        draft, oracle = EagleDraftWorker.draft, self

        @functools.wraps(draft)
        def drafting(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            verify_input = draft(worker, batch, *args, **kwargs)
            if not batch.forward_mode.is_idle():
                oracle.rewrite(batch, verify_input)
            return verify_input

        EagleDraftWorker.draft = drafting

    def reread(self) -> None:
        try:
            plan, texts = self.folder / "plan.json", self.folder / "texts.json"
            read_at = plan.stat().st_mtime_ns, texts.stat().st_mtime_ns
        except OSError:
            return
        if read_at == self.read_at:
            return
        self.read_at = read_at
        self.probability = float(json.loads(plan.read_text()).get("oracle", 0.0))
        self.texts = {tuple(text[:KEY]): text for text in json.loads(texts.read_text())}

    def rewrite(self, batch: Any, verify_input: Any) -> None:
        self.reread()
        if not self.probability:
            return
        rows = len(batch.reqs)
        drafted = verify_input.draft_token
        tokens = drafted.reshape(rows, -1).tolist()
        children = self.children(verify_input, rows, len(tokens[0]))
        for req, length, row, below in zip(batch.reqs, batch.seq_lens.tolist(), tokens, children, strict=True):
            text = self.texts.get(tuple(req.origin_input_ids[:KEY]))
            if text is not None:
                dice = random.Random(f"{req.rid}-{length}")
                plant(row, below, text[length + 1 :], lambda dice=dice: dice.random() < self.probability)
        drafted.copy_(drafted.new_tensor(tokens).reshape(drafted.shape))

    def children(self, verify_input: Any, rows: int, width: int) -> list[Callable[[int], list[int]]]:
        """Return for each request what lists the children of a node of its tree."""
        tables = verify_input.retrieve_next_token, verify_input.retrieve_next_sibling
        if verify_input.topk == 1 or tables[0] is None:
            return [lambda node: [node + 1] if node + 1 < width else []] * rows
        firsts, siblings = (table.view(rows, width).tolist() for table in tables)
        return [functools.partial(family, first, sibling) for first, sibling in zip(firsts, siblings, strict=True)]


def family(first: Sequence[int], sibling: Sequence[int], node: int) -> list[int]:
    """Children of a node, by first child and next sibling of each; -1 where there is none.

    >>> family([1, 3, -1, -1], [-1, 2, -1, -1], 0)
    [1, 2]
    """
    found, child = [], first[node]
    while child >= 0:
        found.append(child)
        child = sibling[child]
    return found


def plant(
    tokens: list[int], children: Callable[[int], list[int]], text: Sequence[int], right: Callable[[], bool]
) -> None:
    """Write the beginning of ``text`` along one path below node 0 of ``tokens``, for as long as ``right`` says so.

    >>> tokens = [7, 1, 2, 3]
    >>> plant(tokens, functools.partial(family, [1, -1, 3, -1], [-1, 2, -1, -1]), [50, 60, 70], lambda: True)
    >>> tokens
    [7, 1, 50, 60]
    """
    node = 0
    for token in text:
        below = children(node)
        if not below or not right():
            return
        node = max(below, key=lambda child: (bool(children(child)), child))
        for child in below:
            if child != node and tokens[child] == token:
                tokens[child] = token - 1 if token else 1  # the verify takes the first sibling that is right
        tokens[node] = token
