"""What a policy tells of itself is what it decides by."""

from __future__ import annotations

import math

import pytest

from specpilot.controller.simulation.surface import H200_8B, acceptance_length
from specpilot.policies.goodput import Goodput
from specpilot.policies.knowledge import Knowledge, Outlook
from specpilot.policies.static import Static
from specpilot.sglang_hooks.wire import MASKED
from tests.support.messages import hello, record
from tests.support.snapshots import SERVER, learned


@pytest.fixture(scope="module")
def known() -> Knowledge:
    knowledge = learned()[0].describe()
    assert knowledge is not None
    return knowledge


def outlook(known: Knowledge, batch: int) -> Outlook:
    columns = len(known.context_edges) + 1
    found = known.cells[known.batch_edges.index(batch) * columns]
    assert found is not None
    return found


def test_its_estimates_are_those_of_the_server(known: Knowledge) -> None:
    for position in known.positions:
        assert position.acceptance.low < 0.7 < position.acceptance.high
        assert position.samples > 100
    for batch in (8, 64):
        for candidate in outlook(known, batch).candidates():
            seconds = H200_8B.decode_seconds(candidate.steps, batch)
            assert candidate.seconds.value == pytest.approx(seconds, rel=0.02)
            assert candidate.tokens.value == pytest.approx(acceptance_length(0.7, candidate.steps), rel=0.03)
            assert candidate.tokens_per_second == pytest.approx(
                batch * candidate.tokens.value / candidate.seconds.value
            )
            assert candidate.tried


def test_the_choice_is_the_most_tokens_per_second(known: Knowledge) -> None:
    for cell in filter(None, known.cells):
        candidates = {candidate.steps: candidate for candidate in cell.candidates()}
        chosen = candidates[cell.choice]
        assert (chosen.against_choice.value, chosen.against_choice.low) == (0.0, 0.0)
        for candidate in candidates.values():
            assert candidate.tokens_per_second <= chosen.tokens_per_second * 1.004
            assert candidate.against_choice.low <= candidate.against_choice.value <= candidate.against_choice.high
    assert outlook(known, 8).choice == 3
    assert outlook(known, 64).choice == 0


def test_the_sentence_says_which_and_why(known: Knowledge) -> None:
    at_8, at_64 = outlook(known, 8).explain(), outlook(known, 64).explain()
    assert at_8.startswith("K=3 is expected to make ")
    assert "more tokens a second than K=0" in at_8
    assert at_64.startswith("K=0 is expected to make 1.00 tokens a request in a step of ")
    assert "more tokens a second than K=" in at_64
    untried = next(cell for cell in known.cells if cell is not None and not any(cell.tried))
    assert "was not tried at this batch size yet" in untried.explain()


def test_gain_is_of_what_ran_not_of_what_was_chosen() -> None:
    """A server in shadow mode runs its fallback: speculation costs, whatever the policy would do."""
    policy = Goodput()
    learned(policy=policy)
    knowledge = policy.describe()
    assert knowledge is not None
    gain = knowledge.gain()
    assert gain is not None
    assert gain.value == pytest.approx(0.0, abs=0.03)  # mostly K=0, at batch 64
    for seq in range(5000, 5300):
        policy.learn(record(record_seq=seq, batch_size=64, padded_batch_size=64, context_tokens=32000,
                            accepted_drafts=[1] * 64, seconds=H200_8B.decode_seconds(3, 64)))  # fmt: skip
    policy.decide(SERVER, 60.0)
    costing = policy.describe().gain()  # type: ignore[union-attr]
    assert costing is not None
    assert costing.high < -0.05


def test_nothing_is_told_before_it_is_known() -> None:
    assert Static(3).describe() is None
    policy = Goodput()
    assert policy.describe() is None
    policy.decide(SERVER, 0.0)
    fresh = policy.describe()
    assert fresh is not None
    assert fresh.gain() is None
    assert (fresh.explored_steps, fresh.explored_seconds, fresh.drafter_broken) == (0, 0.0, False)
    assert [position.samples for position in fresh.positions] == [0.0] * 3
    assert any(cell is None for cell in fresh.cells)


def test_a_server_that_cannot_skip_has_no_gain_over_it() -> None:
    policy, _ = learned(1000, server=hello(captured_batch_sizes=[8, 64], candidate_steps=[1, 3]))
    knowledge = policy.describe()
    assert knowledge is not None
    assert knowledge.gain() is None
    assert all(cell.explain() for cell in knowledge.cells if cell is not None)


def test_a_server_that_only_skips_has_no_positions() -> None:
    policy, _ = learned(200, server=hello(captured_batch_sizes=[8, 64], candidate_steps=[0], fallback_steps=0))
    knowledge = policy.describe()
    assert knowledge is not None
    assert knowledge.positions == ()
    assert knowledge.cells[0] is not None
    assert "K=0" in knowledge.cells[0].explain()


def test_time_lost_to_exploration_counts_probes_alone() -> None:
    policy = Goodput()
    learned(policy=policy)
    at_64 = {candidate.steps: candidate for candidate in outlook(policy.describe(), 64).candidates()}  # type: ignore[arg-type]
    before = policy.describe()
    for seq in range(5000, 5010):
        policy.learn(record(record_seq=seq, batch_size=64, padded_batch_size=64, context_tokens=32000, block=seq,
                            accepted_drafts=[MASKED] * 64, seconds=H200_8B.decode_seconds(3, 64)))  # fmt: skip
    after = policy.describe()
    assert before is not None
    assert after is not None
    assert after.explored_steps - before.explored_steps == 10
    lost = (after.explored_seconds - before.explored_seconds) / 10
    slower = at_64[3].seconds.value * -at_64[3].against_choice.value
    assert lost >= slower * 0.9
    assert math.isfinite(lost)
