"""DSA's and DSV4's lengths and places against loops over rows, their calls, and rows of padding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import ForwardMode, KVPool, SpecInfo
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.backend import MLALayer
from lab.metadata.mla.context_parallel import DecodeContextParallel
from lab.metadata.mla.dsa import DSABackend, Indexer, build_dsa_metadata, count_entries
from lab.metadata.mla.dsv4 import RATIOS, DSV4Backend, DSV4Cache, DSV4Layer, build_dsv4_metadata
from lab.references.forward_metadata import dsa_forward_metadata, dsa_metadata_of_rank
from lab.workloads.inputs.expected_metadata import wrong_dsv4_metadata
from tests.metadata.batches import EXTENDS, Case, all_modes, build, drawn_cases, of_mla
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.noted import NotedCalls

LAYER = MLALayer(0.25, 0.5, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=20)
MODES = [ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, *EXTENDS]
CASES = st.one_of(
    st.sampled_from([of_mla(case) for case in all_modes() if case.mode in MODES]), drawn_cases(MODES).map(of_mla)
)


@given(case=CASES, topk=st.integers(1, 70), group=st.sampled_from([1, 4]), missing=st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=90)
def test_dsa_equals_the_loops(case: Case, topk: int, group: int, missing: int) -> None:
    batch, pool = build(case)
    with ForbidHostReads():
        metadata = build_dsa_metadata(batch, pool, Indexer(topk, group))
    rows = max(0, len(metadata.seq_lens) - missing)
    generator = torch.Generator().manual_seed(case.seed)
    positions = torch.randint(-1, case.max_context_len, (rows, topk), generator=generator, dtype=torch.int32)
    expected_lens, expected_places = dsa_forward_metadata(batch, pool, positions, index_topk=topk, index_kpool=group)
    own = sum(batch.extend_seq_lens_cpu) if batch.extend_seq_lens_cpu else batch.num_tokens
    places = metadata.places(positions)
    assert metadata.seq_lens.tolist() == expected_lens
    assert (metadata.seq_lens.dtype, places.dtype) == (torch.int32, torch.int32)
    assert places.tolist()[:own] == expected_places[:own]
    assert (places[own:] == -1).all()
    longest = pool.max_context_len if batch.seq_lens_cpu is None else max(batch.seq_lens_cpu, default=0)
    rows = case.new if case.mode is ForwardMode.TARGET_VERIFY else 0
    assert metadata.max_seq_len == min(longest + rows, pool.max_context_len)


@given(case=CASES, topk=st.integers(1, 70), size=st.integers(2, 4), per_rank=st.sampled_from([32, 64]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_ranks_entries_equal_the_loops(case: Case, topk: int, size: int, per_rank: int) -> None:
    batch, pool = build(replace(case, page_size=per_rank * size))
    with ForbidHostReads():
        metadata = build_dsa_metadata(batch, pool, Indexer(topk), size)
    generator = torch.Generator().manual_seed(case.seed)
    rows = len(metadata.seq_lens)
    positions = torch.randint(-1, case.max_context_len, (rows, topk), generator=generator, dtype=torch.int32)
    places = metadata.places(positions)
    for rank in range(size):
        own, lens = DecodeContextParallel(size, rank).own_entries(places)
        expected = dsa_metadata_of_rank(places.tolist(), size, rank)
        assert (own.dtype, lens.dtype) == (torch.int32, torch.int32)
        assert (lens.tolist(), own.tolist()) == expected


def test_virtual_slots_are_translated() -> None:
    batch, pool = build(of_mla(Case(ForwardMode.DECODE, (40, 70), page_size=32, virtual_slots=True)))
    places = build_dsa_metadata(batch, pool, Indexer(8)).page_table_1[:, :40]
    assert torch.equal(places, pool.physical_slots(pool.req_to_token[batch.req_pool_indices, :40]))
    assert not torch.equal(places, pool.req_to_token[batch.req_pool_indices, :40])


def test_numbers_of_entries() -> None:
    places = torch.tensor([[5, 9, -1, -1], [-1, -1, -1, -1], [0, 3, 2, 7], [0, -1, -1, -1]], dtype=torch.int32)
    lens = torch.zeros(4, dtype=torch.int32)
    count_entries(places, lens)
    assert lens.tolist() == [2, 1, 4, 1]
    assert places.tolist() == [[5, 9, -1, -1], [0, -1, -1, -1], [0, 3, 2, 7], [0, -1, -1, -1]]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("rope", [16, 0])
def test_each_call_reads_the_positions_anew(rope: int, padding: int) -> None:
    """Padding requests that come after the metadata are in no call; a query is cast in each call."""
    batch, pool = build(of_mla(Case(ForwardMode.DECODE, (40, 33))))
    metadata, padded = build_dsa_metadata(batch, pool, Indexer(3)), pad_requests(batch, 4)
    layer = MLALayer(0.25, 0.5, kv_lora_rank=64, qk_rope_head_dim=rope, qk_nope_head_dim=20)
    query = torch.full((4, 3, 64 + rope), 0.3, dtype=torch.bfloat16)
    out, positions = torch.full((4, 3, 64), 9.0), torch.tensor([[7, -1, -1], [-1, -1, -1], *[[3, 1, 2]] * padding])
    positions = positions.to(torch.int32)  # SGLang trims the rows of padding
    noted = NotedCalls(fill=2.0)
    cache = pool.new_latent_cache(64 + rope, torch.float8_e4m3fn)
    attend = DSABackend(noted).prepare_attention(padded, metadata, layer, query, cache, out=out, topk_indices=positions)
    attend()
    assert out[:2].eq(2.0).all()
    assert not out[2:].any()
    positions[:2] = torch.tensor([[39, 0, 1], [32, 31, -1]])
    query.fill_(0.7)
    attend()
    table = metadata.page_table_1
    seen = [arguments for _, arguments in noted.calls]
    first, second = (call["block_tables"].squeeze(1).tolist() for call in seen)
    assert first == [[int(table[0, 7]), -1, -1, -1], [-1 if rope else 0, -1, -1, -1]]
    assert second == [[*table[0, [39, 0, 1]].tolist(), -1], [*table[1, [32, 31]].tolist(), -1, -1]]
    for call, value in zip(seen, (0.3, 0.7), strict=True):
        assert call["query"].dtype == torch.float8_e4m3fn
        assert call["query"].float().eq(torch.tensor(value).to(torch.float8_e4m3fn).float()).all()
        assert call["query"].shape == (2, 1, 3, 64 + rope)
        assert (call["sparse_mla_top_k"], call["bmm1_scale"], call["bmm2_scale"]) == (4, 0.125, 0.5)
    counted = [[1, 1], [3, 2]]
    assert (
        [call.get("sparse_mla_top_k_lens") for call in seen] == [None, None]
        if rope
        else ([call["sparse_mla_top_k_lens"].tolist() for call in seen] == counted)
    )


@pytest.mark.parametrize(("rows", "query_rows", "new"), [(None, 2, 0), (3, 2, 0), (1, 1, 0), (5, 5, 2)])
def test_positions_and_a_query_for_each_row_are_needed(rows: int | None, query_rows: int, new: int) -> None:
    """Positions of padding, which the metadata does not have, are trimmed in a decode alone."""
    mode = ForwardMode.TARGET_VERIFY if new else ForwardMode.DECODE
    batch, pool = build(of_mla(Case(mode, (40 + new, 33 + new), new=new)))
    metadata = build_dsa_metadata(batch, pool, Indexer())
    query = torch.zeros(query_rows, 3, 80, dtype=torch.bfloat16)
    positions = None if rows is None else torch.zeros(rows, 4, dtype=torch.int32)
    cache = pool.new_latent_cache(80, torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=f"topk_indices has {rows} rows, the metadata {len(metadata.seq_lens)} and the query {query_rows}",
    ):
        DSABackend().prepare_attention(batch, metadata, LAYER, query, cache, out=query, topk_indices=positions)


def test_a_verification_of_dsa_with_other_rows_than_the_drafts() -> None:
    """Lengths add the rows of the pass, as in MLA's metadata."""
    batch, pool = build(of_mla(Case(ForwardMode.TARGET_VERIFY, (64, 70), new=2)))
    object.__setattr__(batch, "spec_info", SpecInfo(num_draft_tokens=5))
    assert build_dsa_metadata(batch, pool, Indexer(66)).seq_lens.tolist() == [63, 64, 66, 66]


DRAFTS = [ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY, ForwardMode.DRAFT_EXTEND_V2]
DSV4_MODES = [ForwardMode.DECODE, ForwardMode.IDLE, *DRAFTS, *EXTENDS]
BF16 = torch.bfloat16


def of_dsv4(case: Case) -> Case:
    """Return the case with a sliding window and pages of 128 or 256 tokens, which a request fills."""
    page_size = 256 if case.page_size > 64 else 128
    longest = max(*case.total_lens, 3 * page_size, case.max_context_len)
    return replace(case, page_size=page_size, max_context_len=longest, sliding_window=True, virtual_slots=False)


DSV4_CASES = st.one_of(
    st.sampled_from([of_dsv4(case) for case in all_modes() if case.mode in DSV4_MODES]),
    drawn_cases(DSV4_MODES).map(of_dsv4),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(DSV4_CASES, st.sampled_from(RATIOS))
def test_dsv4_equals_the_loops(case: Case, ratio: int) -> None:
    batch, pool = build(case)
    with ForbidHostReads():
        metadata = build_dsv4_metadata(batch, pool)
    topk = None
    if ratio in (1, 2, 4):
        numbers = torch.arange(5, dtype=torch.int32).flip(0).repeat(len(metadata.seq_lens), 1)
        held = metadata.seq_lens[:, None] // ratio
        topk = torch.where(held >= 5, numbers, torch.where(numbers.flip(1) < held, numbers.flip(1), -1))
    if case.mode.extends_draft:
        ratio, topk = 0, None
    assert wrong_dsv4_metadata(batch, pool, metadata, ratio, topk) == ""
    assert metadata.sparse_indices(ratio, topk).shape[1] % 64 == 0


def test_rows_and_tensors_that_are_missing_are_told() -> None:
    batch, pool = build(of_dsv4(Case(ForwardMode.EXTEND, (9, 40), (3, 2))))
    metadata = build_dsv4_metadata(batch, pool)
    tables = ("seq_lens", "window", "page_table")
    for names in (*((name,) for name in tables), tables):
        short = replace(metadata, **{name: getattr(metadata, name)[:-1] for name in names})
        assert wrong_dsv4_metadata(batch, pool, short) == f"the number of rows of {names[0]} is 4, expected 5"
    for name in (*tables, "cum_seq_lens_q", "request_lens"):
        wrong = wrong_dsv4_metadata(batch, pool, replace(metadata, **{name: None}))
        assert wrong == f"{name} is None, not a tensor"


def test_tables_lie_in_whole_tiles_of_rows() -> None:
    """What the kernel reads after the last row is inert: one token, and no entry."""
    metadata = build_dsv4_metadata(*build(of_dsv4(Case(ForwardMode.DECODE, (40, 33)))))
    for tensor, inert in ((metadata.seq_lens, 1), (metadata.window, -1)):
        rows = tensor.as_strided((64, *tensor.shape[1:]), tensor.stride())
        assert rows[2:].eq(inert).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_an_entry_is_written_with_the_last_token_of_its_group(ratio: int) -> None:
    pool = KVPool(num_requests=2, max_context_len=300, page_size=128, num_pages=7, swa_num_pages=6)
    row = pool.add_request(300)
    slots, cache = pool.slots(row, 0, 300), DSV4Cache.over(pool, 1, torch.float32, ratio)
    tokens, compressed = (torch.arange(300.0)[:, None] + start for start in (1000, 2000))
    for first, last in ((0, 250), (250, 300)):
        cache.write(slots[first:last], tokens[first:last], compressed[first:last])
    assert cache.window.storage.flatten()[pool.swa_slots(slots)].tolist() == tokens.flatten().tolist()
    if ratio:
        metadata = build_dsv4_metadata(*_of_one(pool, row, 300))
        places = metadata.sparse_indices(ratio, torch.arange(300 // ratio, dtype=torch.int32)[None])[0, 128:]
        found = cache.compressed.storage.flatten()[places[: 300 // ratio].long()]
        assert found.tolist() == compressed[ratio - 1 :: ratio].flatten()[: 300 // ratio].tolist()
    else:
        assert cache.compressed.storage.data_ptr() == cache.window.storage.data_ptr()


def _of_one(pool: KVPool, row: int, length: int) -> Any:
    batch, _ = build(of_dsv4(Case(ForwardMode.DECODE, (length,), max_context_len=300)))
    return replace(batch, req_pool_indices=torch.tensor([row])), pool


@pytest.mark.parametrize("ratio", [0, 4])
def test_each_call_of_dsv4_reads_query_and_selection_anew(ratio: int) -> None:
    """Padding requests that come after the metadata are in no call; a query is cast in each call."""
    batch, pool = build(of_dsv4(Case(ForwardMode.DECODE, (40, 33))))
    metadata, padded = build_dsv4_metadata(batch, pool), pad_requests(batch, 4)
    query, out = torch.full((4, 3, 16), 0.3, dtype=BF16), torch.full((4, 3, 16), 9.0)
    noted = NotedCalls(fill=2.0)
    cache, layer = DSV4Cache.over(pool, 16, torch.float8_e4m3fn, ratio), DSV4Layer(0.25, compress_ratio=ratio)
    topk = torch.tensor([[7, 0, 1], [2, 1, 5]], dtype=torch.int32)
    attend = DSV4Backend(noted, 3).prepare_attention(padded, metadata, layer, query, cache, out=out, topk_indices=topk)
    attend()
    assert out[:2].eq(2.0).all()
    assert not out[2:].any()
    topk[:] = topk.flip(1)
    query.fill_(0.7)
    attend()
    for (_, call), value, chosen in zip(noted.calls, (0.3, 0.7), (topk.flip(1), topk), strict=True):
        assert call["query"].dtype == torch.float8_e4m3fn
        assert call["query"].float().eq(torch.tensor(value).to(torch.float8_e4m3fn).float()).all()
        assert call["query"].shape == (2, 1, 3, 16)
        assert call["sparse_indices"].tolist() == metadata.sparse_indices(ratio, chosen).tolist()
        assert call["sparse_topk_lens"].tolist() == [128 + (3 if ratio else 0)] * 2


def test_what_a_call_lacks() -> None:
    batch, pool = build(of_dsv4(Case(ForwardMode.DECODE, (40, 33))))
    metadata, cache = build_dsv4_metadata(batch, pool), DSV4Cache.over(pool, 16, BF16, 4)
    query, layer = torch.zeros(2, 3, 16, dtype=BF16), DSV4Layer(0.25, compress_ratio=4)
    with pytest.raises(ValueError, match="a layer with compress_ratio=4 has an indexer: pass topk_indices"):
        DSV4Backend().prepare_attention(batch, metadata, layer, query, cache, out=query)
    with pytest.raises(ValueError, match="the query has 1 rows: pass one for each of the metadata's 2"):
        DSV4Backend().prepare_attention(batch, metadata, layer, query[:1], cache, out=query)


def test_a_padding_request_of_a_draft_extend_sees_a_token_in_each_row() -> None:
    batch, pool = build(of_dsv4(Case(ForwardMode.DRAFT_EXTEND_V2, (40, 33), (4, 4))))
    batch = pad_requests(replace(batch, spec_info=SpecInfo(num_tokens_per_req=4)), 3)
    assert build_dsv4_metadata(batch, pool).seq_lens.tolist() == [37, 38, 39, 40, 30, 31, 32, 33, 1, 1, 1, 1]


def test_a_row_without_a_compressed_entry_has_a_column_more_where_sglang_has_it() -> None:
    metadata = build_dsv4_metadata(*build(of_dsv4(Case(ForwardMode.DECODE, (1, 130)))))
    lens = {ratio: metadata.sparse_topk_lens(ratio, 9).tolist() for ratio in RATIOS}
    assert lens == {0: [128, 128], 1: [129, 137], 2: [128, 137], 4: [129, 137], 128: [129, 129]}
