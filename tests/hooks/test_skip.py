"""K=0 as a decode step, on the real SGLang classes: who may, what runs, what comes back, what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang

import sglang.srt.managers.scheduler  # noqa: E402, F401  (as in a scheduler process, when plugins load)
from sglang.kernels.ops.speculative import cache_locs  # noqa: E402
from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative import eagle_worker_v2  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleDraftInput  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from specpilot.sglang_hooks import contract, plugin, skip, skip_hooks  # noqa: E402
from specpilot.sglang_hooks.installed import installed  # noqa: E402
from specpilot.sglang_hooks.resume import Resume  # noqa: E402
from tests.contract.wheels import Edited  # noqa: E402
from tests.support import sglang_rig as rig  # noqa: E402
from tests.support import skip_rig  # noqa: E402
from tests.support.skip_rig import SkipWorker  # noqa: E402


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin's hooks in place, as in a scheduler whose policy was built."""
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": [0, 1, 3]}}))
    monkeypatch.setenv("SPECPILOT_ENDPOINT", f"ipc://{tmp_path}/none.ipc")
    monkeypatch.setattr(cache_locs, "assign_extend_cache_locs_uniform_func", skip_rig.slots_of_next_token)
    override = rig.publish_config()
    plugin.activate()
    with get_parallel().override(pp_size=1, tp_group=skip_rig.SINGLE):
        eagle_worker_v2.AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(config))
        yield
    plugin.uninstall()
    override.restore()


@pytest.fixture
def worker(hooks: None) -> SkipWorker:
    made = SkipWorker()
    installed.skip = skip.DecodeSkip(made, "decode-backend", "decode-graphs", Resume(made, 1 << 20))
    return made


class Server:
    """Requests that are decoded step by step, through the isolation and the result processor."""

    def __init__(
        self, worker: SkipWorker, prompts: list[int], overlap: bool, max_new: int = 1000, **wants: Any
    ) -> None:
        self.worker, self.overlap, self.wants = worker, overlap, wants
        self.reqs = [rig.request(str(i), prompt, max_new) for i, prompt in enumerate(prompts)]
        for req in self.reqs:
            req.kv.kv_committed_len = req.seqlen
            req.return_logprob = wants.get("return_logprob", False)
        self.processor = rig.result_processor(worker, overlap)
        self.lengths = torch.tensor(prompts)
        tokens = skip_rig.next_token(self.lengths)  # what each prefill gave
        for req, token in zip(self.reqs, tokens.tolist(), strict=True):
            req.output_ids.append(token)
        # The relay of overlap scheduling gathers int64; without it the int32 that a verify made comes back.
        self.bonus = tokens if overlap else tokens.to(torch.int32)
        self.published: list[torch.Tensor] = []

    def batch(self) -> ScheduleBatch:
        batch = ScheduleBatch(reqs=self.reqs)
        batch.forward_mode = ForwardMode.DECODE
        batch.spec_algorithm = self.worker.speculative_algorithm
        batch.device = "cpu"
        batch.seq_lens = self.lengths
        batch.seq_lens_cpu = self.wants.get("seq_lens_cpu")
        batch.req_pool_indices = torch.arange(len(self.reqs)) + 2
        batch.sampling_info = skip_rig.sampling_info(len(self.reqs))
        batch.return_logprob = self.wants.get("return_logprob", False)
        batch.has_grammar = self.wants.get("has_grammar", False)
        batch.spec_info = EagleDraftInput(bonus_tokens=self.bonus)
        return batch

    def launch(self, batch: ScheduleBatch, **more: Any) -> Any:
        with Scheduler._forward_isolation(SimpleNamespace(), batch, overlap=False):
            return self.worker.forward_batch_generation(batch, **more)

    def step(self) -> Any:
        batch = self.batch()
        result = self.launch(batch, on_publish=self.published.append)
        self.lengths = result.new_seq_lens
        self.bonus = result.next_draft_input.bonus_tokens.to(self.bonus.dtype)
        self.processor.process_batch_result_decode(batch.copy(), result)
        return result


# -- who may --

REASONS = [
    ("runner", "device", "npu", "the device is npu"),
    ("runner", "spec_algorithm", SpeculativeAlgorithm.from_string("NGRAM"), "only EAGLE, EAGLE3 and STANDALONE"),
    ("runner", "attn_backend", object(), "attention is object"),
    ("runner", "use_mla_backend", True, "MLA"),
    ("runner", "is_hybrid_swa", True, "sliding-window"),
    ("runner", "req_to_token_pool", type("HybridReqToTokenPool", (), {})(), "Mamba"),
    ("config", "is_encoder_decoder", True, "encoder-decoder"),
    ("config", "model_is_mrope", True, "rotary"),
    ("runner", "ngram_embedding_manager", SimpleNamespace(enabled=True), "n-gram"),
    ("runner", "hisparse_coordinator", object(), "hisparse"),
    ("runner", "canary_manager", object(), "canary"),
    ("runner", "watermark_state", object(), "watermarking"),
    ("runner", "lora_manager", object(), "--enable-lora"),
]


def supported() -> SkipWorker:
    worker = SkipWorker()
    worker.runner.device = "cuda"
    worker.runner.attn_backend = type("TritonAttnBackend", (), {})()
    return worker


@pytest.mark.parametrize(("owner", "name", "value", "says"), REASONS, ids=[row[1] for row in REASONS])
def test_what_was_not_tested_stays_sglangs_own(hooks: None, owner: str, name: str, value: Any, says: str) -> None:
    worker = supported()
    assert skip.unsupported_reason(worker) == ""
    setattr({"worker": worker, "runner": worker.runner, "config": worker.runner.model_config}[owner], name, value)
    assert says in skip.unsupported_reason(worker)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("backend", skip.ATTENTION_BACKENDS)
def test_chain_drafts_on_the_known_attention_backends_may(hooks: None, algorithm: str, backend: str) -> None:
    worker = supported()
    worker.runner.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
    worker.runner.attn_backend = type(backend, (), {})()
    assert skip.unsupported_reason(worker) == ""


def test_settings_of_the_process_are_looked_at(hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with get_parallel().override(pp_size=2):
        assert "pipeline" in skip.unsupported_reason(supported())
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "1")
    assert "TOKEN_ORACLE" in skip.unsupported_reason(supported())


def test_this_sglang_is_known() -> None:
    assert skip.version_reason() == ""


def test_another_sglang_keeps_its_own_k0_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    moved = ("pp_proxy_tensors=None, grammar_barrier=None", "grammar_barrier=None, plan=None")
    edited = Edited(contract.installed(), eagle_worker_v2.__name__, moved)
    monkeypatch.setattr(contract, "installed", lambda: edited)
    request.getfixturevalue("hooks")
    assert not [patch for patch in installed.patches if patch.target.endswith((".verify", "init_cuda_graphs"))]
    [line] = [r.getMessage() for r in caplog.records if "stays SGLang's own" in r.getMessage()]
    assert "EAGLEWorkerV2.verify: parameter plan is new in SGLang" in line


def test_the_option_turns_it_off(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("SPECPILOT_SKIP", "verify")
    request.getfixturevalue("hooks")
    assert not [patch for patch in installed.patches if patch.target.endswith(".verify")]


# -- the start --


def test_a_server_that_may_not_says_why_once(hooks: None, caplog: pytest.LogCaptureFixture) -> None:
    skip_hooks.after_init_cuda_graphs(None, SkipWorker())
    assert installed.skip is None
    assert [r.getMessage() for r in caplog.records if "the device is cpu" in r.getMessage()]


def test_the_graphs_are_built_and_their_memory_is_told(
    hooks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, made, free = supported(), [], iter([(30_000_000_000, 0), (28_500_000_000, 0)])
    worker.runner.init_new_workspace = "before"
    backend = SimpleNamespace(_verify_mask="large")
    monkeypatch.setattr(skip, "_memory", lambda: next(free))
    monkeypatch.setattr(skip, "decode_runner_class", lambda hidden: lambda *a, **kw: made.append((a, kw)) or "graphs")
    entered = []

    def attention(init_new_workspace: bool) -> Any:
        entered.append((init_new_workspace, worker.runner.init_new_workspace))
        worker.runner.init_new_workspace = init_new_workspace
        return backend

    worker.runner._get_attention_backend = attention
    worker._override_worker_state = lambda *widths: entered.append(widths) or contextlib.nullcontext()
    worker.device = "cpu"
    with caplog.at_level(logging.INFO, logger="specpilot.sglang_hooks.skip_hooks"):
        skip_hooks.after_init_cuda_graphs(None, worker)
    assert entered == [(0, 1), (True, "before")]
    assert worker.runner.init_new_workspace == "before"
    assert backend._verify_mask is None
    expected = {"attn_backend": backend, "speculative_num_steps": 0, "speculative_num_draft_tokens": 1}
    assert made == [((worker.runner,), expected)]
    [line] = [r.getMessage() for r in caplog.records if "plain decode step" in r.getMessage()]
    assert "took 1.50 GB (28.50 GB left)" in line
    assert "newest 1024 skipped positions" in line


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Exception("Capture cuda graph failed: CUDA out of memory. Tried ..."), "--mem-fraction-static"),
        (RuntimeError("an illegal memory access was encountered"), "SPECPILOT_SKIP=verify"),
    ],
)
def test_a_capture_that_fails_ends_the_start(
    hooks: None, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def build(worker: Any, ring_bytes: int) -> Any:
        raise error

    monkeypatch.setattr(skip.DecodeSkip, "build", build)
    with pytest.raises(SystemExit, match=says):
        skip_hooks.after_init_cuda_graphs(None, supported())


@pytest.mark.parametrize(("hidden", "mode"), [(True, CaptureHiddenMode.FULL), (False, CaptureHiddenMode.NULL)])
def test_the_runner_captures_decodes_whatever_its_base_decides(hidden: bool, mode: Any) -> None:
    cls = skip.decode_runner_class(hidden)
    assert issubclass(cls, DecodeCudaGraphRunner)
    runner = cls.__new__(cls)
    runner.capture_forward_mode = ForwardMode.TARGET_VERIFY  # as the base constructor does under speculation
    runner.return_hidden_states_mode = CaptureHiddenMode.LAST
    assert runner.capture_forward_mode == ForwardMode.DECODE
    assert runner.return_hidden_states_mode == mode
    assert runner.get_spec_info(4) is None


# -- a step --


@pytest.mark.parametrize("overlap", [False, True])
def test_a_skipped_step_is_a_plain_decode(worker: SkipWorker, overlap: bool) -> None:
    server = Server(worker, [5, 9, 20], overlap)
    server.step()
    [forward] = worker.seen
    assert forward.forward_mode == ForwardMode.DECODE
    assert forward.spec_info is None
    assert forward.input_ids.tolist() == skip_rig.next_token(torch.tensor([5, 9, 20])).tolist()
    assert forward.input_ids.dtype == forward.out_cache_loc.dtype == torch.int64
    assert forward.positions.tolist() == [5, 9, 20]
    assert forward.seq_lens.tolist() == forward.orig_seq_lens.tolist() == [6, 10, 21]
    assert forward.out_cache_loc.tolist() == [2 * 64 + 5, 3 * 64 + 9, 4 * 64 + 20]
    assert forward.capture_hidden_mode == CaptureHiddenMode.FULL
    assert worker.installed == [("decode-backend", "decode-graphs")]
    assert (worker.runner.attn_backend, worker.runner.decode_cuda_graph_runner) == ("verify-backend", "verify-graphs")
    assert [lengths.tolist() for lengths in server.published] == [[6, 10, 21]]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_and_lengths_are_those_of_the_model(worker: SkipWorker, overlap: bool) -> None:
    server = Server(worker, [5, 9], overlap)
    for _ in range(12):
        result = server.step()
        assert result.num_correct_drafts_per_req_cpu == [0, 0]
        assert result.accept_lens.tolist() == [1, 1]
    for req, prompt in zip(server.reqs, (5, 9), strict=True):
        assert list(req.output_ids) == skip_rig.next_token(torch.arange(prompt, prompt + 13)).tolist()
        assert req.kv.kv_committed_len == prompt + 12
        assert req.spec_verify_ct == 12


def test_requests_end_at_their_length_and_overshoot_adds_nothing(worker: SkipWorker) -> None:
    server = Server(worker, [5, 9], overlap=True, max_new=3)
    for _ in range(4):
        server.step()
    assert [len(req.output_ids) for req in server.reqs] == [3, 3]
    assert all(req.finished() for req in server.reqs)


def test_log_probabilities_have_the_shape_of_a_verifys(worker: SkipWorker) -> None:
    server = Server(worker, [5, 9], overlap=True, return_logprob=True)
    for req in server.reqs:
        req.logprob.output_token_logprobs_val, req.logprob.output_token_logprobs_idx = [], []
        req.logprob.top_logprobs_num, req.logprob.token_ids_logprob = 0, None
    result = server.step()
    assert len(result.logits_output.next_token_logprobs[0]) == 1
    for req in server.reqs:
        assert req.logprob.output_token_logprobs_idx == [req.output_ids[-1]]
        assert req.logprob.output_token_logprobs_val[0] == pytest.approx(-0.0443, abs=1e-3)


def test_the_batch_is_given_back_as_it_was(worker: SkipWorker) -> None:
    server = Server(worker, [5, 9], overlap=True, seq_lens_cpu=torch.tensor([5, 9]))
    batch = server.batch()
    before = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    lengths, mirror = batch.seq_lens.clone(), batch.seq_lens_cpu.clone()
    server.launch(batch)
    assert all(getattr(batch, name) is value for name, value in before.items())
    assert torch.equal(batch.seq_lens, lengths)
    assert torch.equal(batch.seq_lens_cpu, mirror)
    [forward] = worker.seen
    assert (forward.seq_lens_cpu.tolist(), forward.seq_lens_sum) == ([6, 10], 16)


def test_grammars_see_the_step_before_after_the_launch(worker: SkipWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    forward, sample = worker.forward_target, worker.runner.sample
    worker._target_worker.forward_batch_generation = lambda **kw: order.append("launch") or forward(**kw)
    monkeypatch.setattr(worker.runner, "sample", lambda *a: order.append("sample") or sample(*a))
    server = Server(worker, [5], overlap=True, has_grammar=True)
    server.reqs[0].grammar = SimpleNamespace()
    server.launch(server.batch(), grammar_barrier=lambda: order.append("grammar"))
    assert order == ["launch", "grammar", "sample"]
    assert worker.seen[0].sampling_info.grammars == [server.reqs[0].grammar]


def test_ranks_that_sample_agree(worker: SkipWorker) -> None:
    sent = []
    group = SimpleNamespace(world_size=2, broadcast=lambda tokens, src: sent.append((tokens, src)))
    installed.skip._tp_group = group
    server = Server(worker, [5, 9], overlap=True)
    server.launch(server.batch())
    assert sent == []  # argmax of the same logits
    batch = server.batch()
    batch.sampling_info.is_all_greedy = False
    result = server.launch(batch)
    assert sent[0][0] is result.next_token_ids
    assert sent[0][1] == 0


def test_what_the_next_step_reads_has_the_shapes_of_a_draft_extends(worker: SkipWorker) -> None:
    server = Server(worker, [5, 9, 12], overlap=False)
    draft = server.launch(server.batch()).next_draft_input
    assert (draft.topk_p.shape, draft.topk_p.dtype) == ((3, 1), torch.float32)
    assert (draft.topk_index.shape, draft.topk_index.dtype) == ((3, 1), torch.int64)
    assert (draft.hidden_states.shape, draft.hidden_states.dtype) == ((3, skip_rig.HIDDEN), torch.bfloat16)
    # Without overlap the scheduler filters and merges it.
    draft.filter_batch(torch.tensor([0, 2]))
    draft.merge_batch(server.launch(server.batch()).next_draft_input)
    assert draft.topk_p.shape == (5, 1)
    assert draft.bonus_tokens.tolist() == [45, 94, 45, 73, 94]


def test_a_standalone_draft_gets_no_hidden_states(worker: SkipWorker) -> None:
    standalone = SpeculativeAlgorithm.from_string("STANDALONE")
    worker.runner.spec_algorithm = worker._draft_worker.draft_runner.spec_algorithm = standalone
    installed.skip = skip.DecodeSkip(worker, "decode-backend", None, Resume(worker, 1 << 20))
    server = Server(worker, [5], overlap=True)
    assert server.launch(server.batch()).next_draft_input.hidden_states is None
    assert worker.seen[0].capture_hidden_mode == CaptureHiddenMode.NULL


def test_hidden_states_of_the_graph_are_not_kept(worker: SkipWorker) -> None:
    server = Server(worker, [5], overlap=True)
    assert server.launch(server.batch()).logits_output.hidden_states is None
    batch = server.batch()
    batch.return_hidden_states = True
    assert server.launch(batch).logits_output.hidden_states.shape == (1, 3 * skip_rig.HIDDEN)


# -- the event that lets the scheduler go on --


def test_the_event_is_moved_to_where_the_scheduler_looks(worker: SkipWorker) -> None:
    draft = worker._draft_worker.draft_runner
    draft.shared_read_done_event = "of an earlier step"
    server = Server(worker, [5], overlap=True)
    server.step()
    assert worker.last_shared_read_runner is draft
    assert (draft.shared_read_done_event, worker.runner.shared_read_done_event) == ("read-done", None)


def test_an_eager_step_leaves_no_event_of_an_earlier_one(worker: SkipWorker) -> None:
    worker.graph = False
    draft = worker._draft_worker.draft_runner
    draft.shared_read_done_event = worker.runner.shared_read_done_event = "of an earlier step"
    Server(worker, [5], overlap=True).step()
    assert (draft.shared_read_done_event, worker.runner.shared_read_done_event) == (None, None)


# -- whose step it is --


def test_a_forward_that_fails_leaves_the_verify_graphs_in_place(worker: SkipWorker) -> None:
    worker.fail = RuntimeError("boom")
    server = Server(worker, [5], overlap=True)
    with pytest.raises(RuntimeError, match="boom"):
        server.step()
    assert (worker.runner.attn_backend, worker.runner.decode_cuda_graph_runner) == ("verify-backend", "verify-graphs")


@pytest.mark.parametrize("stub", ["0", "1"])
def test_only_a_skip_leaves_the_draft_out(
    worker: SkipWorker, monkeypatch: pytest.MonkeyPatch, stub: str, request: pytest.FixtureRequest
) -> None:
    """Steps with K>0 and SGLang's own K=0 keep their draft-extend, or their stub of it."""
    monkeypatch.setenv("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", stub)
    server = Server(worker, [5], overlap=True)
    server.step()
    called = []
    patches = {patch.target.rsplit(".", 1)[1]: patch for patch in installed.patches}
    for name in ("verify", "_draft_extend_for_decode", "_stub_skipped_draft_extend"):
        hook = skip_hooks.around_verify if name == "verify" else skip_hooks.around_draft_extend
        reply = lambda *a, name=name, **kw: called.append(name) or SimpleNamespace(new_seq_lens=None)  # noqa: E731
        wrapped = lambda *a, hook=hook, reply=reply, **kw: hook(reply, *a, **kw)  # noqa: E731
        monkeypatch.setattr(patches[name].owner, name, wrapped)
    worker._draft_worker.draft = lambda batch: SimpleNamespace(is_verify_input=lambda: True, kv_loc_plan=None)
    worker.speculative_num_steps, worker.speculative_num_draft_tokens = 1, 2
    server.launch(server.batch())
    assert called == ["verify", "_draft_extend_for_decode"]
    worker.speculative_num_steps, worker.speculative_num_draft_tokens = 0, 1
    called.clear()
    server.step()
    assert called == []


def test_an_idle_batch_is_sglangs(worker: SkipWorker) -> None:
    batch = Server(worker, [5], overlap=True).batch()
    batch.forward_mode = ForwardMode.IDLE
    assert installed.skip.begin(batch) is None
    assert type(worker._build_trivial_verify_input(batch)).__name__ == "EagleVerifyInput"


def test_hello_says_what_k0_is(tmp_path: Path) -> None:
    from specpilot.sglang_hooks.agent import Agent, ServerFacts
    from specpilot.sglang_hooks.settings import Settings
    from specpilot.sglang_hooks.table_policy import TablePolicy

    for candidates, kind, says in (([0, 1], "decode", "decode"), ([0, 1], "verify", "verify"), ([1], "decode", "none")):
        settings = Settings(endpoint=f"ipc://{tmp_path}/none.ipc")
        agent = Agent(settings, TablePolicy(settings, candidates, 1))
        agent.start(ServerFacts(server_id="s", rank=1, skip=kind))
        assert agent.hello().skip == says
