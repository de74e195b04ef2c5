"""The hooks on the real SGLang classes: each target found, patched, driven, and put back."""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from specpilot.sglang_hooks import plugin, uses
from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.contract import RIG_VERSION
from specpilot.sglang_hooks.installed import Installed, installed
from specpilot.sglang_hooks.settings import SettingsError
from specpilot.sglang_hooks.table_policy import CompiledTable, TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource
from tests.support.messages import table
from tests.support.peers import Peer

pytestmark = pytest.mark.sglang

import sglang.srt.managers.scheduler  # noqa: E402, F401  (as in a scheduler process, when plugins load)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative import adaptive_spec_params, eagle_worker_v2  # noqa: E402

from tests.support import sglang_rig as rig  # noqa: E402

TARGETS = plugin.targets()


def attributes() -> dict[str, Any]:
    found = {}
    for target in TARGETS:
        owner, name = target.rsplit(".", 1)
        found[target] = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    return found


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with Peer(tmp_path) as made:
        yield made


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": {"candidate_steps": [0, 1, 3]}}))
    return str(path)


@pytest.fixture
def active(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECPILOT_ENDPOINT", peer.endpoint)
    monkeypatch.setenv("SPECPILOT_MIN_TABLE_INTERVAL_SECONDS", "0")
    override = rig.publish_config()
    plugin.activate()
    yield
    plugin.uninstall()
    override.restore()


@pytest.fixture(params=[0, 1], ids=["lag0", "lag1"])
def loop(request: pytest.FixtureRequest, active: None, config: str) -> Iterator[rig.Loop]:
    """A started server: hooks in place, agent talking to ``peer``."""
    context = zmq.Context()
    single = SimpleNamespace(rank=0, ranks=[0])
    with get_parallel().override(
        pp_rank=0, tp_rank=0, attn_tp_rank=0, attn_cp_rank=0, dp_rank=0, tp_group=single, attn_dp_enabled=False
    ):
        worker = rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [min(2, steps)] * len(batch.reqs))
        scheduler = rig.scheduler_stub(worker, overlap=bool(request.param))
        rig.Scheduler.init_request_dispatcher(scheduler)
        requests, _ = rig.receiver(context, f"r{id(worker)}")
        yield rig.Loop(scheduler, worker, requests, request.param)
    context.destroy(linger=0)


def test_every_target_is_found_patched_and_put_back(active: None, config: str) -> None:
    patched_early = {patch.target for patch in installed.patches}
    rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [])
    assert {patch.target for patch in installed.patches} == set(TARGETS)
    assert patched_early == set(TARGETS[:3])
    assert set(TARGETS) <= HookRegistry._patched
    hooked = attributes()
    assert issubclass(hooked[TARGETS[0]], TablePolicy)
    assert eagle_worker_v2.AdaptiveSpeculativeParams is hooked[TARGETS[0]]
    for target in TARGETS[1:]:
        assert hooked[target].__wrapped__.__name__ == target.rsplit(".", 1)[1]


def test_uninstall_leaves_sglang_as_it_was(peer: Peer, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    before = attributes()
    monkeypatch.setenv("SPECPILOT_ENDPOINT", peer.endpoint)
    override = rig.publish_config()
    plugin.activate()
    rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [])
    assert all(attributes()[target] is not before[target] for target in TARGETS)
    plugin.uninstall()
    override.restore()
    assert attributes() == before
    assert eagle_worker_v2.AdaptiveSpeculativeParams is adaptive_spec_params.AdaptiveSpeculativeParams
    assert not HookRegistry._patched.intersection(TARGETS)
    assert not logging.getLogger(uses.WORKER_MODULE).filters


def test_hooks_of_another_plugin_on_the_same_target_stay(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    calls = []
    target = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.apply_runtime_state"
    before = attributes()[target]
    HookRegistry.register(target, lambda *_: calls.append(1), HookType.AFTER)
    HookRegistry.apply_hooks()
    monkeypatch.setenv("SPECPILOT_ENDPOINT", peer.endpoint)
    override = rig.publish_config()
    plugin.activate()
    worker = rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [])
    worker.adaptive_controller._activate(1)
    assert calls == [1] * len(calls) != []
    n = len(calls)
    plugin.uninstall()
    worker.adaptive_controller._activate(0)
    assert len(calls) == n + 1
    assert attributes()[target].__wrapped__ is before
    setattr(*(eagle_worker_v2.EAGLEWorkerV2, "apply_runtime_state", before))
    HookRegistry.reset()
    override.restore()


def test_steps_stream_out_and_a_table_changes_the_steps_that_follow(loop: rig.Loop, peer: Peer) -> None:
    hello = peer.hello()
    assert (hello.candidate_steps, hello.captured_batch_sizes, hello.skip) == (
        [0, 1, 3],
        rig.CAPTURED,
        "verify",
    )
    assert (hello.overlap, hello.kv_tokens, hello.context_length) == (bool(loop.lag), 10_000, 32768)
    loop.reqs = [rig.request("a", 100, 400), rig.request("b", 50, 400)]
    for _ in range(10):
        loop.step()
    peer.send_table(table(epoch=1, steps=0), wait=installed.agent)
    for _ in range(10):
        loop.step()
    assert loop.worker.applied == [3] * 10 + [0] * 10
    records = peer.records(20 - loop.lag)
    assert [r.record_seq for r in records] == list(range(20 - loop.lag))
    assert [r.step for r in records] == list(range(1, 21 - loop.lag))
    assert [r.steps for r in records] == loop.worker.applied[: len(records)]
    assert all(r.draft_tokens == r.steps + 1 for r in records)
    assert all(r.accepted_drafts == [min(2, r.steps)] * 2 for r in records)
    assert [(r.source, r.epoch) for r in records] == [(0, 0)] * 10 + [(1, 1)] * (10 - loop.lag)
    assert all(r.padded_batch_size == 2 and r.graph and r.kv_used_tokens == 500 for r in records)
    # Exactly what the host knew at each launch: everything but the step in flight.
    tokens = [2 * (min(2, r.steps) + 1) for r in records]
    assert [r.context_tokens for r in records] == [
        150 + sum(tokens[: max(i - loop.lag, 0)]) for i in range(len(records))
    ]
    assert [r.forwards for r in records[1:]] == [1] * (len(records) - 1)
    assert all(r.seconds > 0 for r in records[1:])
    agent = installed.agent
    assert (agent.recorder.join_misses, agent.recorder.steps_mismatched, agent.failures) == (0, 0, 0)


def test_retractions_are_in_the_next_record(loop: rig.Loop, peer: Peer) -> None:
    peer.hello()
    loop.reqs = [rig.request(str(i), 10 + i, 10_000) for i in range(3)]
    loop.step()
    batch = rig.ScheduleBatch(reqs=list(loop.reqs))
    fits = iter([False, True, True])
    # What SGLang asks of its memory pool: two of three requests have to go.
    batch._get_decode_retraction_order = lambda *args: [0, 1, 2]
    batch.check_decode_mem = lambda **kwargs: next(fits)
    batch.release_req = lambda *args, **kwargs: True
    batch.filter_batch = lambda **kwargs: None
    retracted, _, _ = batch.retract_decode()
    assert len(retracted) == 2
    loop.reqs = loop.reqs[:1]
    for _ in range(4):
        loop.step()
    counts = [record.retracted for record in peer.records(5 - loop.lag)]
    assert sum(counts) == 2
    assert counts[1 - loop.lag] == 2


def test_joins_hold_while_tables_land_between_launch_and_result(loop: rig.Loop, peer: Peer) -> None:
    """Learning uses what was applied: every table lands after a launch, before that step's result."""
    peer.hello()
    agent = installed.agent
    loop.reqs = [rig.request(str(i), 10 + i, 10_000) for i in range(3)]
    asked = []
    for epoch in range(1, 200):
        steps = (0, 1, 3)[epoch % 3]
        loop.in_flight.append(loop.launch())
        asked.append(loop.worker.applied[-1])
        agent.apply(PolicyUpdate(table=CompiledTable.compile(table(epoch=epoch, steps=steps), [0, 1, 3])))
        while len(loop.in_flight) > loop.lag:
            loop.settle()
    records = peer.records(len(asked) - loop.lag)
    assert [r.steps for r in records] == asked[: len(records)]
    assert [r.epoch for r in records] == list(range(len(records)))
    assert all(r.draft_tokens == r.steps + 1 for r in records)
    assert len(set(asked)) == 3
    assert agent.recorder.steps_mismatched == 0


def test_rows_that_ended_are_masked_and_cut(loop: rig.Loop, peer: Peer) -> None:
    """6 tokens wanted, 3 a step: under overlap the row comes once more after its end, masked."""
    peer.hello()
    loop.reqs = [rig.request("short", 10, 5), rig.request("long", 10, 12)]
    for _ in range(8):
        loop.step()
    records = peer.records(loop.forward_ct)
    assert [r.accepted_drafts for r in records][:2] == [[2, 2], [1, 2]]  # 3 + 3 tokens, one beyond the end
    assert [r.truncated for r in records][:2] == [[], [0]]
    if loop.lag:
        assert records[2].accepted_drafts == [-1, 2]
        assert records[-1].accepted_drafts == [-1]
    else:
        assert records[2].accepted_drafts == [2]
    emitted = sum(n + 1 for r in records for n in r.accepted_drafts if n >= 0)
    assert emitted == 5 + 12


def test_a_recording_that_fails_on_rank_0_changes_no_decision(
    loop: rig.Loop, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decisions depend on the context; if it stopped on rank 0 alone, the ranks would part."""
    peer.hello()
    agent = installed.agent
    peer.send_table(table(epoch=1, choice=[3, 0], keep=[[], []], context_edges=[140]), wait=agent)
    loop.reqs = [rig.request("a", 100, 1000)]
    monkeypatch.setattr(agent.recorder, "_load", lambda: 1 / 0)
    for _ in range(30):
        loop.step()
    assert agent.recorder is None
    assert agent.failures == 1
    assert [r.getMessage() for r in caplog.records if "records no more steps" in r.getMessage()]
    launched_with = loop.reqs[0].seqlen - (0 if loop.lag else loop.worker.applied[-1] + 1)
    assert agent.policy.mean_context == pytest.approx(launched_with, abs=3)
    assert loop.worker.applied == sorted(loop.worker.applied, reverse=True)
    assert set(loop.worker.applied) == {3, 0}


def test_a_batch_that_cannot_be_read_stops_switching_and_nothing_else(
    loop: rig.Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = installed.agent
    loop.reqs = [rig.request("a", 100, 1000)]
    loop.step()
    monkeypatch.setattr(agent._context, "launched", lambda batch: 1 / 0)
    for _ in range(5):
        loop.step()
    agent.apply(PolicyUpdate(table=CompiledTable.compile(table(epoch=1, steps=0), [0, 1, 3])))
    loop.step()
    assert agent.policy.source == DecisionSource.HALTED
    assert loop.worker.applied == [3] * 7
    assert len(loop.reqs[0].output_ids) == 3 * (7 - loop.lag)


def test_on_verify_complete_never_switches(loop: rig.Loop) -> None:
    assert loop.worker.adaptive_controller.params.on_verify_complete([3, 3], batch_size=2) is None


def test_switching_leaves_nothing_behind(loop: rig.Loop, caplog: pytest.LogCaptureFixture) -> None:
    """1,000 switches: one override entry, one pair of buffers per K, no log line."""
    controller, draft = loop.worker.adaptive_controller, loop.worker._draft_worker
    controller._activate(0)
    entries = len(get_context()._overrides_log)
    buffers = set()
    with caplog.at_level(logging.DEBUG, logger="sglang"):
        for i in range(1000):
            controller._activate((1, 3, 0)[i % 3])
            buffers.add(draft._topk1_parents_prealloc.data_ptr() if i % 3 == 1 else None)
    assert len(get_context()._overrides_log) <= entries + 1
    assert get_context()._overrides_log[-1][1] == {
        "speculative_num_steps": 1,
        "speculative_num_draft_tokens": 2,
    }
    assert len(buffers - {None}) == 1
    assert not [r for r in caplog.records if "Switch adaptive" in r.getMessage()]


def test_shadow_decides_but_never_applies(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, config: str, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("SPECPILOT_MODE", "shadow")
    request.getfixturevalue("active")
    worker = rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [])
    policy = worker.adaptive_controller.params
    policy.adopt(CompiledTable.compile(table(steps=0), [0, 1, 3]))
    assert policy.get_steps_for_batch(4) == 3
    launch = policy.take_launch(0)
    assert (launch.steps, launch.proposed_steps, launch.source) == (3, 0, DecisionSource.TABLE)


# -- failures at start are loud --


@pytest.mark.parametrize("value", [None, "", " "])
def test_without_an_endpoint_the_plugin_is_inert(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("SPECPILOT_ENDPOINT", raising=False)
    else:
        monkeypatch.setenv("SPECPILOT_ENDPOINT", value)
    before = attributes()
    plugin.activate()
    assert attributes() == before
    assert installed == Installed()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SPECPILOT_ENDPOINT", "tcp://1.2.3.4:5", "specpilot keygen"),
        ("SPECPILOT_MODE", "on", "'control' or 'shadow'"),
        ("SPECPILOT_FALBACK", "1", "SPECPILOT_FALBACK is not an option"),
        ("SPECPILOT_MAX_STEPS_BY_BATCH", "64", "batch:steps pairs"),
        ("SPECPILOT_QUEUE_RECORDS", "0", "above 0"),
    ],
)
def test_a_wrong_option_ends_the_start(name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_ENDPOINT", "ipc:///tmp/none.ipc")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=says):
        plugin.activate()


def test_what_kubernetes_puts_beside_a_service_of_our_name_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"SPECPILOT_{name}", "tcp://10.0.0.1:80")
    monkeypatch.setenv("SPECPILOT_ENDPOINT", "ipc:///tmp/none.ipc")
    plugin.activate()
    plugin.uninstall()


def test_an_untested_version_ends_the_start_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang

    monkeypatch.setenv("SPECPILOT_ENDPOINT", "ipc:///tmp/none.ipc")
    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    with pytest.raises(SystemExit, match=r"SGLang 0\.6\.0 is not one of the tested versions"):
        plugin.activate()
    monkeypatch.setenv("SPECPILOT_ALLOW_UNTESTED", "1")
    plugin.activate()
    plugin.uninstall()


def test_a_fallback_that_is_no_candidate_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, config: str
) -> None:
    monkeypatch.setenv("SPECPILOT_FALLBACK", "7")
    request.getfixturevalue("active")
    with pytest.raises(SystemExit, match=r"SPECPILOT_FALLBACK=7 is not among .*\[0, 1, 3\]"):
        rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [])
    assert issubclass(SettingsError, ValueError)


def test_the_rig_version_must_start_at_its_widest_step(
    active: None, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang

    monkeypatch.setattr(sglang, "__version__", RIG_VERSION)
    with pytest.raises(SystemExit, match="--speculative-num-steps 3"):
        rig.FakeGpuWorker(1, config, accept=lambda batch, steps: [])


def test_a_server_that_stopped_adapting_ends_the_start(active: None) -> None:
    stub = rig.scheduler_stub(None, overlap=True)
    stub.draft_worker = SimpleNamespace(adaptive_controller=None)
    with pytest.raises(SystemExit, match="--speculative-adaptive"):
        plugin._after_init_model_worker(None, stub)


def test_a_moved_target_ends_the_start(active: None, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(eagle_worker_v2.EAGLEWorkerV2, "apply_runtime_state")
    with pytest.raises(SystemExit, match=r"not what this .* knows \(.*EAGLEWorkerV2\.apply_runtime_state is gone"):
        rig.FakeGpuWorker(3, config, accept=lambda batch, steps: [])
