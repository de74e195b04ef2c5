"""Bounds on K: placed for a reason, by the newest evidence, and gone in time."""

from __future__ import annotations

from specpilot.policies.goodput import Goodput
from specpilot.policies.rules.vetoes import MEMORY_SECONDS, RETRACTION_SECONDS, Vetoes
from specpilot.sglang_hooks.table_policy import CompiledTable
from tests.support.messages import hello, record

CANDIDATES = [0, 1, 3, 7]


def test_memory_leaves_the_k_that_fits() -> None:
    vetoes = Vetoes()
    vetoes.observe(record(batch_size=10, kv_used_tokens=1000 - 2 * 10 * 8), 3, CANDIDATES, 1000, now=0.0)
    assert vetoes.max_steps(0.0) is None
    vetoes.observe(record(batch_size=10, kv_used_tokens=1000 - 2 * 10 * 8 + 1), 3, CANDIDATES, 1000, now=0.0)
    assert vetoes.max_steps(0.0) == 3
    vetoes.observe(record(batch_size=10, kv_used_tokens=1001), 3, CANDIDATES, 1000, now=1.0)
    assert vetoes.max_steps(1.0) == 0
    assert "KV cache" in vetoes.reasons(1.0)[0]
    assert vetoes.max_steps(1.0 + MEMORY_SECONDS) is None
    assert vetoes.reasons(1.0 + MEMORY_SECONDS) == []


def test_an_unknown_cache_size_is_no_veto() -> None:
    vetoes = Vetoes()
    vetoes.observe(record(kv_used_tokens=10**9), 3, CANDIDATES, 0, now=0.0)
    assert vetoes.max_steps(0.0) is None


def test_each_retraction_takes_one_candidate() -> None:
    vetoes = Vetoes()
    bounds = []
    for steps in (7, 3, 1, 0, 0):
        vetoes.observe(record(retracted=2), steps, CANDIDATES, 0, now=0.0)
        bounds.append(vetoes.max_steps(0.0))
    assert bounds == [3, 1, 0, 0, 0]
    assert vetoes.max_steps(RETRACTION_SECONDS - 0.1) == 0
    assert vetoes.max_steps(RETRACTION_SECONDS) is None


def test_the_tightest_counts_and_each_expires_by_itself() -> None:
    vetoes = Vetoes()
    vetoes.place("operator", 3, 100.0, "trial")
    vetoes.observe(record(retracted=1), 1, CANDIDATES, 0, now=50.0)
    assert vetoes.max_steps(50.0) == 0
    assert len(vetoes.reasons(50.0)) == 2
    assert vetoes.max_steps(60.0) == 3
    assert vetoes.max_steps(100.0) is None


def test_a_policy_under_a_veto_keeps_to_it_everywhere_and_returns() -> None:
    server = hello(candidate_steps=[0, 1, 3], captured_batch_sizes=[1, 2, 4], max_running_requests=4, kv_tokens=10_000)
    policy = Goodput()
    free = policy.decide(server, 0.0)
    assert set(free.choice) == {3}
    policy.learn(record(retracted=1, batch_size=2, padded_batch_size=2))
    bounded = policy.decide(server, 1.0)
    assert set(bounded.choice) == {1}
    assert all(k <= 1 for kept in bounded.keep for k in kept)
    assert all(k <= 1 for row in bounded.explore.values() for k, _ in row)
    assert "retracted" in bounded.reason
    CompiledTable.compile(bounded.table(1, 5.0, "goodput"), server.candidate_steps)
    assert set(policy.decide(server, 2.0 + RETRACTION_SECONDS).choice) == {3}


def test_an_operators_bound_holds_for_ever_and_never_leaves_a_server_without_a_k() -> None:
    server = hello(candidate_steps=[1, 3])
    assert set(Goodput(max_steps=2).decide(server, 1e9).choice) == {1}
    assert set(Goodput(max_steps=0).decide(server, 1e9).choice) == {1}
