"""Which call each mode makes, over which requests and rows, and with what arguments."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import lab.references
from lab.metadata import (
    AttentionCall,
    ForwardBatch,
    ForwardMode,
    KVLayout,
    KVPool,
    PagedKVCache,
    SpecInfo,
    TRTLLMMHAMetadata,
    build_mha_metadata,
    mixed_tail_split,
)
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_cache import NVFP4KVCache
from lab.metadata.mha.backend import (
    AttentionLayer,
    CallDtypes,
    CallSettings,
    PlannedCall,
    TRTLLMMHABackend,
    attention_call,
    call_arguments,
    plan_calls,
    splits_mixed_tail,
)
from tests.cases import running_sum
from tests.metadata.batches import DRAFT_EXTENDS, EXTENDS, MODES, Case, build
from tests.metadata.noted import NotedCalls

DECODE, CONTEXT = AttentionCall.DECODE, AttentionCall.CONTEXT
VERIFY, RAGGED = ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY
V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
CAPACITY, HEADS, KV_HEADS, DIM = 40, 4, 2, 8
Pass = tuple[ForwardBatch, TRTLLMMHAMetadata, KVPool]


def forward(mode: ForwardMode, new: tuple[int, ...], padding: int = 0, window: bool = False, **fields: Any) -> Pass:
    """Requests with prefixes of 7, 8, 9, … tokens and the given new ones."""
    rows = new if mode.query_rows.in_extend_seq_lens else ()
    most = {VERIFY: max(new, default=5), RAGGED: 5}.get(mode, 0)
    case = Case(mode, tuple(7 + i + n for i, n in enumerate(new)), rows, most, page_size=4, max_context_len=CAPACITY)
    batch, pool = build(replace(case, num_padding_rows=padding, sliding_window=window, seed=3))
    batch = replace(batch, **fields)
    return batch, build_mha_metadata(batch, pool), pool


def drawn_cache(pool: KVPool, window: bool = False) -> PagedKVCache:
    cache = pool.new_cache(KV_HEADS, DIM, torch.float32, KVLayout.NHD, sliding_window=window)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def drawn_query(batch: ForwardBatch) -> torch.Tensor:
    return torch.randn(batch.num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(2))


def arguments_of(made: Pass, planned: PlannedCall | None = None, layer: AttentionLayer | None = None) -> dict[str, Any]:
    """Return the arguments of a planned call, or of the pass's only one."""
    batch, metadata, pool = made
    planned = planned or plan_calls(batch)[0]
    layer = layer or AttentionLayer(0.5)
    return call_arguments(planned, batch, metadata, layer, drawn_query(batch), drawn_cache(pool), CAPACITY)


# --- the calls of a pass ----------------------------------------------------------------------------------------------


def test_no_call_without_attention_or_host_lengths() -> None:
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        attention_call(ForwardMode.PREBUILT, DECODE)
    batch = ForwardBatch(ForwardMode.EXTEND, torch.tensor([1]), torch.tensor([5]), torch.tensor([4, 5]), 2)
    with pytest.raises(ValueError, match="EXTEND needs extend_seq_lens_cpu"):
        plan_calls(batch)


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_one_call_over_the_requests_and_their_own_rows(mode: ForwardMode) -> None:
    """None for an empty batch. A ragged verification has padding rows too, and the context call has them if it is set."""
    for switch in (DECODE, CONTEXT):
        assert attention_call(mode, switch) is (switch if mode in DRAFT_EXTENDS else mode.mha_call)
    empty = forward(mode, ())[0]
    assert plan_calls(empty) == plan_calls(empty, split_mixed_tail=True) == []
    new = (1, 1) if mode.query_rows is QueryRows.ONE else (3, 3)
    for padding in (0,) if mode in (ForwardMode.DECODE, VERIFY) else (0, 2):
        made = forward(mode, new, padding)
        all_rows, own_rows = sum(new) + padding, sum(new) + padding * (mode is RAGGED)
        for with_padding, rows in ((False, own_rows), (True, all_rows if mode.mha_call is CONTEXT else own_rows)):
            (planned,) = plan_calls(made[0], with_padding_rows=with_padding)
            assert planned == PlannedCall(attention_call(mode), 0, 2, 0, rows)
            got = arguments_of(made, planned)
            assert torch.equal(got["query"], drawn_query(made[0])[:rows])
            assert mode.mha_call is not CONTEXT or got["cum_seq_lens_q"].tolist() == running_sum(new).tolist()


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ((1, 1, 1), [PlannedCall(DECODE, 0, 3, 0, 3)]),
        ((5, 1, 2), [PlannedCall(CONTEXT, 0, 3, 0, 8)]),
        ((5, 0), [PlannedCall(CONTEXT, 0, 2, 0, 5)]),
        ((5, 1, 2, 1), [PlannedCall(CONTEXT, 0, 3, 0, 8), PlannedCall(DECODE, 3, 1, 8, 1)]),
        ((5, 1, 1), [PlannedCall(CONTEXT, 0, 1, 0, 5), PlannedCall(DECODE, 1, 2, 5, 2)]),
    ],
)
def test_a_mixed_tail(mode: ForwardMode, new: tuple[int, ...], expected: list[PlannedCall]) -> None:
    for padding in (0, 3):
        batch = forward(mode, new, padding)[0]
        assert plan_calls(batch, split_mixed_tail=True) == expected
        assert mixed_tail_split(batch) == sum(call.num_requests for call in expected if call.call is CONTEXT)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in EXTENDS] + EXTENDS[:1], ids=repr)
def test_other_batches_have_no_tail(mode: ForwardMode) -> None:
    """They ignore the setting; speculative extends too."""
    info, new = SpecInfo(num_draft_tokens=5, speculative_step_id=0), (5, 1) if mode in EXTENDS else (1, 1)
    for spec_info in (info,) if mode is RAGGED or mode in EXTENDS else (None, info):
        batch = forward(mode, new, spec_info=spec_info)[0]
        assert plan_calls(batch, split_mixed_tail=True) == plan_calls(batch)
        with pytest.raises(ValueError, match="no tail of decoding requests"):
            mixed_tail_split(batch)
    plain = replace(batch, forward_mode=ForwardMode.MIXED, spec_info=None, extend_seq_lens_cpu=None)
    with pytest.raises(ValueError, match="needs extend_seq_lens_cpu"):
        mixed_tail_split(plain)


# --- the arguments of a call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "new", "padding"),
    [
        (ForwardMode.DECODE, (1, 1), 0),
        (ForwardMode.IDLE, (1, 1), 2),
        (VERIFY, (4, 4), 0),
        (V2, (3, 3), 0),
        (V2, (3, 3), 2),
        (V1, (3, 3), 0),
    ],
)
def test_equal_widths_on_the_decode_call(mode: ForwardMode, new: tuple[int, ...], padding: int) -> None:
    made = forward(mode, new, padding)
    got = arguments_of(made, *plan_calls(made[0], DECODE))
    assert (got["q_len_per_req"], got["max_seq_len"]) == (new[0], CAPACITY)
    assert not {"max_q_len", "cum_seq_lens_q", "max_kv_len", "batch_size"} & set(got)
    assert torch.equal(got["block_tables"], made[1].page_table)
    assert got["seq_lens"].tolist() == [7 + new[0], 8 + new[1]]


@pytest.mark.parametrize(
    ("mode", "new", "padding"),
    [
        (V1, (2, 4), 0),
        (V1, (4, 1, 3), 0),
        (RAGGED, (2, 4), 0),
        (RAGGED, (4, 1, 3), 2),
        (RAGGED, (3, 3), 0),
        (RAGGED, (5,), 3),
    ],
)
def test_ragged_widths_on_the_decode_call(mode: ForwardMode, new: tuple[int, ...], padding: int) -> None:
    """Whether or not rows divide by requests. Equal widths of a ragged verification are unequal ones of the next replay."""
    made = forward(mode, new, padding)
    (planned,) = plan_calls(made[0], DECODE)
    got = arguments_of(made, planned)
    assert (got["q_len_per_req"], got["max_q_len"]) == (None, max(new))
    assert got["cum_seq_lens_q"].tolist() == running_sum(new).tolist()
    assert got["seq_lens"].tolist() == [7 + i + count for i, count in enumerate(new)]
    if len(new) > 2:  # the decode call takes the offsets of its own requests, as the context call does
        leading = arguments_of(made, PlannedCall(DECODE, 0, len(new) - 1, 0, sum(new[:-1])))
        assert leading["cum_seq_lens_q"].tolist() == running_sum(new[:-1]).tolist()
        assert leading["seq_lens"].shape == (len(new) - 1,)


@pytest.mark.parametrize("new", [(2, 4), (4, 1, 3)])
def test_draft_extend_v2_with_unequal_widths_is_refused_on_the_decode_call_alone(new: tuple[int, ...]) -> None:
    made = forward(V2, new)
    with pytest.raises(ValueError, match=r"same number of rows for every request.*AttentionCall.CONTEXT"):
        arguments_of(made)
    assert arguments_of(made, *plan_calls(made[0], CONTEXT))["cum_seq_lens_q"][-1] == sum(new)


# --- encoder-only layers ----------------------------------------------------------------------------------------------

ENCODER = AttentionLayer(0.5, encoder_only=True)


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_an_encoder_only_layer_is_not_causal_or_refused(mode: ForwardMode) -> None:
    """One row is a plain decode; rows that no call lets see each other are refused."""
    made = forward(mode, (1, 1) if mode.query_rows is QueryRows.ONE else (3, 3))
    if mode in (VERIFY, RAGGED, V2):
        with pytest.raises(
            ValueError, match=rf"{mode.name} on an encoder-only layer would be causal.*expand_encoder_only_verify"
        ):
            arguments_of(made, None, ENCODER)
        return
    got, plain = arguments_of(made, None, ENCODER), arguments_of(made)
    assert "causal" not in plain
    assert got.keys() - plain.keys() == (set() if mode.query_rows is QueryRows.ONE else {"causal"})
    assert not got.get("causal", False)


def test_a_verification_on_an_encoder_only_layer_has_its_rows_as_requests() -> None:
    batch, _, pool = forward(VERIFY, (3, 3))
    metadata = build_mha_metadata(batch, pool, expand_encoder_only_verify=True)
    got = arguments_of((batch, metadata, pool), None, ENCODER)
    assert (got["q_len_per_req"], len(got["query"]), got["seq_lens"].tolist()) == (1, 6, [10] * 3 + [11] * 3)
    assert torch.equal(got["block_tables"], metadata.page_table.repeat_interleave(3, dim=0))
    assert not {"max_q_len", "cum_seq_lens_q", "causal"} & set(got)
    window = AttentionLayer(0.5, window_left=6, encoder_only=True)
    assert arguments_of((batch, metadata, pool), None, window)["window_left"] == 6

    batch, _, pool = forward(VERIFY, (3, 3), window=True)
    metadata = build_mha_metadata(batch, pool, expand_encoder_only_verify=True)
    with pytest.raises(ValueError, match=r"would read the full pool's pages.*keep the layer in the full pool"):
        arguments_of((batch, metadata, pool), None, replace(window, reads_swa_pool=True))


# --- an engine's settings, dtypes and layers --------------------------------------------------------------------------


def prepared(
    made: Pass, query: torch.Tensor, out: torch.Tensor, kv_dtype: torch.dtype, **fields: Any
) -> tuple[Callable[[], Any], list[tuple[str, dict[str, Any]]]]:
    """Return a pass's attention as the backend prepares it, and the list that its calls are noted in."""
    batch, metadata, pool = made
    noted, cache = NotedCalls(), pool.new_cache(KV_HEADS, DIM, kv_dtype, KVLayout.NHD)
    run = TRTLLMMHABackend(noted, **fields).prepare_attention(
        batch, metadata, AttentionLayer(0.5), query, cache, max_context_len=CAPACITY, out=out
    )
    return run, noted.calls


def calls_of_mixed(query_dtype: torch.dtype, kv_dtype: torch.dtype, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a mixed batch whose last two requests have one new token."""
    made = forward(ForwardMode.MIXED, (5, 1, 1))
    query = drawn_query(made[0]).to(query_dtype)
    run, calls = prepared(made, query, torch.empty_like(query), kv_dtype, **fields)
    run()
    return calls


def test_the_settings_of_an_engine_reach_the_calls_that_have_them() -> None:
    counters = torch.zeros(64, dtype=torch.uint8)
    settings = CallSettings(counters, skip_softmax_decode=2.0, skip_softmax_prefill=3.0)
    (_, context), (_, tail) = calls_of_mixed(
        torch.bfloat16, torch.bfloat16, settings=settings, prefills_with_fmha_v2=False
    )
    assert tail["multi_ctas_kv_counter_buffer"] is counters
    assert (tail["skip_softmax_threshold_scale_factor"], context["skip_softmax_threshold_scale_factor"]) == (2.0, 3.0)
    assert "multi_ctas_kv_counter_buffer" not in context


BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("query_dtype", "kv_dtype", "splits"),
    [(BF16, BF16, True), (FP16, FP16, True), (E4M3, E4M3, True), (BF16, E4M3, False), (torch.float32,) * 2 + (False,)],
)
def test_the_tail_is_split_by_dtypes_layer_and_prefill_kernel(
    query_dtype: torch.dtype, kv_dtype: torch.dtype, splits: bool
) -> None:
    assert splits_mixed_tail(query_dtype, kv_dtype) is splits
    assert not splits_mixed_tail(query_dtype, kv_dtype, prefills_with_fmha_v2=True)
    assert not splits_mixed_tail(query_dtype, kv_dtype, is_decoder=False)
    is_cast = (query_dtype, kv_dtype) == (BF16, E4M3)  # by the backend, so that the dtypes are equal after all
    names = [name for name, _ in calls_of_mixed(query_dtype, kv_dtype, prefills_with_fmha_v2=False)]
    assert names == ([CONTEXT.value, DECODE.value] if splits or is_cast else [CONTEXT.value])
    assert [name for name, _ in calls_of_mixed(query_dtype, kv_dtype)] == [CONTEXT.value]


@pytest.mark.parametrize("fmha_v2", [False, True])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_the_backend_casts_the_query(mode: ForwardMode, kv_dtype: torch.dtype, fmha_v2: bool) -> None:
    """Anew in each call, and the output stays the model's."""
    made = forward(mode, (1, 1) if mode is ForwardMode.DECODE else (3, 3))
    query = drawn_query(made[0]).to(BF16)
    out = torch.empty_like(query)
    run, calls = prepared(made, query, out, kv_dtype, prefills_with_fmha_v2=fmha_v2)
    is_cast = kv_dtype == E4M3 and (not fmha_v2 or mode is ForwardMode.EXTEND)
    for _ in range(2):
        query.mul_(-0.5)
        run()
        _, arguments = calls[-1]
        assert arguments["query"].dtype == (E4M3 if is_cast else BF16)
        assert torch.equal(arguments["query"].float(), (query.to(E4M3) if is_cast else query).float())
        assert arguments["out"].data_ptr() == out.data_ptr()


def test_an_output_of_another_dtype_is_the_calls_own_and_padding_stays() -> None:
    batch, metadata, pool = forward(ForwardMode.MIXED, (5, 1, 1), padding=2)
    query, cache = drawn_query(batch), drawn_cache(pool)
    same, other = (torch.full_like(query, 7.0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    dtypes = CallDtypes(torch.float32, torch.float32)
    backend = TRTLLMMHABackend(lab.references, dtypes=dtypes, split_mixed_tail=True)
    for out in (same, other):
        attention = backend.prepare_attention(
            batch, metadata, AttentionLayer(0.5), query, cache, max_context_len=CAPACITY, out=out
        )
        assert attention() is out
    assert torch.equal(same.double(), other)
    assert (other[7:] == 7.0).all()
    assert (other[:7] != 7.0).all()


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_layer_has_its_own_terms_and_reads_its_own_table(mode: ForwardMode) -> None:
    made, sinks = forward(mode, (1, 1), window=True), torch.arange(4.0)
    layer = AttentionLayer(0.5, window_left=6, sinks=sinks, reads_swa_pool=True)
    got, table = arguments_of(made, None, layer), made[1].swa_page_table
    assert (got["bmm1_scale"], got["bmm2_scale"], got["window_left"]) == (0.5, 1.0, 6)
    assert got["sinks"] is sinks
    assert not torch.equal(table, made[1].page_table)
    assert torch.equal(got["block_tables"], table)
    assert torch.equal(arguments_of(made)["block_tables"], made[1].page_table)
    with pytest.raises(ValueError, match="no swa_page_table"):
        arguments_of(forward(mode, (1, 1)), None, layer)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize(
    ("dtype", "scales", "expected"),
    [
        (torch.float8_e4m3fn, (0.25, 0.0625), (0.125, 0.0625)),
        (torch.float8_e4m3fn, (0.0, -1.0), (0.5, 1.0)),
        (torch.bfloat16, (0.25, 0.0625), (0.5, 1.0)),
        (torch.uint8, (0.25, 0.0625), (0.125, 0.0625)),
    ],
)
def test_scales_count_over_quantised_caches_alone(
    mode: ForwardMode, dtype: torch.dtype, scales: tuple[float, float], expected: tuple[float, float]
) -> None:
    batch, metadata, pool = forward(mode, (1, 1))
    (planned,) = plan_calls(batch)
    cache = pool.new_cache(KV_HEADS, 16, dtype, KVLayout.NHD)
    if dtype == torch.uint8:
        cache = NVFP4KVCache.over(cache, trtllm_gen=True)
    layer = AttentionLayer(0.5, *scales)
    got = call_arguments(planned, batch, metadata, layer, drawn_query(batch), cache, CAPACITY)
    assert (got["bmm1_scale"], got["bmm2_scale"]) == expected
    assert ("kv_cache_sf" in got) == (dtype == torch.uint8)
