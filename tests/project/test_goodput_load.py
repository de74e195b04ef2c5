"""``benchmarks/live/goodput_load.py``: its arms on real SGLang classes, and its figures of hand-made steps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from specpilot.sglang_hooks import plugin
from specpilot.sglang_hooks.installed import active_agent
from tests.support.messages import table
from tests.support.peers import Peer

pytestmark = pytest.mark.sglang

import sglang.srt.managers.scheduler  # noqa: E402, F401  (as in a scheduler process, when plugins load)
import torch  # noqa: E402
from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative import spec_utils  # noqa: E402

from tests.support import sglang_rig as rig  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/live"))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with Peer(tmp_path) as made:
        yield made


@pytest.fixture
def loop(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[rig.Loop, Any]]:
    """A started server under overlap scheduling, that accepts two drafts, with the arms attached."""
    import goodput_arms

    monkeypatch.setenv("SPECPILOT_ENDPOINT", peer.endpoint)
    monkeypatch.setenv("SPECPILOT_MIN_TABLE_INTERVAL_SECONDS", "0")
    # The arms replace both for the life of a scheduler process; here they are put back.
    monkeypatch.setattr(spec_utils, "generate_simulated_accept_index", spec_utils.generate_simulated_accept_index)
    override = rig.publish_config()
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": [0, 1, 3]}}))
    context = zmq.Context()
    plugin.activate()
    single = SimpleNamespace(rank=0, ranks=[0])
    with get_parallel().override(
        pp_rank=0, tp_rank=0, attn_tp_rank=0, attn_cp_rank=0, dp_rank=0, tp_group=single, attn_dp_enabled=False
    ):
        worker = rig.FakeGpuWorker(3, str(config), accept=lambda batch, steps: [min(2, steps)] * len(batch.reqs))
        scheduler = rig.scheduler_stub(worker, overlap=True)
        rig.Scheduler.init_request_dispatcher(scheduler)
        requests, _ = rig.receiver(context, f"g{id(worker)}")
        hooked = batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode
        arms = goodput_arms.Arms(active_agent(), tmp_path)
        arms.attach()
        yield rig.Loop(scheduler, worker, requests, 1), arms
        batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode = hooked
    context.destroy(linger=0)
    plugin.uninstall()
    override.restore()


def test_arms_decide_in_turn_and_only_the_tables_steps_are_recorded(
    loop: tuple[rig.Loop, Any], peer: Peer, tmp_path: Path
) -> None:
    import goodput_load
    from goodput_arms import SGLANG, TABLE, Board

    server, _ = loop
    board = Board(tmp_path)
    board.write(1, 0, 0.7)
    peer.hello()
    peer.send_table(table(epoch=1, steps=1), active_agent())
    server.reqs = [rig.request(str(i), 10, 1000) for i in range(4)]
    for number, (arm, steps) in enumerate([(0, 0), (TABLE, 1), (3, 3), (SGLANG, 3), (TABLE, 1)], start=1):
        board.write(number, arm, 0.7)
        begun = len(server.worker.applied)
        for _ in range(6):
            server.step()
        # A pass that receives the table decides by it; SGLang's rule begins at the K it was started with.
        assert server.worker.applied[begun:] == [steps] * 6
    board.write(6, 0, 0.7)
    server.step()
    server.step()
    board.write(7, 0, 0.7)
    server.step()
    rows = goodput_load.read_rows(tmp_path / "steps.jsonl")
    assert [[row[2] for row in rows[number]] for number in range(1, 6)] == [[0] * 6, [1] * 6, [3] * 6, [3] * 6, [1] * 6]
    assert all(row[1] == 4 and row[4] == 4 * (min(2, row[2]) + 1) for number in range(1, 6) for row in rows[number])
    # Five of six steps in each of the two blocks; those left out are gaps in the numbers, not losses of the queue.
    records = peer.records(10)
    peer.poll()
    assert [(record.steps, record.epoch) for record in records] == [(1, 1)] * 10
    assert [b.record_seq - a.record_seq for a, b in itertools.pairwise(records)] == [*[1] * 4, 14, *[1] * 4]
    assert peer.dropped == 0
    assert active_agent().failures == 0


def test_a_request_that_ends_counts_the_tokens_that_its_client_gets(loop: tuple[rig.Loop, Any], tmp_path: Path) -> None:
    import goodput_load
    from goodput_arms import Board

    server, _ = loop
    board = Board(tmp_path)
    board.write(1, 3, 0.7)
    server.reqs = [rig.request("a", 10, 4), rig.request("b", 10, 8)]
    while server.reqs:
        server.step()
    server.reqs = [rig.request("c", 10, 50)]
    board.write(2, 3, 0.7)
    server.step()
    rows = goodput_load.read_rows(tmp_path / "steps.jsonl")[1]
    assert sum(row[4] for row in rows) == 12
    assert [row[1] for row in rows] == [2, 2, 1, 0]  # under overlap one step more is run for those that ended


def test_acceptance_is_drawn_for_each_request_and_draft(loop: tuple[rig.Loop, Any], tmp_path: Path) -> None:
    import goodput_load

    _, arms = loop
    arms.acceptance = 0.6
    torch.manual_seed(1)
    requests, steps = 20_000, 3
    width = steps + 1
    first = torch.arange(requests, dtype=torch.int32)[:, None] * width
    index = torch.cat([first, torch.full((requests, steps), -1, dtype=torch.int32)], 1)
    predict = torch.zeros(requests * width, dtype=torch.int32)
    accepted = torch.empty(requests, dtype=torch.int32)
    candidates = 100 + torch.arange(width).repeat(requests, 1)
    target = 200 + torch.arange(width).repeat(requests, 1)
    found = spec_utils.generate_simulated_accept_index(
        accept_index=index, predict=predict, num_correct_drafts=accepted, candidates=candidates,
        target_predict=target, simulate_acc_len=1.0, simulate_acc_token_mode="real-draft-token",
        bs=requests, spec_steps=steps,
    )  # fmt: skip
    assert accepted.float().mean() + 1 == pytest.approx(goodput_load.tokens_of(steps, 0.6), abs=0.03)
    for row in range(50):
        n = int(accepted[row])
        assert found[row].tolist() == [row * width + i if i <= n else -1 for i in range(width)]
        # What was accepted are the draft's tokens after the first, then comes the target's own.
        tokens = predict[found[row][: n + 1].long()].tolist()
        assert tokens == [*range(101, 101 + n), 200 + n]
    assert found.dtype == torch.int32


def test_sglangs_own_rule_gets_the_default_tiers_within_the_candidates() -> None:
    from goodput_arms import sglang_rule

    rule = sglang_rule([0, 1, 2, 3, 5], [1, 8, 64])
    assert rule.candidate_steps == [0, 1, 3, 5]
    assert rule.get_steps_for_batch(64) == rule.get_steps_for_batch(40) == 0  # 40 is padded to 64
    assert type(rule).__module__ == "sglang.srt.speculative.adaptive_spec_params"


def steps_of(start: float, count: int, k: int, seconds: float, requests: int = 2, tokens: int = 3) -> list[list[float]]:
    return [[start + (i + 1) * seconds, requests, k, seconds, tokens, 0] for i in range(count)]


def block(number: int, arm: int, start: float, **more: Any) -> dict[str, Any]:
    return {"block": number, "arm": arm, "acceptance": 0.5, "concurrency": 2, "washout": 0.25, "kind": "turn",
            "repetition": 0, "start": start, "end": start + 2.0, **more}  # fmt: skip


def test_every_arm_has_one_turn_in_each_repetition_and_no_fixed_place() -> None:
    import goodput_load

    arms = [0, 1, 2, 3, 5, -1]
    found = goodput_load.orders(arms, 3)
    assert all(sorted(order) == sorted(arms) for order in found)
    assert all(len({order.index(arm) for order in found}) > 1 for arm in arms)


def test_rates_are_of_steps_that_follow_each_other_after_the_washout() -> None:
    import goodput_load

    rows = steps_of(0.0, 25, 5, 0.01)  # the washout
    rows += steps_of(0.25, 10, 1, 0.1)
    rows += [[1.5, 2, 1, 0.0, 3, 1], [9.0, 2, 5, 0.01, 9, 0]]  # after a prefill; after the end
    found = goodput_load.figure(block(1, 1, 0.0), rows)
    assert found is not None
    assert found["tokens_per_second"] == pytest.approx(2 * 1.5 / 0.1)
    assert found["counted_tokens_per_second"] == pytest.approx(3 / 0.1)
    assert found["wall_tokens_per_second"] == pytest.approx(11 * 2 * 1.5 / 1.75)
    assert found["share_by_steps"] == {"1": 1.0}
    assert found["explored_share"] == pytest.approx(1 / 11)
    assert goodput_load.figure(block(1, 1, 0.0), []) is None


def test_goodput_is_compared_with_the_best_fixed_arm_of_the_same_repetition() -> None:
    import goodput_load
    from goodput_arms import TABLE

    # Seconds by repetition: the machine is slower in the second, for all alike.
    blocks, rows = [], {}
    cold = block(100, TABLE, 0.0, kind="cold")
    rows[100] = steps_of(0.0, 30, 3, 0.01) + steps_of(0.3, 100, 0, 0.01)
    for repetition, slow in enumerate([1.0, 2.0, 1.0]):
        for arm, k, seconds in ((0, 0, 0.010), (3, 3, 0.030), (TABLE, 0, 0.0101)):
            number, start = len(blocks), 10.0 * (len(blocks) + 1)
            blocks.append(block(number, arm, start, repetition=repetition))
            rows[number] = steps_of(start, int(2 / seconds / slow), k, seconds * slow)
    cells = {cell["arm"]: cell for cell in goodput_load.cell_figures([cold, *blocks], rows)}
    assert set(cells) == {"K=0", "K=3", "goodput"}
    assert cells["goodput"]["best_fixed"] == "K=0"
    assert cells["goodput"]["of_best_fixed"]["tokens_per_second"]["by_repetition"] == pytest.approx([0.9901] * 3)
    assert cells["goodput"]["repetitions"] == 3
    # The washout is no part of the rate, but the count begins with the block.
    assert cells["goodput"]["cold"]["settled_after_steps"] == 24
    assert "cold" not in cells["K=0"]


def test_passes_are_compared_by_their_tokens_once_they_are_whole() -> None:
    import goodput_load
    from goodput_arms import TABLE

    def one(first: int, arm: int, tokens: int, phases: int) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        blocks = [block(first + i, arm, 2.0 * i, washout=0.0) for i in range(phases)]
        return blocks, {b["block"]: steps_of(b["start"], 20, 0, 0.1, tokens=tokens) for b in blocks}

    whole = len(goodput_load.PHASES)
    passes = [one(0, TABLE, 6, whole), one(20, 0, 4, whole), one(40, 3, 5, whole - 1)]
    rows = {number: found for _, more in passes for number, found in more.items()}
    found = goodput_load.pass_figures([blocks for blocks, _ in passes], rows)
    assert [f["whole"] for f in found] == [True, True, False]
    assert found[0]["of_each_fixed"] == {"K=0": 1.5}
    assert found[0]["tokens"] == 6 * 20 * whole
