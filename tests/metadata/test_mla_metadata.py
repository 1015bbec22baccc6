"""MLA's eager metadata where a rule begins, its padded rows and calls, and attention over logical histories.

`test_either_backend.py` holds every mode to the loops.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from lab.metadata import (
    DraftAttention,
    ForwardBatch,
    ForwardMode,
    KVPool,
    QueryLayout,
    TRTLLMMLAPrefillMetadata,
    allocate_multi_ctas_kv_counters,
    build_mla_decode_metadata,
    build_mla_metadata,
    build_mla_prefill_metadata,
)
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.backend import (
    MLALayer,
    dense_block,
    mla_call_arguments,
    mla_max_seq_len,
    mla_query,
    pad_draft_extend_query,
    unpad_draft_extend_output,
)
from lab.metadata.mla.metadata import replan_outgrown
from lab.metadata.mla.prefill import ragged_context_arguments
from lab.metadata.speculation.draft_steps import frozen_kv_batch
from tests.cases import running_sum
from tests.metadata.batches import EXTENDS, Case, assert_same, build
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.served import HEADS, LAYER, MLA, MLA_WITH_OFFSET, PAGE_SIZES, RANK, REFERENCE, ROPE, Engine

V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
DECODE, VERIFY, RAGGED = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY


def build_mla(case: Case, page_size: int = 32) -> tuple[ForwardBatch, KVPool]:
    return build(replace(case, sliding_window=False, page_size=page_size))


# --- lengths and bounds -------------------------------------------------------------------------------------------


def test_a_ragged_verification_needs_no_rows_on_the_host() -> None:
    """SGLang's planner makes most of its layouts from lengths on the device. The bound then adds a whole draft twice."""
    batch, pool = build_mla(Case(RAGGED, (40, 70), (1, 3), 4))
    unknown = replace(batch, extend_seq_lens_cpu=None)
    assert_same(build_mla_decode_metadata(batch, pool), build_mla_decode_metadata(unknown, pool))
    bounded = build_mla_decode_metadata(replace(unknown, seq_lens_cpu=[39, 67]), pool)
    assert bounded.max_seq_len_k == 67 + 4 + 4


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("case", "attention", "blocks"),
    [
        (Case(DECODE, (4096, 5)), MLA, 1),
        (Case(DECODE, (4097, 5)), MLA, 2),
        (Case(DECODE, (4097, 6), new=1), MLA, 1),
        (Case(DECODE, (4097, 6), new=1), MLA_WITH_OFFSET, 2),
        (Case(VERIFY, (4096, 8), new=4), MLA, 1),
        (Case(VERIFY, (4097, 8), new=4), MLA, 2),
        (Case(V2, (4096, 8), (4, 4)), MLA, 1),
        (Case(V1, (4096, 8), (1, 4)), MLA, 2),  # the first request's padded queries look past token 4096
    ],
)
def test_the_width_is_whole_blocks_of_the_most_keys(
    case: Case, attention: DraftAttention, blocks: int, page_size: int
) -> None:
    over = case.mode is VERIFY or case.mode is V1  # 8190 tokens of context, and rows on top
    for host_seq_lens, whole_blocks in ((True, blocks), (False, 3 if over else 2)):
        case = replace(case, max_context_len=8190, host_seq_lens=host_seq_lens)
        table = build_mla_decode_metadata(*build_mla(case, page_size), attention).block_kv_indices
        assert table.shape[1] == whole_blocks * 4096 // page_size


# --- prefill ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", EXTENDS)
def test_a_prefill_counts_new_tokens_alone(mode: ForwardMode) -> None:
    got = build_mla_metadata(*build_mla(Case(mode, (50, 33, 9), (20, 1, 9), num_padding_rows=3)))
    assert isinstance(got, TRTLLMMLAPrefillMetadata)
    assert got.max_seq_len == 20
    assert (got.seq_lens.dtype, got.seq_lens.tolist()) == (torch.int32, [20, 1, 9])
    assert (got.cum_seq_lens.dtype, got.cum_seq_lens.tolist()) == (torch.int32, [0, 20, 21, 30])
    empty = build_mla_prefill_metadata(*build_mla(Case(mode, (), ())))
    assert (empty.max_seq_len, empty.cum_seq_lens.tolist()) == (0, [0])


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_when_a_prefill_falls_back(has_prefix: bool, disabled: bool, in_graph: bool) -> None:
    batch, pool = build_mla(Case(ForwardMode.EXTEND, (50, 33), (50, 32 if has_prefix else 33)))
    got = build_mla_metadata(batch, pool, disable_chunked_prefix_cache=disabled, in_prefill_graph=in_graph)
    assert isinstance(got, TRTLLMMLAPrefillMetadata)
    assert got.fallback_to_flashinfer_impl is (in_graph or (disabled and has_prefix))
    tokens = torch.zeros(83, HEADS, LAYER.qk_head_dim)
    if got.fallback_to_flashinfer_impl:
        with pytest.raises(ValueError, match="falls back to FlashInfer's own"):
            ragged_context_arguments(batch, got, LAYER, tokens, tokens, tokens[:, :, : LAYER.v_head_dim])


def test_a_prefill_takes_heads_before_absorption() -> None:
    batch, pool = build_mla(Case(ForwardMode.EXTEND, (5,), (5,)))
    metadata = build_mla_prefill_metadata(batch, pool)
    q, v = torch.zeros(5, 2, 192), torch.zeros(5, 2, 128)
    for wrong in ((q[:4], q, v), (q, q[:, :, :128], v), (q, q, q)):
        with pytest.raises(ValueError, match=r"has shape .*, expected \[at least 5, heads, "):
            ragged_context_arguments(batch, metadata, MLALayer(1.0), *wrong)


# --- rows of a draft extend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize(
    ("rows", "max_seq_len_q"),
    [((1, 2, 3, 4), 4), ((4, 1, 1, 2), 5), ((2, 4), 4), ((0, 3, 0), 3), ((3, 0), 4), ((1,), 1), ((0, 0), 0), ((), 2)],
)
def test_padding_and_back_is_the_identity(rows: tuple[int, ...], max_seq_len_q: int, dtype: torch.dtype) -> None:
    query = torch.randn(sum(rows) + 2, 2, 3).to(dtype)
    lens, cu = torch.tensor(rows, dtype=torch.int32), running_sum(rows)
    block = torch.full((len(rows), max_seq_len_q, 2, 3), float("nan")).to(dtype)
    with ForbidHostReads():
        padded = pad_draft_extend_query(query, lens, cu, block)
        out = unpad_draft_extend_output(padded, cu, torch.full_like(query.float(), 9.0).to(dtype))
    for request, (first, last) in enumerate(itertools.pairwise(cu.tolist())):
        assert padded[request, : last - first].tolist() == query[first:last].tolist()
        assert not padded[request, last - first :].double().any()
    assert out[: sum(rows)].tolist() == query[: sum(rows)].tolist()
    assert not out[sum(rows) :].double().any()


def test_a_part_of_a_buffer_has_no_gaps() -> None:
    buffer = torch.arange(24).view(2, 3, 4)
    part = dense_block(buffer, 2, 2, 4)
    assert part.flatten().tolist() == list(range(16))
    assert part.data_ptr() == buffer.data_ptr()


def test_blocks_that_do_not_fit_are_refused() -> None:
    rows, lens, cu = torch.zeros(3, 2, 4), torch.tensor([1, 2], dtype=torch.int32), running_sum([1, 2])
    with pytest.raises(TypeError, match=r"padded has dtype torch.float16, the rows torch.float32"):
        pad_draft_extend_query(rows, lens, cu, torch.zeros(2, 2, 2, 4, dtype=torch.float16))
    for shape in ((3, 2, 2, 4), (2, 2, 2, 5), (2, 2, 4)):
        with pytest.raises(ValueError, match=r"expected \[2, max_seq_len_q, \*\[2, 4\]\]"):
            pad_draft_extend_query(rows, lens, cu, torch.zeros(shape))
    with pytest.raises(ValueError, match=r"holds less than \[2, 3\]: allocate a larger one"):
        dense_block(torch.zeros(5), 2, 3)


# --- the call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "longest", "rows"),
    [
        (Case(DECODE, (50, 33)), 50, 0),
        (Case(DECODE, (52, 35), new=2), 52, 0),
        (Case(VERIFY, (54, 37), new=4), 54, 4),
        (Case(V1, (50, 33), (3, 1)), 50, 3),
        (Case(V2, (50, 33), (4, 4)), 50, 4),
    ],
)
def test_the_arguments_of_the_call(case: Case, longest: int, rows: int) -> None:
    """Its bound has the query rows on top in verification and draft extend, and only there."""
    batch, pool = build_mla(replace(case, host_seq_lens=True))
    metadata = build_mla_decode_metadata(batch, pool, MLA_WITH_OFFSET)
    cache = pool.new_latent_cache(RANK + ROPE, torch.float8_e4m3fn)
    query = torch.randn(batch.num_tokens, HEADS, RANK + ROPE).half()
    dense = mla_query(metadata, query)
    layer = replace(LAYER, k_scale=0.5)
    got = mla_call_arguments(batch, metadata, layer, dense, cache)
    assert dense.shape == (2, max(rows, 1), HEADS, RANK + ROPE)
    assert got["max_seq_len"] == longest + rows == mla_max_seq_len(batch.forward_mode, metadata)
    assert got["seq_lens"] is metadata.seq_lens_k
    assert got["block_tables"] is metadata.block_kv_indices
    assert (got["bmm1_scale"], got["bmm2_scale"]) == (0.2, 0.5)
    assert (got["qk_nope_head_dim"], got["kv_lora_rank"], got["qk_rope_head_dim"]) == (6, RANK, ROPE)
    assert got["kv_cache"].shape == (pool.num_pages, 1, 32, RANK + ROPE)
    assert got["kv_cache"].data_ptr() == cache.storage.data_ptr()
    assert (dense.data_ptr() == query.data_ptr()) is (metadata.query_layout is QueryLayout.VIEW)


@pytest.mark.parametrize(
    ("max_batch_size", "heads", "sm_count", "num_bytes"),
    [(1, 128, 132, 8192 * 128 * 4), (9001, 3, 132, 27008 * 4), (1, 1, 9999, 10000 * 4), (8192, 1, 1, 8192 * 4)],
)
def test_the_counters_are_as_flashinfer_asks(max_batch_size: int, heads: int, sm_count: int, num_bytes: int) -> None:
    buffer = allocate_multi_ctas_kv_counters(max_batch_size, heads, sm_count, "cpu")
    assert (buffer.dtype, buffer.nbytes, bool(buffer.any())) == (torch.uint8, num_bytes, False)
    with pytest.raises(ValueError, match="sm_count=0 must be at least 1"):
        allocate_multi_ctas_kv_counters(max_batch_size, heads, 0, "cpu")
    utils = pytest.importorskip("flashinfer.utils")
    assert utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(max(max_batch_size, 8192), heads, sm_count) == num_bytes


# --- refusals -----------------------------------------------------------------------------------------------------


def test_what_is_not_mla_is_refused() -> None:
    with pytest.raises(ValueError, match=r"DraftAttention\.MHA is not MLA"):
        build_mla_decode_metadata(*build_mla(Case(DECODE, (5,))), DraftAttention.MHA)
    metadata = build_mla_decode_metadata(*build_mla(Case(V2, (50, 33), (4, 4))))
    with pytest.raises(ValueError, match="query has 7 rows, the metadata's requests have 8"):
        mla_query(metadata, torch.zeros(7, 2, 3))


# --- over the histories; `test_mla_graph.py` has every mode -------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "totals", "rows"),
    [(DECODE, [1, 33, 64, 120], 1), (VERIFY, [4, 34, 68, 120], 4), (V2, [4, 34, 67, 120], 4)],
)
def test_padding_that_outgrew_the_metadata_is_planned_again(mode: ForwardMode, totals: list[int], rows: int) -> None:
    """Metadata of the requests alone is refused for the padded batch, and kept for a batch of no more requests."""
    engine = Engine()
    served, _ = engine.serve(mode, totals, [rows] * 4)
    early = build_mla_decode_metadata(served.batch, engine.pool)
    assert replan_outgrown(early, served.batch, pytest.fail) is early
    batch = pad_requests(served.batch, 6)
    query = torch.cat([served.query, engine.draw(2 * rows, HEADS, RANK + ROPE)])
    out = torch.full((6 * rows, HEADS, RANK), 9.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="has 6 requests and the metadata 4: padding outgrew it"):
        REFERENCE.prepare_attention(batch, early, LAYER, query, engine.cache, out=out)
    metadata = replan_outgrown(early, batch, lambda padded: build_mla_decode_metadata(padded, engine.pool))
    engine.cache.storage[0] = 0.0  # the sink, which padding reads
    REFERENCE.prepare_attention(batch, metadata, LAYER, query, engine.cache, out=out)()
    served.assert_right(out)
    assert (out[4 * rows :] != 9.0).all()


def test_a_frozen_kv_draft_is_padded_without_slots() -> None:
    served, _ = Engine().serve(DECODE, [40, 33], [1, 1])
    padded = pad_requests(frozen_kv_batch(served.batch), 4)
    assert padded.seq_lens[2:].tolist() == [1, 1]
    assert (padded.num_tokens, padded.out_cache_loc.numel()) == (4, 0)


def test_a_buffer_for_padded_rows_may_be_larger() -> None:
    """Larger in every direction, and full of what must not be seen."""
    engine = Engine()
    served, _ = engine.serve(V1, [40, 33, 70], [1, 3, 2])
    metadata = build_mla_decode_metadata(served.batch, engine.pool)
    buffer = torch.full((8, 5, HEADS, RANK + ROPE), 1e30, dtype=torch.float64)
    out = torch.empty(6, HEADS, RANK, dtype=torch.float64)
    REFERENCE.prepare_attention(
        served.batch, metadata, LAYER, served.query, engine.cache, out=out, padded_query=buffer
    )()
    served.assert_right(out)
