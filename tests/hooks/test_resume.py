"""Catching up after skips, on the real SGLang classes: what the draft is shown, and what comes of it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.sglang

import sglang.srt.managers.scheduler  # noqa: E402, F401  (as in a scheduler process, when plugins load)
from sglang.kernels.ops.speculative import cache_locs  # noqa: E402
from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: E402
from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative import eagle_worker_v2  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleDraftInput  # noqa: E402

from specpilot.sglang_hooks import plugin, resume  # noqa: E402
from specpilot.sglang_hooks.installed import active_agent, installed  # noqa: E402
from tests.support import sglang_rig as rig  # noqa: E402
from tests.support import skip_rig  # noqa: E402
from tests.support.resume_rig import Server, install  # noqa: E402
from tests.support.skip_rig import CONTEXT, HIDDEN, ROWS, SkipWorker  # noqa: E402


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the hooks in place and a ring of four positions."""
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": [0, 1, 3]}}))
    monkeypatch.setenv("SPECPILOT_ENDPOINT", f"ipc://{tmp_path}/none.ipc")
    monkeypatch.setattr(cache_locs, "assign_extend_cache_locs_uniform_func", skip_rig.slots_of_next_token)
    made = Server(monkeypatch)
    override = rig.publish_config()
    plugin.activate()
    with get_parallel().override(pp_size=1, tp_group=skip_rig.SINGLE):
        eagle_worker_v2.AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(config))
        made.serve(SkipWorker(), 4)
        yield made
    plugin.uninstall()
    override.restore()


# -- the ring --


def test_the_ring_takes_no_more_than_its_budget(server: Server) -> None:
    for positions in (0, 1, 8, 64):
        assert install(server.worker, positions).ring.nbytes == ROWS * positions * (3 * HIDDEN * 2 + 8)
    bytes_per_row = ROWS * (3 * HIDDEN * 2 + 8)
    assert resume.Resume(server.worker, 7 * bytes_per_row).ring.positions == 4
    assert resume.Resume(server.worker, bytes_per_row << 20).ring.positions == resume.MOST_POSITIONS


# -- what the draft is shown --


def test_the_pass_holds_the_missed_positions_of_all_requests(server: Server) -> None:
    first, second = server.join(5), server.join(20)
    server.step(0)
    third = server.join(9)
    server.step(0)
    server.step(1)
    [shown] = server.kv.batches
    assert shown.forward_mode == ForwardMode.DRAFT_EXTEND_V2
    assert shown.capture_hidden_mode == CaptureHiddenMode.FULL
    assert shown.batch_size == 3
    assert shown.req_pool_indices.tolist() == [2, 3, 4]
    assert shown.positions.tolist() == [5, 6, 20, 21, 9]
    assert shown.input_ids.tolist() == skip_rig.next_token(shown.positions + 1).tolist()
    assert shown.out_cache_loc.tolist() == [2 * 64 + 5, 2 * 64 + 6, 3 * 64 + 20, 3 * 64 + 21, 4 * 64 + 9]
    assert shown.spec_info.hidden_states[:, 0].tolist() == [5, 6, 20, 21, 9]
    assert shown.spec_info.hidden_states[:, 1].tolist() == [2, 2, 3, 3, 4]
    assert shown.seq_lens.tolist() == [7, 22, 10]
    assert (shown.extend_prefix_lens.tolist(), shown.extend_seq_lens.tolist()) == ([5, 20, 9], [2, 2, 1])
    assert (shown.extend_seq_lens_cpu, shown.extend_num_tokens) == ([2, 2, 1], 5)
    assert shown.spec_info.select_index.tolist() == [1, 3, 4]
    assert (shown.sampling_info, shown.return_logprob) == (None, False)
    assert all(a >= b for a, b in zip(shown.extend_prefix_lens_cpu, [5, 20, 9], strict=True))
    for req in (first, second, third):
        assert server.missing(req) == []


def test_the_draft_goes_on_from_the_newest_position(server: Server) -> None:
    server.join(5)
    server.join(20)
    for _ in range(3):
        server.step(0)
    server.step(1)
    # The fake draft predicts the token it was shown last.
    assert server.drafted_from == [(int(skip_rig.next_token(torch.tensor(n))), n - 1) for n in (8, 23)]


def test_requests_without_a_gap_keep_their_own_draft(server: Server) -> None:
    server.join(5)
    server.step(0)
    server.join(20)
    server.step(1)
    assert server.drafted_from == [(int(skip_rig.next_token(torch.tensor(6))), 5), (7, 0)]
    [shown] = server.kv.batches
    assert shown.req_pool_indices.tolist() == [2]


def test_nothing_is_shown_where_nothing_is_missing(server: Server) -> None:
    server.join(5)
    for _ in range(3):
        server.step(1)
    server.step(0)
    server.step(3)
    server.step(3)
    assert len(server.kv.batches) == 1


def test_long_gaps_are_shown_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "CHUNK_TOKENS", 6)
    reqs = [server.join(5 + n) for n in range(5)]
    for _ in range(3):
        server.step(0)
    server.step(1)
    assert [shown.batch_size for shown in server.kv.batches] == [2, 2, 1]
    assert [token for token, _ in server.drafted_from] == skip_rig.next_token(torch.arange(8, 13)).tolist()
    assert [server.missing(req) for req in reqs] == [[]] * 5


def test_the_mirror_of_lengths_goes_along(server: Server) -> None:
    server.join(5)
    req = server.join(20)
    server.step(0)
    batch = ScheduleBatch(reqs=server.reqs)
    batch.seq_lens, batch.seq_lens_cpu = torch.tensor([6, 21]), torch.tensor([6, 21])
    batch.req_pool_indices = torch.tensor([2, 3])
    batch.forward_mode, batch.device = ForwardMode.DECODE, "cpu"
    batch.spec_info = EagleDraftInput()
    installed.skip.resume.catch_up(batch)
    [shown] = server.kv.batches
    assert (shown.seq_lens_cpu.tolist(), shown.seq_lens_sum) == ([6, 21], 27)
    assert server.missing(req) == []
    assert batch.spec_info.topk_index.shape == (2, 1)


# -- past the ring --


def test_past_the_ring_the_newest_positions_are_shown(server: Server) -> None:
    req = server.join(5)
    for _ in range(7):
        server.step(0)
    server.step(1)
    assert server.missing(req) == [5, 6, 7]
    assert server.kv.batches[0].positions.tolist() == [8, 9, 10, 11]
    assert installed.skip.resume.gaps.holed(server.reqs) == [0]


def test_without_a_ring_nothing_is_shown(server: Server) -> None:
    install(server.worker, 0)
    req = server.join(5)
    server.step(0)
    server.step(1)
    assert server.kv.batches == []
    assert server.missing(req) == [5]
    assert installed.skip.resume.gaps.holed(server.reqs) == [0]


def test_a_retracted_request_begins_anew(server: Server) -> None:
    req = server.join(5)
    for _ in range(6):
        server.step(0)
    server.step(1)
    server.leave(req)
    server.free = [2]
    again = server.join(12, rid=req.rid)
    assert installed.skip.resume.gaps.holed(server.reqs) == []
    server.step(0)
    server.step(1)
    assert server.missing(again) == []


def test_under_overlap_a_result_is_settled_after_the_next_launch(server: Server) -> None:
    """What was known of a request at a step's launch is what counts when its result comes, one launch later."""
    gaps = installed.skip.resume.gaps
    req = server.join(5)
    for _ in range(5):
        server.step(0)
    assert gaps.holed(server.reqs) == []  # of the newest skip, when the step after it has been launched
    batch = server.reqs
    server.step(1)
    server.step(0)
    assert gaps.holed(batch) == [0]
    # The request had ended with the first of the two: the second still wrote into its row.
    server.leave(req)
    again = server.join(9)
    assert gaps.holed(server.reqs) == gaps.holed(batch) == []
    server.step(0)
    server.step(1)
    assert server.missing(again) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.integers(1, 8)),
            st.tuples(st.just("leave"), st.integers(0, 9)),
            st.tuples(st.just("step"), st.integers(0, 3)),
            st.tuples(st.just("step"), st.just(0)),
        ),
        max_size=18,
    )
)
def test_the_kv_is_that_of_never_having_skipped(server: Server, operations: list[tuple[str, int]]) -> None:
    """Of every request that no run of more than four skips hit, whatever joined and left in between."""
    runs: dict[str, int] = {}
    lost: set[str] = set()
    for name, value in operations:
        if name == "join" and server.free:
            runs[server.join(value).rid] = 0
        elif name == "leave" and server.reqs:
            server.leave(server.reqs[value % len(server.reqs)])
        elif name == "step" and server.reqs:
            server.accepted = min(value, 2) + 1
            server.step(value)
            for req in server.reqs:
                if value:
                    lost |= {req.rid} if runs[req.rid] > 4 else set()
                    runs[req.rid] = 0
                    assert not server.missing(req) or req.rid in lost
                    newest = server.lengths[req.rid] - server.accepted - 4
                    assert all(position < newest for position in server.missing(req))
                else:
                    runs[req.rid] += 1
    holed = installed.skip.resume.gaps.holed(server.reqs)
    assert {server.reqs[index].rid for index in holed} == lost & {req.rid for req in server.reqs}
    while server.reqs:
        server.leave(server.reqs[0])


# -- the prefix cache --


def cache(page_size: int = 1) -> RadixCache:
    pool = ReqToTokenPool(size=4, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
    allocator = TokenToKVPoolAllocator(200, torch.bfloat16, "cpu", SimpleNamespace(), False)
    params = CacheInitParams(
        disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=allocator, page_size=page_size, is_eagle=True
    )
    return RadixCache(params)


@pytest.mark.parametrize(("skips", "resumed", "cached"), [(0, True, 11), (3, True, 11), (3, False, 8), (6, True, 8)])
def test_what_is_cached_ends_before_the_first_gap(server: Server, skips: int, resumed: bool, cached: int) -> None:
    """A request of 9 prompt tokens and 3 more: its cached keys are pairs of tokens, so one fewer."""
    tree = cache()
    allocator, pool = tree.token_to_kv_pool_allocator, tree.req_to_token_pool
    available = allocator.available_size()
    req = rig.request("a", 9, 1000)
    pool.alloc([req])
    slots = allocator.alloc(20)
    pool.write((req.kv.req_pool_idx, slice(0, 20)), slots.to(torch.int32))
    req.kv.kv_committed_len, req.kv.kv_allocated_len = 9, 20
    req.last_node, req.kv.cache_protected_len = tree.root_node, 0
    req.lock = tree.lock(tree.root_node)
    gaps = installed.skip.resume.gaps
    for _ in range(skips):
        gaps.skipped([req])
    if resumed:
        gaps.close([req], 4)
    req.output_ids.extend([1, 2, 3, 4])
    req.kv.kv_committed_len = 12
    release_kv_cache(req, tree, checkpoint=True)
    key = RadixKey(array("q", [*range(9), 1, 2, 3, 4]))
    node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    assert len(tree.path_device_indices(node)) == cached
    assert allocator.available_size() + tree.evictable_size() == available
    assert gaps._entries == {}


# -- the records --


def test_rows_with_holes_are_masked_and_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from specpilot.sglang_hooks.agent import Agent, ServerFacts

    agent = active_agent()
    assert isinstance(agent, Agent)
    agent.start(ServerFacts(server_id="s", captured_batch_sizes=(1, 2, 4)))
    worker = server.worker
    processor = rig.result_processor(worker, overlap=True)
    monkeypatch.setattr(
        batch_result_processor, "release_kv_cache", lambda req, *a, **kw: ReqToTokenPool.free(MagicMock(), req)
    )
    worker.on_verify_complete_cpu = lambda counts, batch_size: agent.policy.on_verify_complete(counts, batch_size)
    long, short = server.join(5), server.join(9)
    for _ in range(6):
        server.step(0)
    installed.skip.resume.gaps.prefilled([short])
    server.step(1)
    server.join(7)

    def settle(width: int) -> Any:
        batch = ScheduleBatch(reqs=server.reqs)
        batch.forward_mode, batch.spec_algorithm = ForwardMode.DECODE, worker.speculative_algorithm
        batch.forward_iter = agent.policy.forward_iter = 17
        batch.launch_ts = 0.0
        rows = len(server.reqs)
        agent.policy.get_steps_for_batch(rows)
        agent.recorder.launched(batch, decode=True)
        result = GenerationBatchResult(
            next_token_ids=torch.full((rows * width,), 5), accept_lens=torch.full((rows,), width),
            speculative_num_draft_tokens=width, can_run_cuda_graph=True, next_draft_input=EagleDraftInput(),
        )  # fmt: skip
        processor.process_batch_result_decode(batch, result)
        return agent._queue.take(8)[-1]

    for req in server.reqs:
        req.output_ids.append(5)
    record = settle(2)
    assert record.accepted_drafts == [-1, 1, 1]
    assert record.truncated == []
    assert agent.state().counters["rows_quarantined"] == 1
    assert settle(1).accepted_drafts == [0, 0, 0]  # a skip tells nothing that could mislead
    long.sampling_params.max_new_tokens = 1
    record = settle(2)  # ends with this very result
    assert (record.accepted_drafts[0], record.truncated) == (-1, [])
    agent.stop()
