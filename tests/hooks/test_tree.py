"""A server that drafts a tree: its policy, its two kinds of steps, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang

import sglang.srt.managers.scheduler  # noqa: E402, F401  (as in a scheduler process, when plugins load)
from sglang.kernels.ops.speculative import cache_locs  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2  # noqa: E402

from specpilot.sglang_hooks import plugin, skip_hooks, tree  # noqa: E402
from specpilot.sglang_hooks.installed import active_agent  # noqa: E402
from specpilot.sglang_hooks.recorder import Recorder  # noqa: E402
from tests.support import sglang_rig as rig  # noqa: E402
from tests.support import skip_rig  # noqa: E402
from tests.support.resume_rig import Server  # noqa: E402
from tests.support.skip_rig import SkipWorker  # noqa: E402

STEPS, TOPK, TOKENS = 2, 4, 16


def tree_worker() -> SkipWorker:
    worker = SkipWorker()
    worker.topk = worker._draft_worker.topk = TOPK
    worker.speculative_num_steps, worker.speculative_num_draft_tokens = STEPS, TOKENS
    return worker


@pytest.fixture
def active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The plugin as it is when SGLang is about to build its draft worker."""
    monkeypatch.setenv("SPECPILOT_ENDPOINT", f"ipc://{tmp_path}/none.ipc")
    monkeypatch.setattr(cache_locs, "assign_extend_cache_locs_uniform_func", skip_rig.slots_of_next_token)
    monkeypatch.setattr(plugin, "drafts_a_tree", lambda worker: worker is not None and worker.topk > 1)
    server = Server(monkeypatch)
    override = rig.publish_config()
    plugin.activate()
    with get_parallel().override(pp_size=1, tp_group=skip_rig.SINGLE):
        yield server
    plugin.uninstall()
    override.restore()


@pytest.fixture
def server(active: Server) -> Server:
    worker = tree_worker()
    scheduler = SimpleNamespace(draft_worker=worker)
    plugin._after_init_draft_worker(None, scheduler)
    active.serve(worker, 4)
    plugin._after_init_model_worker(None, scheduler)
    return active


def test_only_sglangs_own_worker_with_a_tree_is_one() -> None:
    worker = EAGLEWorkerV2.__new__(EAGLEWorkerV2)
    worker.topk, worker.adaptive_controller = 4, None
    assert tree.drafts_a_tree(worker)
    worker.topk = 1
    assert not tree.drafts_a_tree(worker)
    assert not tree.drafts_a_tree(tree_worker())  # SGLang's frozen-KV and standalone workers are subclasses too
    assert not tree.drafts_a_tree(None)


def test_the_policy_knows_the_tree_and_skipping(server: Server) -> None:
    controller = server.worker.adaptive_controller
    assert controller.params is active_agent().policy
    assert controller.params.candidate_steps == [0, STEPS]
    assert controller.params.fallback_steps == STEPS
    controller.register(object())
    controller.init_states(None)
    assert server.worker.speculative_num_steps == STEPS


def test_the_tree_and_skips_follow_each_other(server: Server) -> None:
    policy = server.worker.adaptive_controller.params
    reqs = [server.join(5), server.join(9)]
    widths = []
    server.accepted = 3
    for steps in (STEPS, 0, 0, STEPS, STEPS, 0, STEPS):
        policy.fallback_steps = steps
        widths.append(server.step(steps).speculative_num_draft_tokens)
        assert server.worker.speculative_num_draft_tokens == TOKENS
    assert widths == [TOKENS, 1, 1, TOKENS, TOKENS, 1, TOKENS]
    assert [server.missing(req) for req in reqs] == [[], []]
    assert [shown.extend_seq_lens_cpu for shown in server.kv.batches] == [[2, 2], [1, 1]]
    assert server.drafted_width == ((2, TOPK), (2, TOPK))


def test_the_relay_has_the_width_of_the_tree(server: Server) -> None:
    server.worker.adaptive_controller.params.fallback_steps = 0
    server.join(5)
    draft = server.step(0).next_draft_input
    assert draft.topk_p.shape == draft.topk_index.shape == (1, TOPK)


def test_a_caught_up_draft_offers_its_best_tokens(server: Server) -> None:
    policy = server.worker.adaptive_controller.params
    server.join(5)
    policy.fallback_steps = 0
    server.step(0)
    policy.fallback_steps = STEPS
    server.step(STEPS)
    [(best, hidden)] = server.drafted_from
    assert (best, hidden) == (int(skip_rig.next_token(torch.tensor(6))), 5)


def test_records_expect_the_width_of_the_tree(server: Server) -> None:
    policy, queued = server.worker.adaptive_controller.params, []
    queue: Any = SimpleNamespace(put=queued.append)
    recorder = Recorder(policy, queue, [1, 2], True, lambda: (1, 0, 0), tree_tokens=TOKENS)
    for forward, (steps, width) in enumerate(((STEPS, TOKENS), (0, 1), (0, TOKENS)), start=1):
        policy.fallback_steps, policy.forward_iter = steps, forward
        policy.get_steps_for_batch(1)
        batch = SimpleNamespace(
            reqs=[SimpleNamespace(finished_reason=None, is_retracted=False)], forward_iter=forward, launch_ts=0.0,
            has_grammar=False,
        )  # fmt: skip
        recorder.launched(batch, decode=True)
        server.worker.adaptive_controller.on_verify_complete([0], batch_size=1)
        result = SimpleNamespace(
            speculative_num_draft_tokens=width, num_correct_drafts_per_req_cpu=[0], can_run_cuda_graph=True
        )
        recorder.settled(batch, result, [])
    assert recorder.steps_mismatched == 1  # the last: a tree where nothing should have been drafted
    assert [(record.steps, record.draft_tokens) for record in queued] == [(STEPS, TOKENS), (0, 1), (0, TOKENS)]
    assert [record.previous_width for record in queued] == [0, TOKENS, 1]


def test_a_chain_is_left_to_sglang(active: Server) -> None:
    worker = SkipWorker()
    plugin._after_init_draft_worker(None, SimpleNamespace(draft_worker=worker))
    assert worker.adaptive_controller is None
    with pytest.raises(SystemExit, match="--speculative-adaptive"):
        plugin._after_init_model_worker(None, SimpleNamespace(draft_worker=worker))


def test_a_tree_that_cannot_be_skipped_is_refused(active: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tree_worker()
    scheduler = SimpleNamespace(draft_worker=worker)
    with monkeypatch.context() as patch:
        patch.setattr(plugin, "version_reason", lambda: "verify is gone")
        with pytest.raises(SystemExit, match="verify is gone"):
            plugin._after_init_draft_worker(None, scheduler)
    plugin._after_init_draft_worker(None, scheduler)
    with pytest.raises(SystemExit, match="the device is cpu"):
        skip_hooks.after_init_cuda_graphs(None, worker)
    worker.runner.device, worker.page_size = "cuda", 16
    worker.runner.attn_backend = type("TritonAttnBackend", (), {})()
    with pytest.raises(SystemExit, match="--page-size"):
        skip_hooks.after_init_cuda_graphs(None, worker)


def test_sglangs_own_k0_is_none_for_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("SPECPILOT_SKIP", "verify")
    request.getfixturevalue("active")
    with pytest.raises(SystemExit, match="unset SPECPILOT_SKIP"):
        plugin._after_init_draft_worker(None, SimpleNamespace(draft_worker=tree_worker()))
