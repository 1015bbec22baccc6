"""DSA's lengths and places against loops over rows, what is refused, and rows of padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import ForwardMode, SpecInfo
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.calls import MLALayer
from lab.metadata.mla.dsa import DSABackend, Indexer, build_dsa_metadata, count_entries
from lab.references.forward_metadata import dsa_forward_metadata
from tests.metadata.batches import EXTENDS, Case, all_modes, build, drawn_cases, of_mla
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.noted import NotedCalls

LAYER = MLALayer(0.25, 0.5, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=20)
MODES = [ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, *EXTENDS]
CASES = st.one_of(
    st.sampled_from([of_mla(case) for case in all_modes() if case.mode in MODES]), drawn_cases(MODES).map(of_mla)
)


@given(case=CASES, topk=st.integers(1, 70), group=st.sampled_from([1, 4]), missing=st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_lengths_and_places(case: Case, topk: int, group: int, missing: int) -> None:
    batch, pool = build(case)
    with ForbidHostReads():
        metadata = build_dsa_metadata(batch, pool, Indexer(topk, group))
    rows = max(0, len(metadata.seq_lens) - missing)
    generator = torch.Generator().manual_seed(case.seed)
    positions = torch.randint(-1, case.max_context_len, (rows, topk), generator=generator, dtype=torch.int32)
    expected = dsa_forward_metadata(batch, pool, positions, index_topk=topk, index_kpool=group)
    own = sum(batch.extend_seq_lens_cpu) if batch.extend_seq_lens_cpu else batch.num_tokens
    places = metadata.places(positions)
    assert metadata.seq_lens.tolist() == expected.seq_lens
    assert (metadata.seq_lens.dtype, places.dtype) == (torch.int32, torch.int32)
    assert places.tolist()[:own] == expected.places[:own]
    assert (places[own:] == -1).all()
    longest = pool.max_context_len if batch.seq_lens_cpu is None else max(batch.seq_lens_cpu, default=0)
    rows = case.new if case.mode is ForwardMode.TARGET_VERIFY else 0
    assert metadata.max_seq_len == min(longest + rows, pool.max_context_len)


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


def test_a_verification_of_other_rows_than_the_drafts() -> None:
    """Lengths add the rows of the pass, as in MLA's metadata."""
    batch, pool = build(of_mla(Case(ForwardMode.TARGET_VERIFY, (64, 70), new=2)))
    object.__setattr__(batch, "spec_info", SpecInfo(num_draft_tokens=5))
    assert build_dsa_metadata(batch, pool, Indexer(66)).seq_lens.tolist() == [63, 64, 66, 66]
