"""Metadata of every forward mode against numbers worked out by hand and against the loops of lab.references."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lab.metadata import (
    ForwardBatch,
    ForwardMode,
    KVLayout,
    KVPool,
    SpecInfo,
    TRTLLMMHAMetadata,
    UncountedTokens,
    build_mha_metadata,
    mixed_tail_split,
)
from lab.references.forward_metadata import encoder_only_verify, forward_metadata
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.mha_cases import (
    DRAFT_EXTENDS,
    EXTENDS,
    MODES,
    PAGE_SIZES,
    Case,
    all_modes,
    assert_same,
    boundary_lengths,
    build,
    drawn_cases,
    label,
)


def assert_matches_reference(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Values equal the loops; dtypes, shapes and packing are what the kernels need; dead cells name the sink."""
    got, expected = build_mha_metadata(batch, pool), forward_metadata(batch, pool)
    bs, width = batch.batch_size, -(-pool.max_context_len // pool.page_size)

    def check(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], values: Any) -> None:
        assert tensor is not None, name
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        assert tensor.is_contiguous(), name
        assert tensor.tolist() == values, name

    check("cache_seqlens_int32", got.cache_seqlens_int32, torch.int32, (bs,), expected.cache_seqlens)
    check("cu_seqlens_q", got.cu_seqlens_q, torch.int32, (bs + 1,), expected.cu_seqlens_q)
    check("cu_seqlens_k", got.cu_seqlens_k, torch.int32, (bs + 1,), expected.cu_seqlens_k)
    assert got.max_seq_len_q == expected.max_seq_len_q
    assert isinstance(got.max_seq_len_q, int)

    def with_sink(rows: list[list[int]]) -> list[list[int]]:
        return [pages + [0] * (width - len(pages)) for pages in rows]

    check("page_table", got.page_table, torch.int32, (bs, width), with_sink(expected.page_table))
    if pool.full_to_swa is None:
        assert got.swa_page_table is got.swa_out_cache_loc is None
    else:
        assert expected.swa_page_table is not None
        check("swa_page_table", got.swa_page_table, torch.int32, (bs, width), with_sink(expected.swa_page_table))
        locs, rows = got.swa_out_cache_loc, (batch.num_tokens,)
        check("swa_out_cache_loc", locs, torch.int64, rows, expected.swa_out_cache_loc)
    return got


# --- numbers worked out by hand -----------------------------------------------------------------------------------


def hand_made_pool() -> KVPool:
    """Pages of 4 tokens, contexts of 18: tables are 5 wide. Row 1 has pages 7 2 5 3 9, row 2 has 4 1 8 6 10.

    The window pool holds pages 2 and 5 of row 1 (as 3 and 1) and 8 and 6 of row 2 (as 2 and 4).
    """
    pool = KVPool(num_requests=2, max_context_len=18, page_size=4, num_pages=11, swa_num_pages=5)
    for row, pages in ((1, (7, 2, 5, 3, 9)), (2, (4, 1, 8, 6, 10))):
        for position in range(18):
            pool.req_to_token[row, position] = pages[position // 4] * 4 + position % 4
    assert pool.full_to_swa is not None
    for page, swa_page in ((2, 3), (5, 1), (8, 2), (6, 4)):
        pool.full_to_swa[page * 4 : page * 4 + 4] = torch.arange(swa_page * 4, swa_page * 4 + 4)
    return pool


def hand_made_batch(mode: ForwardMode, seq_lens: list[int], num_tokens: int, **fields: Any) -> ForwardBatch:
    """Row 2 first, then row 1; the new tokens land on slots 9, 22 and nowhere, an extend's others in the sink."""
    real = num_tokens if "extend_seq_lens_cpu" in fields else min(3, num_tokens)
    return ForwardBatch(
        forward_mode=mode,
        req_pool_indices=torch.tensor([2, 1]),
        seq_lens=torch.tensor(seq_lens),
        out_cache_loc=torch.tensor([9, 22, -1, 0, 0, 0, 0, 0][:real]),
        num_tokens=num_tokens,
        **fields,
    )


def extend_lengths(prefix: list[int], new: list[int]) -> dict[str, Any]:
    return {
        "extend_seq_lens": torch.tensor(new),
        "extend_prefix_lens": torch.tensor(prefix),
        "extend_seq_lens_cpu": new,
        "extend_prefix_lens_cpu": prefix,
    }


@dataclass(frozen=True)
class Worked:
    batch: ForwardBatch
    cache_seqlens: list[int]
    max_seq_len_q: int
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    page_table: list[list[int]]
    swa_page_table: list[list[int]]
    swa_out_cache_loc: list[int]


WORKED = {
    "decode": lambda: Worked(
        hand_made_batch(ForwardMode.DECODE, [8, 9], 2),
        [8, 9],
        1,
        [0, 1, 2],
        [0, 8, 17],
        [[4, 1, 0, 0, 0], [7, 2, 5, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 3, 1, 0, 0]],
        [13, 0 + 6],
    ),
    "idle with padded rows of length 0 and below": lambda: Worked(
        hand_made_batch(ForwardMode.IDLE, [0, -2], 2),
        [0, -2],
        1,
        [0, 1, 2],
        [0, 0, -2],
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
        [13, 6],
    ),
    "draft step 0": lambda: Worked(
        hand_made_batch(ForwardMode.DECODE, [8, 11], 2, spec_info=SpecInfo(speculative_step_id=0)),
        [9, 12],
        1,
        [0, 1, 2],
        [0, 9, 21],
        [[4, 1, 8, 0, 0], [7, 2, 5, 0, 0]],
        [[0, 0, 2, 0, 0], [0, 3, 1, 0, 0]],
        [13, 6],
    ),
    "draft step 1": lambda: Worked(
        hand_made_batch(ForwardMode.DECODE, [8, 11], 2, spec_info=SpecInfo(speculative_step_id=1)),
        [10, 13],
        1,
        [0, 1, 2],
        [0, 10, 23],
        [[4, 1, 8, 0, 0], [7, 2, 5, 3, 0]],
        [[0, 0, 2, 0, 0], [0, 3, 1, 0, 0]],
        [13, 6],
    ),
    "verify 3 rows each, up to the capacity": lambda: Worked(
        hand_made_batch(ForwardMode.TARGET_VERIFY, [15, 6], 6, spec_info=SpecInfo(num_draft_tokens=3)),
        [18, 9],
        3,
        [0, 3, 6],
        [0, 18, 27],
        [[4, 1, 8, 6, 10], [7, 2, 5, 0, 0]],
        [[0, 0, 2, 4, 0], [0, 3, 1, 0, 0]],
        [13, 6, -1, 0, 0, 0],
    ),
    "draft extend, unequal accept lengths": lambda: Worked(
        hand_made_batch(ForwardMode.DRAFT_EXTEND, [13, 4], 4, spec_info=SpecInfo(), **extend_lengths([12, 1], [1, 3])),
        [13, 4],
        3,
        [0, 1, 4],
        [0, 13, 17],
        [[4, 1, 8, 6, 0], [7, 0, 0, 0, 0]],
        [[0, 0, 2, 4, 0], [0, 0, 0, 0, 0]],
        [13, 6, -1, 0],
    ),
    "draft extend v2": lambda: Worked(
        hand_made_batch(
            ForwardMode.DRAFT_EXTEND_V2, [13, 5], 4, spec_info=SpecInfo(), **extend_lengths([11, 3], [2, 2])
        ),
        [13, 5],
        2,
        [0, 2, 4],
        [0, 13, 18],
        [[4, 1, 8, 6, 0], [7, 2, 0, 0, 0]],
        [[0, 0, 2, 4, 0], [0, 3, 0, 0, 0]],
        [13, 6, -1, 0],
    ),
    "extend without prefix": lambda: Worked(
        hand_made_batch(ForwardMode.EXTEND, [3, 5], 8, **extend_lengths([0, 0], [3, 5])),
        [3, 5],
        5,
        [0, 3, 8],
        [0, 3, 8],
        [[4, 0, 0, 0, 0], [7, 2, 0, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 3, 0, 0, 0]],
        [13, 6, -1, 0, 0, 0, 0, 0],
    ),
    "mixed: a chunk on a prefix, then a decoding request": lambda: Worked(
        hand_made_batch(ForwardMode.MIXED, [9, 17], 5, **extend_lengths([5, 16], [4, 1])),
        [9, 17],
        4,
        [0, 4, 5],
        [0, 9, 26],
        [[4, 1, 8, 0, 0], [7, 2, 5, 3, 9]],
        [[0, 0, 2, 0, 0], [0, 3, 1, 0, 0]],
        [13, 6, -1, 0, 0],
    ),
}


@pytest.mark.parametrize("name", WORKED)
def test_by_hand(name: str) -> None:
    worked, pool = WORKED[name](), hand_made_pool()
    got = build_mha_metadata(worked.batch, pool)
    assert got.cache_seqlens_int32.tolist() == worked.cache_seqlens
    assert got.max_seq_len_q == worked.max_seq_len_q
    assert got.cu_seqlens_q.tolist() == worked.cu_seqlens_q
    assert got.cu_seqlens_k.tolist() == worked.cu_seqlens_k
    assert got.page_table.tolist() == worked.page_table
    assert got.swa_page_table is not None
    assert got.swa_page_table.tolist() == worked.swa_page_table
    assert got.swa_out_cache_loc is not None
    assert got.swa_out_cache_loc.tolist() == worked.swa_out_cache_loc
    assert_matches_reference(worked.batch, pool)


# --- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("index", range(len(all_modes())))
def test_every_mode(index: int, page_size: int) -> None:
    case = all_modes(page_size)[index]
    for dtype, window in itertools.product((torch.int32, torch.int64), (False, True)):
        assert_matches_reference(*build(replace(case, index_dtype=dtype, sliding_window=window)))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("offset", range(5))
def test_every_boundary_with_every_offset(page_size: int, offset: int) -> None:
    """Draft steps and verification widths over all lengths around page boundaries, the capacity included."""
    capacity = 4 * page_size + 5
    lens = tuple(n + offset for n in boundary_lengths(page_size, 1, capacity - offset))
    assert capacity in lens
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        if offset or mode is ForwardMode.DECODE:
            case = Case(mode, lens, new=offset, page_size=page_size, max_context_len=capacity)
            assert assert_matches_reference(*build(case)).cache_seqlens_int32.tolist() == list(lens)


@pytest.mark.parametrize("mode", EXTENDS + DRAFT_EXTENDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extends_at_every_boundary(mode: ForwardMode, page_size: int) -> None:
    capacity = 4 * page_size
    lens = tuple(boundary_lengths(page_size, 4, capacity))
    for news in (tuple(1 + i % 4 for i in range(len(lens))), lens):
        assert_matches_reference(*build(Case(mode, lens, news, page_size=page_size, max_context_len=capacity)))


@pytest.mark.parametrize("mode", EXTENDS)
def test_without_any_prefix_the_query_boundaries_are_the_key_boundaries(mode: ForwardMode) -> None:
    whole = build_mha_metadata(*build(Case(mode, (20, 3), (20, 3))))
    assert whole.cu_seqlens_q is whole.cu_seqlens_k
    batch, pool = build(Case(mode, (20, 3), (20, 3)))
    unlisted = assert_matches_reference(replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None), pool)
    assert unlisted.cu_seqlens_q is unlisted.cu_seqlens_k
    one_prefix = build_mha_metadata(*build(Case(mode, (20, 3), (20, 2))))
    assert one_prefix.cu_seqlens_q.tolist() == [0, 20, 22]
    assert one_prefix.cu_seqlens_k.tolist() == [0, 20, 23]


@pytest.mark.parametrize("mode", DRAFT_EXTENDS)
def test_a_draft_extend_never_asks_for_prefixes(mode: ForwardMode) -> None:
    """It has its own query boundaries even when no request has a prefix."""
    batch, pool = build(Case(mode, (20, 3), (20, 3)))
    got = assert_matches_reference(replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None), pool)
    assert got.cu_seqlens_q is not got.cu_seqlens_k


@pytest.mark.parametrize("mode", MODES, ids=repr)
@pytest.mark.parametrize("bs", [0, 1])
def test_empty_and_single_batches(mode: ForwardMode, bs: int) -> None:
    new = 5 if mode.uncounted is UncountedTokens.QUERY_ROWS else 0
    news = (5,) * bs if mode.query_rows.in_extend_seq_lens else ()
    got = assert_matches_reference(*build(Case(mode, (33,) * bs, news, new)))
    if new:
        assert got.max_seq_len_q == 5
    assert got.cu_seqlens_k.tolist() == [0, 33][: bs + 1]


def test_repeated_requests_and_padded_rows() -> None:
    """One request at two lengths, around a row of padding: row 0 and length 1, as SGLang's graph runner fills them."""
    batch = ForwardBatch(
        ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.tensor([1, 0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([3, 1, 14]),
        out_cache_loc=torch.tensor([31, 0, 14]),
        num_tokens=3,
    )
    got = assert_matches_reference(batch, hand_made_pool())
    assert got.cache_seqlens_int32.tolist() == [4, 2, 15]
    assert got.page_table.tolist() == [[7, 0, 0, 0, 0], [0, 0, 0, 0, 0], [7, 2, 5, 3, 0]]


def test_lengths_beyond_the_context_are_clamped_to_the_table() -> None:
    batch, pool = build(Case(ForwardMode.DECODE, (80,)))
    beyond = replace(batch, seq_lens=torch.tensor([7 * 16 + 1]))
    assert assert_matches_reference(beyond, pool).page_table.shape == (1, 7)


def test_unmapped_slots_stay_minus_one() -> None:
    pool = hand_made_pool()
    assert pool.full_to_swa is not None
    pool.full_to_swa[32:36] = -1
    got = assert_matches_reference(hand_made_batch(ForwardMode.DECODE, [9, 9], 2), pool)
    assert got.swa_page_table is not None
    assert got.swa_page_table.tolist() == [[0, 0, -1, 0, 0], [0, 3, 1, 0, 0]]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(drawn_cases(virtual=None))
def test_drawn_batches(case: Case) -> None:
    got = assert_matches_reference(*build(case))
    for boundaries in (got.cu_seqlens_q, got.cu_seqlens_k):
        assert boundaries[0] == 0
        assert (boundaries.diff() >= 0).all()
    assert got.cu_seqlens_k[-1] == got.cache_seqlens_int32.sum()


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("layout", KVLayout)
def test_tables_lead_to_the_tokens_as_they_were_written(window: bool, layout: KVLayout) -> None:
    """No table is consulted for the truth: requests grow in turns, and every token carries its own name."""
    pool = KVPool(num_requests=3, max_context_len=100, page_size=16, num_pages=22, swa_num_pages=13, seed=5)
    cache = pool.new_cache(1, 2, torch.float16, layout, sliding_window=window)
    rows = [pool.add_request(0) for _ in range(3)]
    history: dict[int, list[list[float]]] = {row: [] for row in rows}
    for turn, count in enumerate([16, 1, 15, 17, 2, 16]):
        for row in rows:
            start = len(history[row])
            tokens = [[float(row), float(start + i)] for i in range(count)]
            slots = pool.extend_request(row, count)
            content = torch.tensor(tokens, dtype=torch.float16).view(count, 1, 2)
            cache.write(pool.swa_slots(slots) if window else slots, content, -content)
            history[row] += tokens
            if turn >= 2:
                pool.evict_swa(row, 32)
    batch = ForwardBatch(
        ForwardMode.DECODE, torch.tensor(rows), torch.tensor([67] * 3), pool.slots(rows[0], 64, 67), num_tokens=3
    )
    metadata = build_mha_metadata(batch, pool)
    table = metadata.swa_page_table if window else metadata.page_table
    assert table is not None
    k, v = cache.as_hnd()
    first = 32 if window else 0
    for i, row in enumerate(rows):
        pages = table[i, : -(-67 // 16)].tolist()
        found = torch.cat([k[page, 0] for page in pages])[first:67]
        assert found.tolist() == history[row][first:]
        assert torch.equal(torch.cat([v[page, 0] for page in pages])[first:67], -found)
        if window:
            assert pages[:2] == [0, 0]


# --- what must not matter -----------------------------------------------------------------------------------------


def test_verification_depends_on_no_draft() -> None:
    """So it may be planned before the draft is known, on another stream."""
    batch, pool = build(Case(ForwardMode.TARGET_VERIFY, (20, 33, 49), new=4))
    cache = pool.new_cache(2, 8, torch.bfloat16, KVLayout.NHD)
    before = build_mha_metadata(batch, pool)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, 12, 2, 8, generator=generator).to(torch.bfloat16)
        cache.write(batch.out_cache_loc, k, v)
        accepted = torch.randint(0, 5, (3,), generator=generator)
        drafted = replace(batch, spec_info=SpecInfo(num_draft_tokens=4, num_accept_tokens=accepted))
        assert_same(build_mha_metadata(drafted, pool), before)


def test_draft_steps_differ_by_one_key() -> None:
    steps = [build(Case(ForwardMode.DECODE, (20 + new, 31 + new), new=new)) for new in (1, 2, 3)]
    lengths = [build_mha_metadata(*step).cache_seqlens_int32.tolist() for step in steps]
    assert lengths == [[21, 32], [22, 33], [23, 34]]


# --- no read of the device ----------------------------------------------------------------------------------------


HOST_READS: list[Callable[[Tensor], object]] = [
    lambda x: x.max().item(),
    lambda x: bool(x[0] > 0),
    lambda x: x.nonzero(),
    lambda x: x[x > 1],
    lambda x: x.masked_select(x > 1),
    lambda x: x.repeat_interleave(x),
    lambda x: x.unique(),
    lambda x: torch.equal(x, x),
]


@pytest.mark.parametrize("read", HOST_READS)
def test_the_detectors_detect(read: Callable[[Tensor], object]) -> None:
    with ForbidHostReads(), pytest.raises(AssertionError, match="reads the device"):
        read(torch.tensor([1, 2]))
    with pytest.raises((NotImplementedError, RuntimeError)):
        read(torch.tensor([1, 2], device="meta"))


@pytest.mark.parametrize("case", all_modes(), ids=label)
def test_a_verification_alone_has_its_rows_as_requests_for_encoder_only_layers(case: Case) -> None:
    batch, pool = build(case)
    got = build_mha_metadata(batch, pool, expand_encoder_only_verify=True)
    plain = build_mha_metadata(batch, pool)
    assert plain.encoder_cache_seqlens is plain.encoder_page_table is None
    assert torch.equal(got.page_table, plain.page_table)
    if case.mode is not ForwardMode.TARGET_VERIFY:
        assert got.encoder_cache_seqlens is got.encoder_page_table is None
        return
    keys, pages = encoder_only_verify(batch, pool)
    assert got.encoder_cache_seqlens is not None
    assert got.encoder_page_table is not None
    assert got.encoder_cache_seqlens.dtype == got.encoder_page_table.dtype == torch.int32
    assert got.encoder_page_table.is_contiguous()
    assert got.encoder_cache_seqlens.tolist() == keys
    assert [row[: len(live)] for row, live in zip(got.encoder_page_table.tolist(), pages, strict=True)] == pages


@contextlib.contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to catch a synchronisation")
@pytest.mark.parametrize("case", all_modes(), ids=label)
def test_never_synchronises_with_a_gpu(case: Case) -> None:
    batch, pool = build(case, device="cuda")
    cache = pool.new_cache(2, 8, torch.float8_e4m3fn, KVLayout.HND)
    rows = torch.zeros(len(batch.out_cache_loc), 2, 8, dtype=torch.float8_e4m3fn, device="cuda")
    with synchronisation_is_an_error():
        build_mha_metadata(batch, pool)
        cache.write(batch.out_cache_loc, rows, rows)
    assert_matches_reference(batch, pool)


# --- refusals and the mixed tail ----------------------------------------------------------------------------------


def test_prebuilt_runs_no_attention() -> None:
    batch, pool = build(Case(ForwardMode.DECODE, (5,)))
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        build_mha_metadata(replace(batch, forward_mode=ForwardMode.PREBUILT), pool)
    with pytest.raises(ValueError, match="PREBUILT"):
        forward_metadata(replace(batch, forward_mode=ForwardMode.PREBUILT), pool)


def test_refuses_two_devices() -> None:
    batch, _ = build(Case(ForwardMode.DECODE, (5,)))
    _, pool = build(Case(ForwardMode.DECODE, (5,)), device="meta")
    with pytest.raises(ValueError, match="batch is on cpu but the pool on meta"):
        build_mha_metadata(batch, pool)


@pytest.mark.parametrize(
    ("case", "missing", "message"),
    [
        (Case(ForwardMode.EXTEND, (5,), (2,)), {"extend_seq_lens_cpu": None}, "EXTEND needs extend_seq_lens_cpu"),
        (Case(ForwardMode.EXTEND, (5,), (2,)), {"extend_prefix_lens_cpu": None}, "needs extend_prefix_lens_cpu"),
        (Case(ForwardMode.EXTEND, (5,), (2,)), {"extend_seq_lens": None}, "from the device tensor extend_seq_lens"),
        (Case(ForwardMode.DRAFT_EXTEND, (5,), (2,)), {"extend_seq_lens": None}, "device tensor extend_seq_lens"),
        (Case(ForwardMode.DRAFT_EXTEND_V2, (5,), (2,)), {"extend_seq_lens_cpu": None}, "needs extend_seq_lens_cpu"),
        (Case(ForwardMode.DECODE, (5,), new=1), {"spec_info": SpecInfo()}, "needs SpecInfo.speculative_step_id"),
        (Case(ForwardMode.TARGET_VERIFY, (), new=1), {"spec_info": None}, "needs SpecInfo.num_draft_tokens"),
    ],
)
def test_missing_facts_are_asked_for(case: Case, missing: dict[str, Any], message: str) -> None:
    batch, pool = build(case)
    with pytest.raises(ValueError, match=message):
        build_mha_metadata(replace(batch, **missing), pool)


@pytest.mark.parametrize("mode", EXTENDS)
@pytest.mark.parametrize(
    ("news", "context"),
    [
        ((5, 9, 17, 1), 3),
        ((5, 1, 9, 1, 1), 3),
        ((1, 1), 0),
        ((1,), 0),
        ((2,), 1),
        ((1, 2), 2),
        ((), 0),
        ((5, 0), 2),
    ],
)
def test_mixed_tail(mode: ForwardMode, news: tuple[int, ...], context: int) -> None:
    batch, _ = build(Case(mode, (20,) * len(news), news), device="meta")
    assert mixed_tail_split(batch) == context


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, *DRAFT_EXTENDS, ForwardMode.TARGET_VERIFY])
def test_mixed_tail_is_for_plain_extends(mode: ForwardMode) -> None:
    extends = mode in DRAFT_EXTENDS
    batch, _ = build(Case(mode, (20,), (1,) if extends else (), new=int(mode is ForwardMode.TARGET_VERIFY)))
    with pytest.raises(ValueError, match="no tail of decoding requests"):
        mixed_tail_split(batch)
    with pytest.raises(ValueError, match="needs extend_seq_lens_cpu"):
        mixed_tail_split(replace(batch, forward_mode=ForwardMode.MIXED, spec_info=None, extend_seq_lens_cpu=None))
