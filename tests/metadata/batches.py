"""Batches of every forward mode in numbers, and what the tests of their metadata share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lab.metadata import DraftAttention, ForwardBatch, ForwardMode, KVPool, SpecInfo
from lab.metadata.engine.forward_mode import UncountedTokens
from lab.metadata.engine.graph_inputs import GraphMode
from lab.references.forward_metadata import ForwardMetadata, MLAForwardMetadata, mla_forward_metadata

PAGE_SIZES = [16, 32, 64, 128]
MODES = [mode for mode in ForwardMode if mode is not ForwardMode.PREBUILT]
EXTENDS = [mode for mode in MODES if mode.is_prefill]
DRAFT_EXTENDS = [mode for mode in MODES if mode.extends_draft]


@dataclass(frozen=True)
class Case:
    """A batch to be built: every number is on the host.

    ``total_lens`` are the keys of each request in this pass. ``new_lens`` are the last of them that are queries in
    the extend modes; elsewhere ``new`` counts the last keys that seq_lens leaves out (draft step + 1, or q). In a ragged
    verification seq_lens leaves out ``new_lens``, and ``new`` is the most that a request may have.
    """

    mode: ForwardMode
    total_lens: tuple[int, ...]
    new_lens: tuple[int, ...] = ()
    new: int = 0
    page_size: int = 16
    max_context_len: int = 100
    num_padding_rows: int = 0
    distinct_requests: bool = True
    index_dtype: torch.dtype = torch.int64
    sliding_window: bool = True
    virtual_slots: bool = False
    evict_before: int = 0
    host_seq_lens: bool = False
    seed: int = 0


def build(case: Case, device: str = "cpu") -> tuple[ForwardBatch, KVPool]:
    """A pool of full-length requests, in which the batch sees shorter ones: every row has leftovers in its tail."""
    bs = len(case.total_lens)
    pages = max(1, bs) * -(-case.max_context_len // case.page_size) + 1
    pool = KVPool(
        num_requests=max(1, bs),
        max_context_len=case.max_context_len,
        page_size=case.page_size,
        num_pages=pages + 3,
        swa_num_pages=pages if case.sliding_window else None,
        num_virtual_pages=2 * pages + 7 if case.virtual_slots else None,
        seed=case.seed,
        device=device,
    )
    admitted = [pool.add_request(case.max_context_len) for _ in range(max(1, bs))]
    rows = (admitted if case.distinct_requests else admitted[:1] * bs)[:bs]
    if case.sliding_window:
        for row in set(rows):
            pool.evict_swa(row, case.evict_before)

    mode, totals = case.mode, list(case.total_lens)
    ragged, extends = mode.query_rows.are_bounded, mode.query_rows.in_extend_seq_lens
    news = list(case.new_lens) if extends else [max(1, case.new) if mode is ForwardMode.TARGET_VERIFY else 1] * bs
    seq_lens = [total - (new if ragged else case.new) for total, new in zip(totals, news, strict=True)]
    prefixes = [total - new for total, new in zip(totals, news, strict=True)]
    locs = [pool.slots(row, max(0, a), max(0, b)) for row, a, b in zip(rows, prefixes, totals, strict=True)]

    def vector(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=case.index_dtype, device=device)

    spec_info = None
    if ragged or mode is ForwardMode.TARGET_VERIFY:
        spec_info = SpecInfo(num_draft_tokens=case.new)
    elif mode.extends_draft:
        width = news[0] if len(set(news)) == 1 else -1
        spec_info = SpecInfo(num_tokens_per_req=width, num_accept_tokens=vector(news))
    elif case.new:
        spec_info = SpecInfo(speculative_step_id=case.new - 1)
    batch = ForwardBatch(
        forward_mode=mode,
        req_pool_indices=vector(rows),
        seq_lens=vector(seq_lens),
        out_cache_loc=torch.cat([*locs, torch.zeros(0, dtype=torch.int64, device=device)]),
        num_tokens=sum(news) + case.num_padding_rows,
        extend_seq_lens=vector(news) if extends else None,
        extend_prefix_lens=vector(prefixes) if extends else None,
        extend_seq_lens_cpu=news if extends else None,
        extend_prefix_lens_cpu=prefixes if extends else None,
        seq_lens_cpu=seq_lens if case.host_seq_lens else None,
        spec_info=spec_info,
    )
    return batch, pool


def graph_case(mode: GraphMode, totals: Sequence[int], **fields: Any) -> Case:
    """Return a batch of a graph's mode; requests that may differ in rows have 1, 2, 3, … of them in turn."""
    most, count, new = mode.num_tokens_per_req, len(totals), 0
    if mode.draft_step is not None:
        new = mode.draft_step + 1
    elif mode.forward_mode.uncounted is UncountedTokens.QUERY_ROWS:
        new = most
    rows = [most] * count if mode.forward_mode.query_rows.are_uniform else [1 + i % most for i in range(count)]
    return Case(mode.forward_mode, tuple(totals), tuple(rows) if mode.in_extend_seq_lens else (), new, **fields)


def boundary_lengths(page_size: int, smallest: int, largest: int) -> list[int]:
    """Lengths that leave 0, 1 and page_size - 1 tokens in the last page."""
    around = {pages * page_size + extra for pages in range(9) for extra in (-1, 0, 1)}
    return sorted(length for length in around | {smallest, largest} if smallest <= length <= largest)


def all_modes(page_size: int = 32) -> list[Case]:
    """Return the kinds of batch of each mode, at lengths that offsets and padding carry over a page boundary."""
    p = page_size
    lens, equal, unequal = (p + 1, 2 * p, 3 * p - 1, 3 * p + 1), (4, 4, 4, 4), (3, 1, 4, 2)
    verify, ragged = ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY

    def of(
        mode: ForwardMode, totals: Sequence[int] = lens, news: Sequence[int] = (), new: int = 0, padding: int = 0
    ) -> Case:
        return Case(mode, tuple(totals), tuple(news), new, p, 5 * p - 3, num_padding_rows=padding)

    return [
        *[of(mode, totals) for mode in (ForwardMode.DECODE, ForwardMode.IDLE) for totals in (lens, ())],
        *[of(ForwardMode.DECODE, new=step + 1) for step in range(4)],
        of(ForwardMode.IDLE, (), new=1),
        *[of(verify, totals, new=new) for totals, new in ((lens, 1), (lens, 4), ((), 4))],
        *[of(ragged, lens, unequal, most) for most in (4, 6)],
        *[of(ragged, lens, equal, 4, padding=2), of(ragged, (), new=4)],
        *[
            of(mode, lens, rows, padding=padding)
            for mode in DRAFT_EXTENDS
            for rows, padding in ((unequal, 0), (equal, 4))
        ],
        *[of(mode, lens, rows) for mode in EXTENDS for rows in (lens, (p + 1, 3, p, 1))],
        *[of(mode, lens, (p + 1, 3, p, 1), padding=5) for mode in EXTENDS],
        *[of(mode, ()) for mode in DRAFT_EXTENDS + EXTENDS],
    ]


def of_mla(case: Case) -> Case:
    """Return the case with pages that the MLA backend has, of 32 or 64 tokens, and no sliding window."""
    page_size = 64 if case.page_size > 32 else 32
    longest = max(*case.total_lens, 4 * page_size, case.max_context_len)
    return replace(case, page_size=page_size, max_context_len=longest, sliding_window=False, evict_before=0)


def with_drafts(case: Case, rows: int) -> Case:
    """Return the case with lengths on the host, and a draft of so many rows of each request after a key or more."""
    if case.mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        return replace(case, host_seq_lens=True)
    totals, extends = tuple(max(total, rows + 1) for total in case.total_lens), case.mode.extends_draft
    new_lens, new = ((rows,) * len(totals), 0) if extends else ((), rows)
    return replace(case, total_lens=totals, new_lens=new_lens, new=new, host_seq_lens=True, num_padding_rows=0)


def label(case: Case) -> str:
    kind = "prefix" if case.new_lens and case.new_lens != case.total_lens else f"new{case.new}"
    return f"{case.mode.name}-{kind}-bs{len(case.total_lens)}-pad{case.num_padding_rows}"


@st.composite
def drawn_cases(draw: st.DrawFn, modes: Sequence[ForwardMode] = MODES, virtual: bool | None = False) -> Case:
    """Batches of any of the modes with lengths around page boundaries; slots are virtual, or as drawn if None."""
    mode, page_size = draw(st.sampled_from(modes)), draw(st.sampled_from(PAGE_SIZES))
    sizes = draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1, 0, 1, 7]), st.integers(1, 40)), max_size=5))
    ragged, extends = mode.query_rows.are_bounded, mode.query_rows.in_extend_seq_lens
    new = draw(st.integers(0, 5))
    new = 0 if extends and not ragged else max(new, int(ragged or mode is ForwardMode.TARGET_VERIFY))
    totals = tuple(max(pages * page_size + extra, new + 1) for pages, extra, _ in sizes)
    most = [new] * len(sizes) if ragged else totals
    some = [1 + (wanted % n if ragged else min(n, wanted) - 1) for n, (_, _, wanted) in zip(most, sizes, strict=True)]
    return Case(
        mode,
        totals,
        tuple(most if draw(st.booleans()) else some) if extends else (),
        new,
        page_size,
        max_context_len=4 * page_size + 9,
        num_padding_rows=draw(st.integers(0, 3)) if extends or mode is ForwardMode.IDLE else 0,
        distinct_requests=draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        sliding_window=draw(st.booleans()),
        virtual_slots=draw(st.booleans()) if virtual is None else virtual,
        evict_before=draw(st.integers(0, 4)) * page_size,
        host_seq_lens=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def tensors_of(metadata: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(metadata).items() if isinstance(value, Tensor)}


def assert_same(a: Any, b: Any) -> None:
    for name, value in vars(a).items():
        other = getattr(b, name)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name


def assert_live_cells_right(got: Any, expected: ForwardMetadata, dead: int | None = None) -> None:
    """Compare MHA's metadata with the reference's; `dead` fills the tables' tails unless it is None."""
    assert got.max_seq_len_q == expected.max_seq_len_q
    _assert_equals("cache_seqlens_int32", got.cache_seqlens_int32, torch.int32, expected.cache_seqlens)
    _assert_equals("cu_seqlens_q", got.cu_seqlens_q, torch.int32, expected.cu_seqlens_q)
    _assert_equals("cu_seqlens_k", got.cu_seqlens_k, torch.int32, expected.cu_seqlens_k)
    assert_live_pages_right(got.page_table, expected.page_table, dead)
    if expected.swa_page_table is None:
        assert got.swa_page_table is got.swa_out_cache_loc is None
    else:
        assert_live_pages_right(got.swa_page_table, expected.swa_page_table, dead)
        _assert_equals("swa_out_cache_loc", got.swa_out_cache_loc, torch.int64, expected.swa_out_cache_loc)


def mla_truth(
    batch: ForwardBatch, pool: KVPool, attention: DraftAttention, block: int | None = None
) -> MLAForwardMetadata:
    counts_draft = attention is DraftAttention.MLA_WITH_OFFSET
    return mla_forward_metadata(batch, pool, counts_draft=counts_draft, block=block)


def assert_mla_live_cells_right(got: Any, expected: MLAForwardMetadata, dead: int | None = None) -> None:
    """Compare the lengths, rows and live pages of TRTLLMMLADecodeMetadata with the reference's; `dead` as above."""
    assert got.max_seq_len_q == expected.max_seq_len_q
    _assert_equals("seq_lens_k", got.seq_lens_k, torch.int32, expected.seq_lens_k)
    assert_live_pages_right(got.block_kv_indices, expected.block_table, dead)
    assert got.block_kv_indices.stride(1) == 1
    if got.cu_seqlens_q is not None:
        _assert_equals("cu_seqlens_q", got.cu_seqlens_q, torch.int32, expected.cu_seqlens_q)


def assert_live_pages_right(table: Tensor, live: list[list[int]], dead: int | None = None) -> None:
    """Each row starts with its live pages; with `dead`, that fills the rest of it."""
    assert table.dtype == torch.int32
    assert table.shape[0] == len(live)
    for request, (row, pages) in enumerate(zip(table.tolist(), live, strict=True)):
        assert row[: len(pages)] == pages, f"live pages of request {request}"
        if dead is not None:
            assert set(row[len(pages) :]) <= {dead}, f"dead cells of request {request}"


def _assert_equals(name: str, tensor: Tensor, dtype: torch.dtype, values: Any) -> None:
    assert (tensor.dtype, tensor.tolist()) == (dtype, values), name
