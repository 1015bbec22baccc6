"""Which call each mode makes, over which requests and rows, and with what arguments."""

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
)
from lab.metadata.engine.forward_mode import QueryRows, UncountedTokens
from lab.metadata.engine.kv_cache import NVFP4KVCache
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.calls import (
    AttentionLayer,
    PlannedCall,
    attention_call,
    call_arguments,
    plan_calls,
    prepare_attention,
)
from lab.metadata.mha.settings import CallSettings, splits_mixed_tail

DECODE, CONTEXT = AttentionCall.DECODE, AttentionCall.CONTEXT
CALLS = {
    ForwardMode.EXTEND: CONTEXT,
    ForwardMode.DECODE: DECODE,
    ForwardMode.MIXED: CONTEXT,
    ForwardMode.IDLE: DECODE,
    ForwardMode.TARGET_VERIFY: DECODE,
    ForwardMode.RAGGED_VERIFY: DECODE,
    ForwardMode.DRAFT_EXTEND: CONTEXT,
    ForwardMode.DRAFT_EXTEND_V2: DECODE,
    ForwardMode.SPLIT_PREFILL: CONTEXT,
    ForwardMode.DLLM_EXTEND: CONTEXT,
}
EXTENDS = [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND]
CAPACITY, P, HEADS, KV_HEADS, DIM = 40, 4, 4, 2, 8
Pass = tuple[ForwardBatch, TRTLLMMHAMetadata, KVPool]


def forward(mode: ForwardMode, new: tuple[int, ...], padding: int = 0, window: bool = False, **fields: Any) -> Pass:
    """Requests with prefixes of 7, 8, 9, … tokens and the given new ones."""
    swa_pages = 50 if window else None
    pool = KVPool(num_requests=4, max_context_len=CAPACITY, page_size=P, num_pages=50, swa_num_pages=swa_pages, seed=3)
    prefixes = [7 + i for i in range(len(new))]
    rows = [pool.add_request(prefix) for prefix in prefixes]
    slots = [pool.extend_request(row, count) for row, count in zip(rows, new, strict=True)]
    counted = [0 if mode.uncounted is UncountedTokens.QUERY_ROWS else count for count in new]
    extends = mode.query_rows.in_extend_seq_lens
    info = SpecInfo(num_draft_tokens=5) if mode is ForwardMode.RAGGED_VERIFY else SpecInfo()
    batch = ForwardBatch(
        forward_mode=mode,
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        seq_lens=torch.tensor([a + b for a, b in zip(prefixes, counted, strict=True)], dtype=torch.int64),
        out_cache_loc=torch.cat([torch.zeros(0, dtype=torch.int64), *slots]),
        num_tokens=sum(new) + padding,
        extend_seq_lens=torch.tensor(new, dtype=torch.int64) if extends else None,
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int64) if extends else None,
        extend_seq_lens_cpu=new if extends else None,
        extend_prefix_lens_cpu=prefixes if extends else None,
        **{"spec_info": None if mode in (*EXTENDS, ForwardMode.DECODE, ForwardMode.IDLE) else info} | fields,
    )
    if mode is ForwardMode.TARGET_VERIFY and not new:
        return batch, None, pool  # type: ignore[return-value]
    return batch, build_mha_metadata(batch, pool), pool


def drawn_cache(pool: KVPool, window: bool = False) -> PagedKVCache:
    cache = pool.new_cache(KV_HEADS, DIM, torch.float32, KVLayout.NHD, sliding_window=window)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def drawn_query(batch: ForwardBatch) -> torch.Tensor:
    return torch.randn(batch.num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(2))


def arguments_of(made: Pass, planned: PlannedCall, layer: AttentionLayer | None = None) -> dict[str, Any]:
    batch, metadata, pool = made
    layer = layer or AttentionLayer(0.5)
    return call_arguments(planned, batch, metadata, layer, drawn_query(batch), drawn_cache(pool), CAPACITY)


@pytest.mark.parametrize("switch", [None, DECODE, CONTEXT])
@pytest.mark.parametrize("mode", CALLS, ids=repr)
def test_the_call_of_every_mode(mode: ForwardMode, switch: AttentionCall | None) -> None:
    switched = mode in (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2) and switch is not None
    assert attention_call(mode, switch) is (switch if switched else CALLS[mode])


def test_prebuilt_makes_no_call() -> None:
    assert set(CALLS) == set(ForwardMode) - {ForwardMode.PREBUILT}
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        attention_call(ForwardMode.PREBUILT, DECODE)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", CALLS, ids=repr)
def test_an_empty_batch_makes_no_call(mode: ForwardMode, split: bool) -> None:
    assert plan_calls(forward(mode, ())[0], split_mixed_tail=split) == []


@pytest.mark.parametrize("mode", CALLS, ids=repr)
def test_one_call_over_the_whole_batch(mode: ForwardMode) -> None:
    new = (1, 1) if mode.query_rows is QueryRows.ONE else (3, 3)
    assert plan_calls(forward(mode, new)[0]) == [PlannedCall(CALLS[mode], 0, 2, 0, sum(new))]


@pytest.mark.parametrize("mode", [*EXTENDS, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.IDLE])
def test_padding_rows_belong_to_no_call(mode: ForwardMode) -> None:
    new = (1, 1) if mode is ForwardMode.IDLE else (3, 3)
    assert plan_calls(forward(mode, new, padding=2)[0]) == [PlannedCall(CALLS[mode], 0, 2, 0, sum(new))]


@pytest.mark.parametrize("mode", [*EXTENDS, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2])
def test_the_context_call_alone_is_handed_padding_rows_if_they_are_handed_over(mode: ForwardMode) -> None:
    made = forward(mode, (3, 3), padding=2)
    (planned,) = plan_calls(made[0], with_padding_rows=True)
    assert planned == PlannedCall(CALLS[mode], 0, 2, 0, 8 if CALLS[mode] is CONTEXT else 6)
    got = arguments_of(made, planned)
    assert len(got["query"]) == planned.num_rows
    if CALLS[mode] is CONTEXT:
        assert got["cum_seq_lens_q"].tolist() == [0, 3, 6]


def test_an_extend_without_host_lengths_is_refused() -> None:
    batch = ForwardBatch(ForwardMode.EXTEND, torch.tensor([1]), torch.tensor([5]), torch.tensor([4, 5]), 2)
    with pytest.raises(ValueError, match="EXTEND needs extend_seq_lens_cpu"):
        plan_calls(batch)


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ((1, 1, 1), [PlannedCall(DECODE, 0, 3, 0, 3)]),
        ((5, 1, 2), [PlannedCall(CONTEXT, 0, 3, 0, 8)]),
        ((5, 1, 2, 1), [PlannedCall(CONTEXT, 0, 3, 0, 8), PlannedCall(DECODE, 3, 1, 8, 1)]),
        ((5, 1, 1), [PlannedCall(CONTEXT, 0, 1, 0, 5), PlannedCall(DECODE, 1, 2, 5, 2)]),
    ],
)
def test_a_mixed_tail(mode: ForwardMode, new: tuple[int, ...], expected: list[PlannedCall]) -> None:
    for padding in (0, 3):
        assert plan_calls(forward(mode, new, padding)[0], split_mixed_tail=True) == expected


@pytest.mark.parametrize("mode", [mode for mode in CALLS if mode not in EXTENDS], ids=repr)
def test_other_batches_ignore_the_setting_for_mixed_tails(mode: ForwardMode) -> None:
    info = SpecInfo(num_draft_tokens=5, speculative_step_id=0)
    for spec_info in (info,) if mode is ForwardMode.RAGGED_VERIFY else (None, info):
        batch = forward(mode, (1, 1), spec_info=spec_info)[0]
        assert plan_calls(batch, split_mixed_tail=True) == plan_calls(batch)
    speculative = forward(ForwardMode.EXTEND, (5, 1), spec_info=SpecInfo())[0]
    assert plan_calls(speculative, split_mixed_tail=True) == [PlannedCall(CONTEXT, 0, 2, 0, 6)]


@pytest.mark.parametrize(
    ("mode", "new", "padding", "q_len"),
    [
        (ForwardMode.DECODE, (1, 1), 0, 1),
        (ForwardMode.IDLE, (1, 1), 2, 1),
        (ForwardMode.TARGET_VERIFY, (4, 4), 0, 4),
        (ForwardMode.DRAFT_EXTEND_V2, (3, 3), 0, 3),
        (ForwardMode.DRAFT_EXTEND_V2, (3, 3), 2, 3),
        (ForwardMode.DRAFT_EXTEND, (3, 3), 0, 3),
    ],
)
def test_equal_widths_on_the_decode_call(mode: ForwardMode, new: tuple[int, ...], padding: int, q_len: int) -> None:
    made = forward(mode, new, padding)
    (planned,) = plan_calls(made[0], DECODE)
    got = arguments_of(made, planned)
    assert got["q_len_per_req"] == q_len
    assert not {"max_q_len", "cum_seq_lens_q", "max_kv_len", "batch_size"} & set(got)
    assert got["max_seq_len"] == CAPACITY
    assert torch.equal(got["query"], drawn_query(made[0])[: sum(new)])
    assert torch.equal(got["block_tables"], made[1].page_table)
    assert got["seq_lens"].tolist() == [7 + new[0], 8 + new[1]]


@pytest.mark.parametrize("new", [(2, 4), (4, 1, 3)])
def test_draft_extend_v1_is_ragged_on_the_decode_call(new: tuple[int, ...]) -> None:
    """Whether or not the rows happen to divide by the requests."""
    made = forward(ForwardMode.DRAFT_EXTEND, new)
    (planned,) = plan_calls(made[0], DECODE)
    got = arguments_of(made, planned)
    assert got["q_len_per_req"] is None
    assert got["max_q_len"] == 4
    assert got["cum_seq_lens_q"].tolist() == [sum(new[:i]) for i in range(len(new) + 1)]


ENCODER = AttentionLayer(0.5, encoder_only=True)


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
def test_an_encoder_only_layer_is_not_causal_in_an_extend(mode: ForwardMode) -> None:
    made = forward(mode, (5, 1))
    (planned,) = plan_calls(made[0])
    assert arguments_of(made, planned, ENCODER)["causal"] is False
    assert "causal" not in arguments_of(made, planned)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE], ids=repr)
def test_one_row_of_an_encoder_only_layer_is_a_plain_decode(mode: ForwardMode) -> None:
    made = forward(mode, (1, 1))
    (planned,) = plan_calls(made[0])
    assert arguments_of(made, planned, ENCODER).keys() == arguments_of(made, planned).keys()


def test_a_verification_on_an_encoder_only_layer_hands_each_row_over_as_a_request() -> None:
    batch, _, pool = forward(ForwardMode.TARGET_VERIFY, (3, 3))
    metadata = build_mha_metadata(batch, pool, expand_encoder_only_verify=True)
    (planned,) = plan_calls(batch)
    got = arguments_of((batch, metadata, pool), planned, ENCODER)
    assert (got["q_len_per_req"], len(got["query"]), got["seq_lens"].tolist()) == (1, 6, [10] * 3 + [11] * 3)
    assert torch.equal(got["block_tables"], metadata.page_table.repeat_interleave(3, dim=0))
    assert not {"max_q_len", "cum_seq_lens_q", "causal"} & set(got)
    window = AttentionLayer(0.5, window_left=6, encoder_only=True)
    assert arguments_of((batch, metadata, pool), planned, window)["window_left"] == 6

    batch, _, pool = forward(ForwardMode.TARGET_VERIFY, (3, 3), window=True)
    metadata = build_mha_metadata(batch, pool, expand_encoder_only_verify=True)
    with pytest.raises(ValueError, match=r"would read the full pool's pages.*keep the layer in the full pool"):
        arguments_of((batch, metadata, pool), planned, replace(window, reads_swa_pool=True))


@pytest.mark.parametrize(
    "mode", [ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY, ForwardMode.DRAFT_EXTEND_V2], ids=repr
)
def test_rows_that_no_call_lets_see_each_other_are_refused(mode: ForwardMode) -> None:
    made = forward(mode, (3, 3))
    (planned,) = plan_calls(made[0])
    with pytest.raises(
        ValueError, match=rf"{mode.name} on an encoder-only layer would be causal.*expand_encoder_only_verify"
    ):
        arguments_of(made, planned, ENCODER)


@pytest.mark.parametrize(("new", "padding"), [((2, 4), 0), ((4, 1, 3), 2), ((3, 3), 0), ((5,), 3)])
def test_a_ragged_verification_is_ragged_whatever_its_widths(new: tuple[int, ...], padding: int) -> None:
    """Equal widths of one replay are unequal ones of the next, and rows of padding are in no request."""
    made = forward(ForwardMode.RAGGED_VERIFY, new, padding)
    (planned,) = plan_calls(made[0])
    got = arguments_of(made, planned)
    assert (got["q_len_per_req"], got["max_q_len"]) == (None, max(new))
    assert got["cum_seq_lens_q"].tolist() == [sum(new[:i]) for i in range(len(new) + 1)]
    assert got["seq_lens"].tolist() == [7 + i + count for i, count in enumerate(new)]


@pytest.mark.parametrize("new", [(2, 4), (4, 1, 3)])
def test_draft_extend_v2_with_unequal_widths_is_refused_on_the_decode_call_alone(new: tuple[int, ...]) -> None:
    made = forward(ForwardMode.DRAFT_EXTEND_V2, new)
    (planned,) = plan_calls(made[0])
    with pytest.raises(ValueError, match=r"same number of rows for every request.*AttentionCall.CONTEXT"):
        arguments_of(made, planned)
    (planned,) = plan_calls(made[0], CONTEXT)
    assert arguments_of(made, planned)["cum_seq_lens_q"][-1] == sum(new)


def test_ragged_rows_of_leading_requests_have_their_own_boundaries() -> None:
    """The decode call takes ``[batch_size + 1]`` offsets of its own requests, as the context call does."""
    made = forward(ForwardMode.DRAFT_EXTEND, (3, 1, 2))
    leading = arguments_of(made, PlannedCall(DECODE, 0, 2, 0, 4))
    assert leading["cum_seq_lens_q"].tolist() == [0, 3, 4]
    assert leading["seq_lens"].shape == (2,)


def test_the_calls_of_a_split_take_their_own_requests() -> None:
    made = forward(ForwardMode.MIXED, (5, 2, 1, 1), padding=2)
    metadata, query = made[1], drawn_query(made[0])
    context, tail = (arguments_of(made, planned) for planned in plan_calls(made[0], split_mixed_tail=True))
    assert context["cum_seq_lens_q"].tolist() == [0, 5, 7]
    assert context["cum_seq_lens_kv"].tolist() == [0, 12, 22]
    assert (context["batch_size"], context["max_q_len"], context["max_kv_len"]) == (2, 5, CAPACITY)
    assert "q_len_per_req" not in context
    assert tail["q_len_per_req"] == 1
    assert "cum_seq_lens_q" not in tail
    for got, requests, rows in ((context, slice(0, 2), slice(0, 7)), (tail, slice(2, 4), slice(7, 9))):
        assert torch.equal(got["query"], query[rows])
        assert torch.equal(got["block_tables"], metadata.page_table[requests])
        assert torch.equal(got["seq_lens"], metadata.cache_seqlens_int32[requests])


class Noted:
    """Functions that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> None:
        self.calls.append(("decode", arguments))

    def trtllm_batch_context_with_kv_cache(self, **arguments: Any) -> None:
        self.calls.append(("context", arguments))


def calls_of_backend(
    query_dtype: torch.dtype, kv_dtype: torch.dtype, **fields: Any
) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a mixed batch whose last two requests have one new token."""
    batch, metadata, pool = forward(ForwardMode.MIXED, (5, 1, 1))
    noted, query = Noted(), drawn_query(batch).to(query_dtype)
    cache = pool.new_cache(KV_HEADS, DIM, kv_dtype, KVLayout.NHD)
    backend = TRTLLMMHABackend(noted, **fields)
    backend.prepare_attention(
        batch, metadata, AttentionLayer(0.5), query, cache, max_context_len=CAPACITY, out=torch.empty_like(query)
    )()
    return noted.calls


def test_the_settings_of_an_engine_reach_the_calls_that_have_them() -> None:
    counters = torch.zeros(64, dtype=torch.uint8)
    settings = CallSettings(counters, skip_softmax_decode=2.0, skip_softmax_prefill=3.0)
    (_, context), (_, tail) = calls_of_backend(
        torch.bfloat16, torch.bfloat16, settings=settings, prefills_with_fmha_v2=False
    )
    assert tail["multi_ctas_kv_counter_buffer"] is counters
    assert (tail["skip_softmax_threshold_scale_factor"], context["skip_softmax_threshold_scale_factor"]) == (2.0, 3.0)
    assert "multi_ctas_kv_counter_buffer" not in context


def test_a_threshold_of_skipped_softmax_is_refused_before_anything_runs() -> None:
    batch, metadata, pool = forward(ForwardMode.DECODE, (1, 1))
    out = torch.full((2, HEADS, DIM), 7.0)
    with pytest.raises(NotImplementedError, match=r"skip_softmax_threshold_scale_factor=2\.0"):
        prepare_attention(
            lab.references,
            batch,
            metadata,
            AttentionLayer(0.5),
            drawn_query(batch),
            drawn_cache(pool),
            max_context_len=CAPACITY,
            out=out,
            plan=plan_calls(batch),
            settings=CallSettings(skip_softmax_decode=2.0),
        )()
    assert (out == 7.0).all()


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
    names = [name for name, _ in calls_of_backend(query_dtype, kv_dtype, prefills_with_fmha_v2=False)]
    assert names == (["context", "decode"] if splits or is_cast else ["context"])
    assert [name for name, _ in calls_of_backend(query_dtype, kv_dtype)] == ["context"]


@pytest.mark.parametrize("fmha_v2", [False, True])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_the_backend_casts_the_query(mode: ForwardMode, kv_dtype: torch.dtype, fmha_v2: bool) -> None:
    """Anew in each call, and the output stays the model's."""
    batch, metadata, pool = forward(mode, (1, 1) if mode is ForwardMode.DECODE else (3, 3))
    noted, query = Noted(), drawn_query(batch).to(BF16)
    cache, out = pool.new_cache(KV_HEADS, DIM, kv_dtype, KVLayout.NHD), torch.empty_like(query)
    backend = TRTLLMMHABackend(noted, prefills_with_fmha_v2=fmha_v2)
    run = backend.prepare_attention(
        batch, metadata, AttentionLayer(0.5), query, cache, max_context_len=CAPACITY, out=out
    )
    is_cast = kv_dtype == E4M3 and (not fmha_v2 or mode is ForwardMode.EXTEND)
    for _ in range(2):
        query.mul_(-0.5)
        run()
        _, arguments = noted.calls[-1]
        assert arguments["query"].dtype == (E4M3 if is_cast else BF16)
        assert torch.equal(arguments["query"].float(), (query.to(E4M3) if is_cast else query).float())
        assert arguments["out"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_the_layer_is_passed_through(mode: ForwardMode) -> None:
    made, sinks = forward(mode, (1, 1)), torch.arange(4.0)
    (planned,) = plan_calls(made[0])
    layer = AttentionLayer(0.5, window_left=6, sinks=sinks)
    got = arguments_of(made, planned, layer)
    assert (got["bmm1_scale"], got["bmm2_scale"], got["window_left"]) == (0.5, 1.0, 6)
    assert got["sinks"] is sinks


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


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_window_layer_reads_the_windows_table(mode: ForwardMode) -> None:
    made, layer = forward(mode, (1, 1), window=True), AttentionLayer(0.5, reads_swa_pool=True)
    metadata = made[1]
    (planned,) = plan_calls(made[0])
    assert metadata.swa_page_table is not None
    assert not torch.equal(metadata.swa_page_table, metadata.page_table)
    assert torch.equal(arguments_of(made, planned, layer)["block_tables"], metadata.swa_page_table)
    assert torch.equal(arguments_of(made, planned)["block_tables"], metadata.page_table)
    with pytest.raises(ValueError, match="no swa_page_table"):
        arguments_of(forward(mode, (1, 1)), planned, layer)


@pytest.mark.parametrize("new", [(5, 2, 1, 1), (1, 1, 1), (5, 1, 2)])
def test_a_split_batch_on_a_window_layer_computes_what_the_whole_one_does(new: tuple[int, ...]) -> None:
    batch, metadata, pool = forward(ForwardMode.MIXED, new, padding=1, window=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    layer = AttentionLayer(0.35, v_scale=0.5, window_left=4, reads_swa_pool=True, sinks=sinks)
    query, cache = drawn_query(batch), drawn_cache(pool, window=True)
    results = []
    for split in (False, True):
        out = torch.full_like(query, 123.0)
        plan = plan_calls(batch, split_mixed_tail=split)
        attention = prepare_attention(
            lab.references, batch, metadata, layer, query, cache, max_context_len=CAPACITY, out=out, plan=plan
        )
        assert attention() is out
        assert (out[sum(new) :] == 123.0).all(), "padding rows are nobody's"
        results.append(out)
    assert (results[0][: sum(new)] != 123.0).all()
    torch.testing.assert_close(results[1], results[0])
