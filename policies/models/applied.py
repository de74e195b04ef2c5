"""With which steps (K) a decode step really ran, told from its record."""

from __future__ import annotations

from collections import Counter

from specpilot.sglang_hooks.wire import StepRecord


class AppliedSteps:
    """Tells the K that was applied from ``draft_tokens``, which is of the step's own result.

    In a chain (top-k 1) K is ``draft_tokens - 1``, whatever was asked for. In a tree each K has a
    width of its own, so the width with which a K is mostly recorded is taken for that K's; a step
    of another width is of the K whose width that is, or of none that is known.

    >>> from tests.support.messages import record
    >>> AppliedSteps(topk=1).of(record(steps=3, draft_tokens=6))
    5
    >>> tree = AppliedSteps(topk=4)
    >>> [tree.of(record(steps=k, draft_tokens=n)) for k, n in ((2, 8), (2, 8), (3, 16), (2, 16), (2, 4))]
    [2, 2, 3, 3, None]
    """

    def __init__(self, topk: int) -> None:
        self._chain = topk <= 1
        self._widths: dict[int, Counter[int]] = {}

    def of(self, step: StepRecord) -> int | None:
        """Return K, or None where it cannot be told. To be asked once for each record, in order."""
        if self._chain:
            return max(step.draft_tokens - 1, 0)
        widths = self._widths.setdefault(step.steps, Counter())
        widths[step.draft_tokens] += 1
        if widths.most_common(1)[0][0] == step.draft_tokens:
            return step.steps
        usual = {steps: seen.most_common(1)[0][0] for steps, seen in self._widths.items()}
        return next((steps for steps, width in usual.items() if width == step.draft_tokens), None)
