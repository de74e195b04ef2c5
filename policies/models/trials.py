"""Which drafts of a decode step were trials of acceptance, and which of those passed, told from its record."""

from __future__ import annotations

from specpilot.sglang_hooks.wire import MASKED, StepRecord


def trials_of(step: StepRecord, max_steps: int) -> tuple[list[int], list[int]]:
    """Return trials and accepted drafts by position of one record; both lists are empty where it has no trial.

    Draft j of a request was a trial if the j-1 drafts before it were accepted, and passed if it was
    accepted too. Beyond a request's end, beyond K, and at K=0 there is no trial. The lists have
    min(K, ``max_steps``) entries; rows that are MASKED do not count.

    >>> from tests.support.messages import record
    >>> trials_of(record(accepted_drafts=[3, 1, 0, MASKED, 1], truncated=[4]), max_steps=8)
    ([4, 2, 1], [3, 1, 1])
    """
    accepted = step.accepted_drafts
    reached = len(accepted) - accepted.count(MASKED)
    depth = min(step.draft_tokens - 1, max_steps)
    trials: list[int] = []
    passed: list[int] = []
    if reached == 0:
        return trials, passed
    ended = [accepted[row] for row in step.truncated]
    for position in range(depth):
        trials.append(reached - ended.count(position) if ended else reached)
        reached -= accepted.count(position)
        passed.append(reached)
    return trials, passed
