"""MLA's eager metadata of every mode against numbers worked out by hand, loops, and attention over logical histories."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lab.references
from lab.metadata import (
    AttentionCall,
    DraftAttention,
    ForwardBatch,
    ForwardMode,
    KVPool,
    QueryLayout,
    SpecInfo,
    TRTLLMMLADecodeMetadata,
    TRTLLMMLAPrefillMetadata,
    allocate_multi_ctas_kv_counters,
    build_mla_decode_metadata,
    build_mla_metadata,
    build_mla_prefill_metadata,
)
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.calls import (
    MLALayer,
    mla_call_arguments,
    mla_max_seq_len,
    mla_query,
    prepare_mla_attention,
    prepare_mla_prefill,
    ragged_context_arguments,
)
from lab.metadata.mla.metadata import multi_ctas_kv_counter_bytes, query_layout, replan_outgrown
from lab.metadata.mla.rows import dense_block, pad_draft_extend_query, unpad_draft_extend_output
from lab.metadata.speculation.frozen_kv import frozen_kv_batch
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.mha_cases import DRAFT_EXTENDS, EXTENDS, MODES, Case, boundary_lengths, build, drawn_cases, label
from tests.metadata.mla_cases import (
    HEADS,
    LAYER,
    MLA,
    MLA_WITH_OFFSET,
    PAGE_SIZES,
    RANK,
    ROPE,
    Engine,
    assert_live_part_right,
    decode_cases,
)

V1, V2 = DRAFT_EXTENDS
RAGGED = ForwardMode.RAGGED_VERIFY
DECODE_MODES = [mode for mode in MODES if mode not in EXTENDS]
PROBE_LENS, PROBE_ROWS = (6, 92, 173, 37), (1, 2, 3, 4)


def build_mla(case: Case, device: str = "cpu") -> tuple[ForwardBatch, KVPool]:
    return build(replace(case, sliding_window=False), device)


DECODE_CASES = decode_cases(32)


def assert_right(batch: ForwardBatch, pool: KVPool, attention: DraftAttention) -> TRTLLMMLADecodeMetadata:
    """All of it: live part, tail, width, host bounds, and the boundaries of a draft extend."""
    got = build_mla_decode_metadata(batch, pool, attention)
    mode, bs = batch.forward_mode, batch.batch_size
    news = list(batch.extend_seq_lens_cpu or ())
    extends = mode.query_rows.in_extend_seq_lens
    rows = 1
    if mode is ForwardMode.TARGET_VERIFY:
        rows = batch.num_tokens // bs if bs else 4
    elif mode is RAGGED:
        assert batch.spec_info is not None
        rows = batch.spec_info.num_draft_tokens or 0
    elif extends:
        rows = max(news, default=0)
    tails = assert_live_part_right(got, batch, pool, attention, rows)
    assert all(set(tail) <= {-1} for tail in tails)

    longest = pool.max_context_len if batch.seq_lens_cpu is None else max(batch.seq_lens_cpu, default=0)
    if mode in (ForwardMode.TARGET_VERIFY, RAGGED):
        longest += rows
    elif not extends and batch.spec_info is not None and attention is MLA_WITH_OFFSET:
        assert batch.spec_info.speculative_step_id is not None
        longest += batch.spec_info.speculative_step_id + 1
    padded = mode is RAGGED or len(set(news)) > 1
    blocks = -(-(longest + (rows if padded and mode is not RAGGED else 0)) // 4096)
    assert got.max_seq_len_k == longest
    assert list(got.block_kv_indices.shape) == [bs, blocks * 4096 // pool.page_size]
    assert got.query_layout is (QueryLayout.PADDED if padded else QueryLayout.VIEW)
    if not extends:
        assert got.sum_seq_lens_q is got.cu_seqlens_q is got.seq_lens_q is None
        return got
    assert got.cu_seqlens_q is not None
    assert got.seq_lens_q is not None
    assert got.sum_seq_lens_q == (batch.num_tokens if mode is RAGGED else sum(news))
    assert (got.seq_lens_q.dtype, got.seq_lens_q.tolist()) == (torch.int32, news)
    boundaries = [sum(news[:i]) for i in range(bs + 1)]
    assert (got.cu_seqlens_q.dtype, got.cu_seqlens_q.tolist()) == (torch.int32, boundaries)
    return got


# --- numbers worked out by hand -----------------------------------------------------------------------------------


def hand_made_pool() -> KVPool:
    """Pages of 32 tokens. Row 1 has pages 7 2 5, row 2 has 4 1 8; after its 96 tokens the table has leftovers of page 9."""
    pool = KVPool(num_requests=2, max_context_len=128, page_size=32, num_pages=11)
    for row, pages in ((1, (7, 2, 5, 9)), (2, (4, 1, 8, 9))):
        for position in range(128):
            pool.req_to_token[row, position] = pages[position // 32] * 32 + position % 32
    return pool


def hand_made_batch(mode: ForwardMode, seq_lens: list[int], num_tokens: int, **fields: Any) -> ForwardBatch:
    """Row 2 first, then row 1."""
    return ForwardBatch(
        mode, torch.tensor([2, 1]), torch.tensor(seq_lens), torch.zeros(num_tokens).long(), num_tokens, **fields
    )


def new_rows(*rows: int) -> dict[str, Any]:
    return {"extend_seq_lens": torch.tensor(rows), "extend_seq_lens_cpu": list(rows)}


DRAFT_OF_4 = {"spec_info": SpecInfo(num_draft_tokens=4)}
STEP_1 = {"spec_info": SpecInfo(speculative_step_id=1)}


@pytest.mark.parametrize(
    ("batch", "attention", "seq_lens_k", "tables"),
    [
        (hand_made_batch(ForwardMode.DECODE, [32, 33], 2), MLA, [32, 33], [[4], [7, 2]]),
        (hand_made_batch(ForwardMode.IDLE, [0, -2], 2), MLA, [0, -2], [[], []]),
        (hand_made_batch(ForwardMode.DECODE, [31, 30], 2, **STEP_1), MLA, [31, 30], [[4], [7]]),
        (hand_made_batch(ForwardMode.DECODE, [31, 30], 2, **STEP_1), MLA_WITH_OFFSET, [33, 32], [[4, 1], [7]]),
        (hand_made_batch(ForwardMode.TARGET_VERIFY, [29, 28], 8), MLA, [33, 32], [[4, 1], [7]]),
        # Two of the most four draft tokens are verified, and one: the lengths count four, the pages what there is.
        (hand_made_batch(RAGGED, [30, 63], 3, **new_rows(2, 1), **DRAFT_OF_4), MLA, [34, 67], [[4, 0], [7, 2, 0]]),
        (hand_made_batch(V1, [62, 64], 4, **new_rows(1, 3)), MLA, [64, 64], [[4, 1], [7, 2]]),
        # The padded queries of the first request look one token into a page that is not its own.
        (hand_made_batch(V1, [64, 64], 3, **new_rows(1, 2)), MLA, [65, 64], [[4, 1, 0], [7, 2]]),
        (hand_made_batch(V2, [64, 34], 4, **new_rows(2, 2)), MLA, [64, 34], [[4, 1], [7, 2]]),
    ],
)
def test_by_hand(
    batch: ForwardBatch, attention: DraftAttention, seq_lens_k: list[int], tables: list[list[int]]
) -> None:
    got = build_mla_decode_metadata(batch, hand_made_pool(), attention)
    assert got.seq_lens_k.tolist() == seq_lens_k
    assert got.block_kv_indices.tolist() == [pages + [-1] * (128 - len(pages)) for pages in tables]


def test_a_ragged_verification_needs_no_rows_on_the_host() -> None:
    """As SGLang's planner makes most of its layouts, from lengths on the device."""
    batch, pool = build_mla(Case(RAGGED, (40, 70), (1, 3), 4, page_size=32))
    known, unknown = (
        build_mla_decode_metadata(each, pool) for each in (batch, replace(batch, extend_seq_lens_cpu=None))
    )
    assert all(
        torch.equal(own, other) if isinstance(own, Tensor) else own == other
        for own, other in zip(vars(known).values(), vars(unknown).values(), strict=True)
    )


def test_the_lengths_that_sglang_was_seen_to_make() -> None:
    """Measured on SGLang's own builder: a first draft extend of 1, 2, 3 and 4 rows."""
    got = build_mla_decode_metadata(*build_mla(Case(V1, PROBE_LENS, PROBE_ROWS, page_size=32, max_context_len=200)))
    assert got.seq_lens_k.tolist() == [9, 94, 174, 37]
    assert (got.sum_seq_lens_q, got.max_seq_len_q) == (10, 4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("case", "attention", "blocks"),
    [
        (Case(ForwardMode.DECODE, (4096, 5)), MLA, 1),
        (Case(ForwardMode.DECODE, (4097, 5)), MLA, 2),
        (Case(ForwardMode.DECODE, (4097, 6), new=1), MLA, 1),
        (Case(ForwardMode.DECODE, (4097, 6), new=1), MLA_WITH_OFFSET, 2),
        (Case(ForwardMode.TARGET_VERIFY, (4096, 8), new=4), MLA, 1),
        (Case(ForwardMode.TARGET_VERIFY, (4097, 8), new=4), MLA, 2),
        (Case(V2, (4096, 8), (4, 4)), MLA, 1),
        (Case(V1, (4096, 8), (1, 4)), MLA, 2),  # the first request's padded queries look past token 4096
    ],
)
def test_the_width_is_whole_blocks_of_the_most_keys(
    case: Case, attention: DraftAttention, blocks: int, page_size: int
) -> None:
    case = replace(case, page_size=page_size, max_context_len=8190, host_seq_lens=True)
    width = build_mla_decode_metadata(*build_mla(case), attention).block_kv_indices.shape[1]
    assert width == blocks * 4096 // page_size
    without = build_mla_decode_metadata(*build_mla(replace(case, host_seq_lens=False)), attention)
    over = case.mode is ForwardMode.TARGET_VERIFY or case.mode is V1  # 8190 tokens of context, and rows on top
    assert without.block_kv_indices.shape[1] == (3 if over else 2) * 4096 // page_size


# --- against the loops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [MLA, MLA_WITH_OFFSET])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("index", range(len(DECODE_CASES)))
def test_every_mode(index: int, page_size: int, attention: DraftAttention) -> None:
    case = decode_cases(page_size)[index]
    for dtype in (torch.int32, torch.int64):
        for host in (False, True):
            assert_right(*build_mla(replace(case, index_dtype=dtype, host_seq_lens=host)), attention)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("offset", range(4))
def test_every_boundary_with_every_offset(offset: int, page_size: int) -> None:
    capacity = 4 * page_size + 5
    lens = tuple(n + offset for n in boundary_lengths(page_size, 1, capacity - offset))
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        if offset or mode is ForwardMode.DECODE:
            case = Case(mode, lens, new=offset, page_size=page_size, max_context_len=capacity)
            got = assert_right(*build_mla(case), MLA_WITH_OFFSET)
            assert got.seq_lens_k.tolist() == list(lens)


@pytest.mark.parametrize("mode", DRAFT_EXTENDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_draft_extends_at_every_boundary(mode: ForwardMode, page_size: int) -> None:
    """The capacity included, where the request table ends before the padded queries do."""
    capacity = 4 * page_size
    lens = tuple(boundary_lengths(page_size, 4, capacity))
    for news in (tuple(1 + i % 4 for i in range(len(lens))), (4,) * len(lens)):
        assert_right(*build_mla(Case(mode, lens, news, page_size=page_size, max_context_len=capacity)), MLA)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(drawn_cases(virtual=None), st.sampled_from(PAGE_SIZES), st.sampled_from([MLA, MLA_WITH_OFFSET]))
def test_drawn_batches(case: Case, page_size: int, attention: DraftAttention) -> None:
    if case.mode in EXTENDS:
        case = replace(case, mode=V1)
    largest = max(case.total_lens, default=9)
    case = replace(case, page_size=page_size, max_context_len=max(largest, 4 * page_size), evict_before=0)
    if case.mode is ForwardMode.TARGET_VERIFY and not case.total_lens:
        case = replace(case, new=4)
    assert_right(*build_mla(case), attention)


def test_three_draft_steps_are_one_length_as_is_and_grow_by_one_with_the_offset() -> None:
    for attention, lengths in ((MLA, [[20, 31]] * 3), (MLA_WITH_OFFSET, [[21, 32], [22, 33], [23, 34]])):
        cases = [Case(ForwardMode.DECODE, (20 + new, 31 + new), new=new, page_size=32) for new in (1, 2, 3)]
        built = [build_mla_decode_metadata(*build_mla(case), attention) for case in cases]
        assert [each.seq_lens_k.tolist() for each in built] == lengths


# --- prefill ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", EXTENDS)
def test_a_prefill_counts_new_tokens_alone(mode: ForwardMode) -> None:
    got = build_mla_metadata(*build_mla(Case(mode, (50, 33, 9), (20, 1, 9), page_size=32, num_padding_rows=3)))
    assert isinstance(got, TRTLLMMLAPrefillMetadata)
    assert got.max_seq_len == 20
    assert (got.seq_lens.dtype, got.seq_lens.tolist()) == (torch.int32, [20, 1, 9])
    assert (got.cum_seq_lens.dtype, got.cum_seq_lens.tolist()) == (torch.int32, [0, 20, 21, 30])
    empty = build_mla_prefill_metadata(*build_mla(Case(mode, (), (), page_size=32)))
    assert (empty.max_seq_len, empty.cum_seq_lens.tolist()) == (0, [0])


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_when_a_prefill_falls_back(has_prefix: bool, disabled: bool, in_graph: bool) -> None:
    batch, pool = build_mla(Case(ForwardMode.EXTEND, (50, 33), (50, 32 if has_prefix else 33), page_size=32))
    got = build_mla_metadata(batch, pool, disable_chunked_prefix_cache=disabled, in_prefill_graph=in_graph)
    assert isinstance(got, TRTLLMMLAPrefillMetadata)
    assert got.fallback_to_flashinfer_impl is (in_graph or (disabled and has_prefix))
    tokens = torch.zeros(83, HEADS, LAYER.qk_head_dim)
    if got.fallback_to_flashinfer_impl:
        with pytest.raises(ValueError, match="falls back to FlashInfer's own"):
            ragged_context_arguments(batch, got, LAYER, tokens, tokens, tokens[:, :, : LAYER.v_head_dim])


@pytest.mark.parametrize("prefixes", [(0, 0, 0), (30, 0, 8)])
def test_a_prefill_attends_to_its_new_tokens_and_merges_the_rest(prefixes: tuple[int, ...]) -> None:
    """From the call's arguments alone, and the prefix by the LSE, against attention over whole histories."""
    news, layer = (20, 1, 9), MLALayer(0.3)
    totals = tuple(prefix + new for prefix, new in zip(prefixes, news, strict=True))
    batch, pool = build_mla(Case(ForwardMode.EXTEND, totals, news, page_size=32, num_padding_rows=2))
    keys = [torch.randn(total, HEADS, 192, dtype=torch.float64) for total in totals]
    values = [torch.randn(total, HEADS, 128, dtype=torch.float64) for total in totals]
    query = torch.randn(batch.num_tokens, HEADS, 192, dtype=torch.float64)
    new_keys = torch.cat([each[-n:] for each, n in zip(keys, news, strict=True)] + [torch.full((2, HEADS, 192), 1e30)])
    new_values = torch.cat([each[-n:] for each, n in zip(values, news, strict=True)])
    metadata = build_mla_prefill_metadata(batch, pool)
    call = ragged_context_arguments(batch, metadata, layer, query, new_keys.double(), new_values)
    assert call["query"].shape == (30, HEADS, 192)
    assert (call["max_q_len"], call["max_kv_len"], call["batch_size"], call["is_causal"]) == (20, 20, 3, True)
    assert call["return_lse"] is any(prefixes)
    ends = call["cum_seq_lens_kv"].tolist()
    for i, (first, last) in enumerate(itertools.pairwise(ends)):
        own = [scored(call["query"][r], call["key"][first : r + 1], call["bmm1_scale"]) for r in range(first, last)]
        for r, scores in zip(range(first, last), own, strict=True):
            cached = scored(call["query"][r], keys[i][: prefixes[i]], call["bmm1_scale"])
            out = merged(scores, call["value"][first : r + 1], cached, values[i][: prefixes[i]])
            seen = prefixes[i] + r - first + 1
            whole = torch.softmax(scored(query[r], keys[i][:seen], 0.3), dim=-1)
            torch.testing.assert_close(out, torch.einsum("hk,khd->hd", whole, values[i][:seen]))


@pytest.mark.parametrize("prefixes", [(0, 0, 0), (30, 0, 8)])
def test_a_prefills_prepared_call_runs(prefixes: tuple[int, ...]) -> None:
    """Against attention of each request's new tokens to each other; with a prefix the LSE comes along, and padding stays."""
    news = (20, 1, 9)
    totals = tuple(prefix + new for prefix, new in zip(prefixes, news, strict=True))
    batch, pool = build_mla(Case(ForwardMode.EXTEND, totals, news, page_size=32, num_padding_rows=2))
    query, keys = (torch.randn(batch.num_tokens, HEADS, 192, dtype=torch.float32) for _ in range(2))
    values, out = torch.randn(batch.num_tokens, HEADS, 128), torch.full((batch.num_tokens, HEADS, 128), 7.0)
    metadata = build_mla_prefill_metadata(batch, pool)
    call = prepare_mla_prefill(lab.references, batch, metadata, MLALayer(0.3), query, keys, values, out=out)
    result = call()
    assert isinstance(result, tuple) is any(prefixes)
    assert (out[30:] == 7).all()
    for first, last in itertools.pairwise((0, 20, 21, 30)):
        for r in range(first, last):
            scores = scored(query[r], keys[first : r + 1], 0.3)
            expected = torch.einsum("hk,khd->hd", torch.softmax(scores, dim=-1), values[first : r + 1])
            torch.testing.assert_close(out[r], expected, rtol=1e-5, atol=1e-5)
            if any(prefixes):
                torch.testing.assert_close(result[1][r], scores.logsumexp(dim=-1) / math.log(2), rtol=1e-5, atol=1e-5)


def scored(row: Tensor, keys: Tensor, scale: float) -> Tensor:
    return scale * torch.einsum("hd,khd->hk", row, keys)


def merged(scores: Tensor, values: Tensor, cached_scores: Tensor, cached_values: Tensor) -> Tensor:
    """Two softmaxes over parts of the keys, put together by their LSEs."""
    parts = [(scores, values), (cached_scores, cached_values)]
    lses = torch.stack([s.logsumexp(dim=-1) for s, _ in parts])
    shares = torch.softmax(lses, dim=0)
    outs = torch.stack([torch.einsum("hk,khd->hd", torch.softmax(s, dim=-1), v) for s, v in parts])
    return (shares[:, :, None] * outs).sum(dim=0)


def test_a_prefill_takes_heads_before_absorption() -> None:
    batch, pool = build_mla(Case(ForwardMode.EXTEND, (5,), (5,), page_size=32))
    metadata = build_mla_prefill_metadata(batch, pool)
    q, v = torch.zeros(5, 2, 192), torch.zeros(5, 2, 128)
    for wrong in ((q[:4], q, v), (q, q[:, :, :128], v), (q, q, q)):
        with pytest.raises(ValueError, match=r"has shape .*, expected \[at least 5, heads, "):
            ragged_context_arguments(batch, metadata, MLALayer(1.0), *wrong)


# --- rows of a draft extend ---------------------------------------------------------------------------------------


def boundaries(*rows: int) -> Tensor:
    return torch.tensor([sum(rows[:i]) for i in range(len(rows) + 1)], dtype=torch.int32)


def test_padding_by_hand() -> None:
    """Two requests of 3 and 1 rows: the rows divide by the requests, and still are not 2 and 2."""
    rows = torch.arange(1.0, 5.0).view(4, 1, 1)
    block = torch.full((2, 3, 1, 1), 9.0)
    padded = pad_draft_extend_query(rows, torch.tensor([3, 1], dtype=torch.int32), boundaries(3, 1), block)
    assert padded is block
    assert padded.flatten(1).tolist() == [[1, 2, 3], [4, 0, 0]]
    out = torch.full((6, 1, 1), 9.0)
    assert unpad_draft_extend_output(padded, boundaries(3, 1), out) is out
    assert out.flatten().tolist() == [1, 2, 3, 4, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize(
    ("rows", "max_seq_len_q"),
    [((1, 2, 3, 4), 4), ((4, 1, 1, 2), 5), ((2, 4), 4), ((0, 3, 0), 3), ((3, 0), 4), ((1,), 1), ((0, 0), 0), ((), 2)],
)
def test_padding_and_back_is_the_identity(rows: tuple[int, ...], max_seq_len_q: int, dtype: torch.dtype) -> None:
    query = torch.randn(sum(rows) + 2, 2, 3).to(dtype)
    lens, cu = torch.tensor(rows, dtype=torch.int32), boundaries(*rows)
    block = torch.full((len(rows), max_seq_len_q, 2, 3), float("nan")).to(dtype)
    with ForbidHostReads():
        padded = pad_draft_extend_query(query, lens, cu, block)
        out = unpad_draft_extend_output(padded, cu, torch.full_like(query.float(), 9.0).to(dtype))
    first = 0
    for request, count in enumerate(rows):
        assert padded[request, :count].tolist() == query[first : first + count].tolist()
        assert not padded[request, count:].double().any()
        first += count
    assert out[:first].tolist() == query[:first].tolist()
    assert not out[first:].double().any()


def test_blocks_that_do_not_fit_are_refused() -> None:
    rows, lens, cu = torch.zeros(3, 2, 4), torch.tensor([1, 2], dtype=torch.int32), boundaries(1, 2)
    with pytest.raises(TypeError, match=r"padded has dtype torch.float16, the rows torch.float32"):
        pad_draft_extend_query(rows, lens, cu, torch.zeros(2, 2, 2, 4, dtype=torch.float16))
    for shape in ((3, 2, 2, 4), (2, 2, 2, 5), (2, 2, 4)):
        with pytest.raises(ValueError, match=r"expected \[2, max_seq_len_q, \*\[2, 4\]\]"):
            pad_draft_extend_query(rows, lens, cu, torch.zeros(shape))
    with pytest.raises(ValueError, match=r"holds less than \[2, 3\]: allocate a larger one"):
        dense_block(torch.zeros(5), 2, 3)


def test_a_part_of_a_buffer_has_no_gaps() -> None:
    buffer = torch.arange(24).view(2, 3, 4)
    part = dense_block(buffer, 2, 2, 4)
    assert part.flatten().tolist() == list(range(16))
    assert part.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        ((), QueryLayout.VIEW),
        ((3,), QueryLayout.VIEW),
        ((3, 3), QueryLayout.VIEW),
        ((2, 4), QueryLayout.PADDED),  # 6 rows divide by 2 requests
        ((1, 2, 3), QueryLayout.PADDED),
        ((0, 3), QueryLayout.PADDED),
    ],
)
def test_the_widths_decide_and_not_whether_they_divide(rows: tuple[int, ...], layout: QueryLayout) -> None:
    assert query_layout(rows) is layout


# --- the call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_the_call_of_every_mode(mode: ForwardMode) -> None:
    is_context = mode in EXTENDS
    assert mode.mla_call is (AttentionCall.RAGGED_CONTEXT if is_context else AttentionCall.MLA_DECODE)
    assert hasattr(lab.references, AttentionCall.MLA_DECODE.value)


@pytest.mark.parametrize(
    ("case", "longest", "rows"),
    [
        (Case(ForwardMode.DECODE, (50, 33)), 50, 0),
        (Case(ForwardMode.DECODE, (52, 35), new=2), 52, 0),
        (Case(ForwardMode.TARGET_VERIFY, (54, 37), new=4), 54, 4),
        (Case(V1, (50, 33), (3, 1)), 50, 3),
        (Case(V2, (50, 33), (4, 4)), 50, 4),
    ],
)
def test_what_the_kernel_is_told(case: Case, longest: int, rows: int) -> None:
    """Its bound has the query rows on top in verification and draft extend, and only there."""
    batch, pool = build_mla(replace(case, page_size=32, host_seq_lens=True))
    metadata = build_mla_decode_metadata(batch, pool, MLA_WITH_OFFSET)
    cache, counters = pool.new_latent_cache(RANK + ROPE, torch.float8_e4m3fn), torch.zeros(8)
    query = torch.randn(batch.num_tokens, HEADS, RANK + ROPE).half()
    dense = mla_query(metadata, query)
    layer = replace(LAYER, k_scale=0.5)
    got = mla_call_arguments(batch, metadata, layer, dense, cache, counters)
    assert dense.shape == (2, max(rows, 1), HEADS, RANK + ROPE)
    assert got["max_seq_len"] == longest + rows == mla_max_seq_len(batch.forward_mode, metadata)
    assert got["seq_lens"] is metadata.seq_lens_k
    assert got["block_tables"] is metadata.block_kv_indices
    assert got["multi_ctas_kv_counter_buffer"] is counters
    assert (got["bmm1_scale"], got["bmm2_scale"]) == (0.2, 0.5)
    assert (got["qk_nope_head_dim"], got["kv_lora_rank"], got["qk_rope_head_dim"]) == (6, RANK, ROPE)
    assert got["kv_cache"].shape == (pool.num_pages, 1, 32, RANK + ROPE)
    assert got["kv_cache"].data_ptr() == cache.storage.data_ptr()
    assert (dense.data_ptr() == query.data_ptr()) is (metadata.query_layout is QueryLayout.VIEW)


def test_too_few_rows_are_refused() -> None:
    metadata = build_mla_decode_metadata(*build_mla(Case(V2, (50, 33), (4, 4), page_size=32)))
    with pytest.raises(ValueError, match="query has 7 rows, the metadata's requests have 8"):
        mla_query(metadata, torch.zeros(7, 2, 3))


# --- the counter buffer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_batch_size", "heads", "sm_count", "num_bytes"),
    [(1, 128, 132, 8192 * 128 * 4), (9001, 3, 132, 27008 * 4), (1, 1, 9999, 10000 * 4), (8192, 1, 1, 8192 * 4)],
)
def test_the_counters_by_hand(max_batch_size: int, heads: int, sm_count: int, num_bytes: int) -> None:
    assert multi_ctas_kv_counter_bytes(max_batch_size, heads, sm_count) == num_bytes
    buffer = allocate_multi_ctas_kv_counters(max_batch_size, heads, sm_count, "cpu")
    assert (buffer.dtype, buffer.nbytes, bool(buffer.any())) == (torch.uint8, num_bytes, False)
    with pytest.raises(ValueError, match="sm_count=0 must be at least 1"):
        multi_ctas_kv_counter_bytes(max_batch_size, heads, 0)


def test_the_counters_are_what_flashinfer_asks_for() -> None:
    utils = pytest.importorskip("flashinfer.utils")
    for bs, heads, sms in ((1, 128, 132), (9001, 3, 132), (1, 1, 9999), (8193, 7, 148)):
        asked = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(max(bs, 8192), heads, sms)
        assert multi_ctas_kv_counter_bytes(bs, heads, sms) == asked


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 128, 256])
@pytest.mark.parametrize("case", [Case(ForwardMode.DECODE, (5,)), Case(ForwardMode.EXTEND, (5,), (5,))], ids=label)
def test_other_page_sizes_are_refused(case: Case, page_size: int) -> None:
    with pytest.raises(ValueError, match=rf"page_size={page_size}: .*has pages of \(32, 64\) tokens"):
        build_mla_metadata(*build_mla(replace(case, page_size=page_size)))


def test_what_is_not_mla_is_refused() -> None:
    batch, pool = build_mla(Case(ForwardMode.DECODE, (5,), page_size=32))
    with pytest.raises(ValueError, match=r"DraftAttention\.MHA is not MLA"):
        build_mla_decode_metadata(batch, pool, DraftAttention.MHA)
    with pytest.raises(ValueError, match="sliding-window pages, which MLA does not use"):
        build_mla_decode_metadata(*build(Case(ForwardMode.DECODE, (5,), page_size=32)))
    with pytest.raises(ValueError, match="batch is on cpu but the pool on meta"):
        build_mla_decode_metadata(batch, build_mla(Case(ForwardMode.DECODE, (5,), page_size=32), "meta")[1])
    with pytest.raises(ValueError, match="DECODE is no prefill"):
        build_mla_prefill_metadata(batch, pool)
    with pytest.raises(ValueError, match="EXTEND is a prefill"):
        build_mla_decode_metadata(*build_mla(Case(ForwardMode.EXTEND, (5,), (5,), page_size=32)))
    prebuilt = replace(batch, forward_mode=ForwardMode.PREBUILT)
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        build_mla_metadata(prebuilt, pool)


@pytest.mark.parametrize(
    ("case", "missing", "message"),
    [
        (Case(ForwardMode.EXTEND, (5,), (2,)), {"extend_seq_lens_cpu": None}, "EXTEND needs extend_seq_lens_cpu"),
        (Case(ForwardMode.EXTEND, (5,), (2,)), {"extend_prefix_lens_cpu": None}, "needs extend_prefix_lens_cpu"),
        (Case(ForwardMode.EXTEND, (5,), (2,)), {"extend_prefix_lens": None}, "device tensor extend_prefix_lens"),
        (Case(V1, (5,), (2,)), {"extend_seq_lens": None}, "device tensor extend_seq_lens"),
        (Case(V2, (5,), (2,)), {"extend_seq_lens_cpu": None}, "needs extend_seq_lens_cpu"),
        (Case(ForwardMode.DECODE, (5,), new=1), {"spec_info": SpecInfo()}, "needs SpecInfo.speculative_step_id"),
        (Case(ForwardMode.TARGET_VERIFY, (), new=1), {"spec_info": None}, "needs SpecInfo.num_draft_tokens"),
    ],
)
def test_missing_facts_are_asked_for(case: Case, missing: dict[str, Any], message: str) -> None:
    batch, pool = build_mla(replace(case, page_size=32))
    with pytest.raises(ValueError, match=message):
        build_mla_metadata(replace(batch, **missing), pool)


# --- end to end ---------------------------------------------------------------------------------------------------

PASSES = {
    "decode": (GraphMode.decode(), MLA, [1, 33, 64, 120], [1, 1, 1, 1]),
    "draft step 0 as is": (GraphMode.draft_decode(0), MLA, [2, 33, 65, 120], [1, 1, 1, 1]),
    "draft step 2 as is": (GraphMode.draft_decode(2), MLA, [4, 33, 66, 120], [1, 1, 1, 1]),
    "draft step 2 with offset": (GraphMode.draft_decode(2), MLA_WITH_OFFSET, [4, 33, 66, 120], [1, 1, 1, 1]),
    "verify": (GraphMode.target_verify(4), MLA, [4, 34, 68, 120], [4, 4, 4, 4]),
    "ragged verify": (GraphMode.ragged_verify(4), MLA, [3, 64, 35, 120], [3, 1, 4, 2]),
    "ragged verify of fewer rows than the draft": (GraphMode.ragged_verify(6), MLA, [3, 64, 35, 120], [3, 1, 2, 2]),
    "ragged verify of equal rows": (GraphMode.ragged_verify(4), MLA, [3, 64, 35, 120], [2, 2, 2, 2]),
    "draft extend v1": (GraphMode.draft_extend(4), MLA, [3, 64, 35, 120], [3, 1, 4, 2]),
    "draft extend v1 whose rows divide": (GraphMode.draft_extend(4), MLA, [3, 64, 35, 120], [3, 1, 4, 4]),
    "draft extend v1 of equal rows": (GraphMode.draft_extend(4), MLA, [3, 64, 35, 120], [2, 2, 2, 2]),
    "draft extend v2": (GraphMode(V2, 4), MLA, [4, 34, 67, 120], [4, 4, 4, 4]),
}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("host_lengths", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_attention_over_the_histories(name: str, host_lengths: bool, page_size: int) -> None:
    """Entries are written token by token into shuffled pages; what is expected never saw a page."""
    mode, attention, totals, news = PASSES[name]
    engine = Engine(page_size, seed=page_size)
    engine.release(engine.admit([150, 150]))  # so that there are leftovers
    padding = 3 if mode.in_extend_seq_lens else 0
    served, _ = engine.serve(
        mode, totals, news, attention=attention, host_lengths=host_lengths, num_padding_rows=padding
    )
    metadata = build_mla_decode_metadata(served.batch, engine.pool, attention)
    out = torch.full((served.batch.num_tokens, HEADS, RANK), 9.0, dtype=torch.float64)
    attend = prepare_mla_attention(lab.references, served.batch, metadata, LAYER, served.query, engine.cache, out=out)
    assert attend() is out
    torch.testing.assert_close(out[: sum(news)], served.expected, rtol=1e-12, atol=1e-12)
    # Padding rows are nobody's; those of a ragged verification are zero.
    assert (out[sum(news) :] == (0.0 if mode.forward_mode is RAGGED else 9.0)).all()


@pytest.mark.parametrize("name", ["decode", "draft step 2 as is", "verify", "draft extend v2"])
def test_padding_that_outgrew_the_metadata_is_planned_again(name: str) -> None:
    """Metadata of the requests alone is refused for the padded batch, and kept for a batch of no more requests."""
    mode, attention, totals, news = PASSES[name]
    engine = Engine()
    served, _ = engine.serve(mode, totals, news, attention=attention)
    early = build_mla_decode_metadata(served.batch, engine.pool, attention)
    assert replan_outgrown(early, served.batch, pytest.fail) is early
    batch = pad_requests(served.batch, 6)
    rows = news[0]
    assert (batch.num_tokens, batch.batch_size) == (6 * rows, 6)
    assert (batch.seq_lens[4:].tolist(), batch.req_pool_indices[4:].tolist()) == ([1, 1], [0, 0])
    query = torch.cat([served.query, engine.draw(2 * rows, HEADS, RANK + ROPE)])
    out = torch.full((6 * rows, HEADS, RANK), 9.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="has 6 requests and the metadata 4: padding outgrew it"):
        prepare_mla_attention(lab.references, batch, early, LAYER, query, engine.cache, out=out)
    metadata = replan_outgrown(early, batch, lambda padded: build_mla_decode_metadata(padded, engine.pool, attention))
    engine.cache.storage[0] = 0.0  # the sink, which padding reads
    prepare_mla_attention(lab.references, batch, metadata, LAYER, query, engine.cache, out=out)()
    torch.testing.assert_close(out[: sum(news)], served.expected, rtol=1e-12, atol=1e-12)
    assert (out[sum(news) :] != 9.0).all()


def test_only_requests_of_as_many_rows_are_padded() -> None:
    served, _ = Engine().serve(V1, [40, 33], [1, 3])
    with pytest.raises(ValueError, match="DRAFT_EXTEND of 2 requests is not padded to 4"):
        pad_requests(served.batch, 4)
    verify, _ = Engine().serve(ForwardMode.TARGET_VERIFY, [40, 33], [2, 2])
    with pytest.raises(ValueError, match="TARGET_VERIFY of 2 requests is not padded to 1"):
        pad_requests(verify.batch, 1)


def test_a_frozen_kv_draft_is_padded_without_slots() -> None:
    served, _ = Engine().serve(ForwardMode.DECODE, [40, 33], [1, 1])
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
    prepare_mla_attention(
        lab.references, served.batch, metadata, LAYER, served.query, engine.cache, out=out, padded_query=buffer
    )()
    torch.testing.assert_close(out, served.expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in DECODE_CASES if not case.total_lens], ids=label)
def test_an_empty_batch_makes_no_call(case: Case) -> None:
    batch, pool = build_mla(case)
    metadata = build_mla_decode_metadata(batch, pool)
    cache, out = pool.new_latent_cache(RANK + ROPE, torch.float32), torch.empty(0, HEADS, RANK)
    query = torch.empty(0, HEADS, RANK + ROPE)
    assert prepare_mla_attention(object(), batch, metadata, LAYER, query, cache, out=out)() is out
