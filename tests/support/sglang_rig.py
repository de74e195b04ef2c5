"""Real SGLang 0.5.23 classes around a fake GPU, for tests of the hooks.

Real: Req, ScheduleBatch, SchedulerRequestReceiver with ZMQ sockets and gloo broadcast,
Scheduler.process_input_requests, init_request_dispatcher and _forward_isolation,
EAGLEWorkerV2.forward_batch_generation and apply_runtime_state, AdaptiveController,
SchedulerBatchResultProcessor. Fake: the forward passes of draft and target, and the
collaborators that a decode step only reports to.
"""

from __future__ import annotations

import array
import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import zmq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

CAPTURED = [1, 2, 4, 8, 16, 32, 64]


class FakeDraftWorker(EagleDraftWorkerBase):
    """Drafts nothing; keeps the attributes that a switch of state writes."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.topk = 1
        self.device = "cpu"
        self.server_args = None
        self.speculative_num_steps = steps
        self.speculative_num_draft_tokens = steps + 1
        self.draft_runner = SimpleNamespace(draft_attn_backend=None, attn_backend=None)
        self.parallel_layout = SimpleNamespace(tp_group=None, disable_cp=False)

    def draft(self, batch: Any) -> Any:
        return SimpleNamespace(is_verify_input=lambda: True, kv_loc_plan=None)

    def draft_extend(self) -> None: ...

    def _draft_extend_for_decode(self, batch: Any, result: Any, kv_loc_plan: Any = None) -> None: ...


class FakeGpuWorker(EAGLEWorkerV2):
    """EAGLEWorkerV2 whose verify accepts what ``accept(batch, steps)`` says, without a GPU."""

    def __init__(self, initial_steps: int, config: str | None, accept: Callable[[Any, int], list[int]]) -> None:
        self._draft_worker = FakeDraftWorker(initial_steps)
        self._target_worker = SimpleNamespace(
            model_runner=SimpleNamespace(
                attn_backend=SimpleNamespace(verify_mask=None, max_context_len=32),
                decode_cuda_graph_runner=SimpleNamespace(capture_bs=CAPTURED),
                device="cpu",
            )
        )
        self.topk = 1
        self.device = "cpu"
        self.speculative_num_steps = initial_steps
        self.speculative_num_draft_tokens = initial_steps + 1
        self._hosts_draft = True
        self.accept = accept
        # As EAGLEWorkerV2.__init__ does, through the names that it looks up.
        self.adaptive_controller = eagle_worker_v2.AdaptiveController(
            self, eagle_worker_v2.AdaptiveSpeculativeParams(initial_steps=initial_steps, cfg_path=config)
        )
        self.adaptive_controller.init_states()
        self.applied: list[int] = []

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: Any = None
    ) -> SpecRuntimeState:
        backend = self._target_worker.model_runner.attn_backend
        return SpecRuntimeState(
            speculative_num_steps, speculative_num_draft_tokens, None, None, backend, MagicMock(), None, None
        )

    def verify(self, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> GenerationBatchResult:
        width = self.speculative_num_draft_tokens
        if width == 1:  # sgl_kernel's verify_tree_greedy refuses anything else
            assert batch.spec_info.draft_token.dtype == torch.int64, "Expected 'candidates' to be of type long"
        self.applied.append(width - 1)
        batch.forward_mode = ForwardMode.TARGET_VERIFY  # as the real one leaves it within the isolation
        accepted = self.accept(batch, width - 1)
        lengths = torch.tensor([n + 1 for n in accepted], dtype=torch.int32)
        return GenerationBatchResult(
            next_token_ids=torch.full((len(accepted) * width,), 7),
            accept_lens=lengths,
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=True,
            new_seq_lens=batch.seq_lens + lengths,
        )


def publish_config(tp_size: int = 1) -> Any:
    """Install a dummy server configuration, as SGLang's own tests do; undo with ``restore()``."""
    override = get_context().override_server_args(
        model_path="dummy",
        tp_size=tp_size,
        speculative_algorithm="EAGLE3",
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
    )
    override.install()
    return override


def request(rid: str, prompt: int, max_new: int) -> Req:
    params = SamplingParams(max_new_tokens=max_new, temperature=0, ignore_eos=True)
    params.normalize(None)
    return Req(rid, "", array.array("q", range(prompt)), params, vocab_size=1000)


def result_processor(worker: Any, overlap: bool) -> SchedulerBatchResultProcessor:
    fields = {f.name: MagicMock(name=f.name) for f in dataclasses.fields(SchedulerBatchResultProcessor)}
    fields["model_config"] = SimpleNamespace(
        self_opened_think_start_ids=None, think_end_ids=None, is_multimodal=False, vocab_size=1000
    )
    fields["metrics_reporter"] = MagicMock(num_generated_tokens=0, forward_ct_decode=0)
    fields.update(enable_overlap=overlap, enable_overlap_mlx=False, model_worker=worker)
    return SchedulerBatchResultProcessor(**fields)


def receiver(context: zmq.Context[Any], name: str) -> tuple[SchedulerRequestReceiver, zmq.Socket[bytes]]:
    """Return a receiver with real sockets, and the tokenizer's end of the first."""
    pull = context.socket(zmq.PULL)
    pull.bind(f"inproc://{name}-tokenizer")
    rpc = context.socket(zmq.DEALER)
    rpc.bind(f"inproc://{name}-rpc")
    push = context.socket(zmq.PUSH)
    push.connect(f"inproc://{name}-tokenizer")
    made = SchedulerRequestReceiver(
        recv_from_tokenizer=pull,
        recv_from_rpc=rpc,
        recv_skipper=None,
        input_blocker=None,
        mm_receiver=None,
        server_args=None,
        model_config=SimpleNamespace(is_multimodal=False),
        max_recv_per_poll=-1,
        stream_output=lambda *_: None,
        get_last_batch=lambda: None,
    )
    return made, push


def scheduler_stub(worker: Any, overlap: bool, **changes: Any) -> Any:
    """A ``self`` for real Scheduler methods; the dispatcher is made by the real initialiser."""
    stub = MagicMock(name="scheduler")
    stub.draft_worker = worker
    stub.tp_worker = worker._target_worker if worker is not None else MagicMock()
    stub.server_args = SimpleNamespace(
        model_path="target-8b",
        speculative_draft_model_path="eagle3-8b",
        speculative_algorithm="EAGLE3",
        host="127.0.0.1",
        port=30000,
        dp_size=1,
    )
    stub.ps = None  # as from 0.5.21 on: ranks come from get_parallel()
    stub.enable_overlap = overlap
    stub.max_running_requests = 64
    stub.max_total_num_tokens = 10_000
    stub.token_to_kv_pool_allocator.available_size.return_value = 9_000
    stub.tree_cache.evictable_size.return_value = 500
    stub.running_batch = SimpleNamespace(reqs=[])
    stub.waiting_queue = []
    stub.model_config = SimpleNamespace(context_len=32768)
    stub.return_health_check_ipcs = []
    stub._tokenized_requests = lambda request: ()
    stub.external_corpus_manager = None
    for name, value in changes.items():
        setattr(stub, name, value)
    return stub


class Loop:
    """SGLang's decode loop by hand: receive, launch N, then settle N (lag 0) or N-1 (lag 1)."""

    def __init__(self, scheduler: Any, worker: FakeGpuWorker, requests: SchedulerRequestReceiver, lag: int) -> None:
        self.scheduler, self.worker, self.receiver, self.lag = scheduler, worker, requests, lag
        self.processor = result_processor(worker, overlap=bool(lag))
        self.reqs: list[Req] = []
        self.in_flight: list[tuple[ScheduleBatch, GenerationBatchResult]] = []
        self.forward_ct = 0

    def receive(self) -> None:
        Scheduler.process_input_requests(self.scheduler, self.receiver.recv_requests())

    def step(self) -> None:
        """One pass of the loop, with a decode of the live requests if there are any."""
        self.receive()
        if any(req.finished() for req in self.reqs):
            self.reqs = [req for req in self.reqs if not req.finished()]
        if self.reqs:
            self.in_flight.append(self.launch())
        while len(self.in_flight) > (self.lag if self.reqs else 0):
            self.settle()

    def launch(self) -> tuple[ScheduleBatch, GenerationBatchResult]:
        self.forward_ct += 1
        batch = ScheduleBatch(reqs=self.reqs)
        batch.forward_mode = ForwardMode.DECODE
        batch.spec_algorithm = SpeculativeAlgorithm.from_string("EAGLE3")
        batch.seq_lens = torch.tensor([req.seqlen for req in self.reqs])
        # Without overlap the bonus tokens come as verify left them, as int32.
        tokens = torch.full((len(self.reqs),), 7, dtype=torch.int64 if self.lag else torch.int32)
        batch.spec_info = SimpleNamespace(is_verify_input=lambda: False, bonus_tokens=tokens)
        batch.forward_iter, batch.launch_ts = self.forward_ct, time.monotonic()
        with Scheduler._forward_isolation(self.scheduler, batch, overlap=False):
            result = self.worker.forward_batch_generation(batch)
        return batch.copy(), result

    def settle(self) -> None:
        batch, result = self.in_flight.pop(0)
        self.processor.process_batch_result_decode(batch, result)
