"""Both backends' eager metadata: right in every mode by the loops of `lab.references`, and what they neither read nor share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.metadata import (
    DraftAttention,
    ForwardBatch,
    ForwardMode,
    KVLayout,
    KVPool,
    QueryLayout,
    build_mha_metadata,
    build_mla_decode_metadata,
)
from lab.references.forward_metadata import encoder_only_verify, forward_metadata
from tests.devices import ON_GPU, synchronisation_is_an_error
from tests.metadata.batches import (
    DRAFT_EXTENDS,
    EXTENDS,
    MODES,
    PAGE_SIZES,
    Case,
    all_modes,
    assert_live_cells_right,
    assert_live_pages_right,
    assert_mla_live_cells_right,
    assert_same,
    boundary_lengths,
    build,
    drawn_cases,
    label,
    mla_truth,
    of_mla,
    tensors_of,
)
from tests.metadata.host_reads import ForbidHostReads

MLA, MLA_WITH_OFFSET = DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET


def mla_bounds(batch: ForwardBatch, pool: KVPool, attention: DraftAttention) -> tuple[int, int, QueryLayout]:
    """Return the most keys of a request, the table's width, and the layout of the rows, from host facts."""
    mode, news = batch.forward_mode, list(batch.extend_seq_lens_cpu or ())
    longest = pool.max_context_len if batch.seq_lens_cpu is None else max(batch.seq_lens_cpu, default=0)
    rows = mla_truth(batch, pool, attention).max_seq_len_q
    is_ragged, is_padded = mode is ForwardMode.RAGGED_VERIFY, len(set(news)) > 1
    if is_ragged and batch.seq_lens_cpu is not None:
        longest = max((length + new for length, new in zip(batch.seq_lens_cpu, news, strict=True)), default=0)
    if mode is ForwardMode.TARGET_VERIFY or is_ragged:
        longest += rows
    elif (
        mode in (ForwardMode.DECODE, ForwardMode.IDLE) and batch.spec_info is not None and attention is MLA_WITH_OFFSET
    ):
        longest += 1 + int(batch.spec_info.speculative_step_id or 0)
    blocks = -(-(longest + (rows if is_padded and not is_ragged else 0)) // 4096)
    layout = QueryLayout.PADDED if is_ragged or is_padded else QueryLayout.VIEW
    return longest, blocks * 4096 // pool.page_size, layout


def assert_mha_right(got: Any, batch: ForwardBatch, pool: KVPool) -> None:
    assert_live_cells_right(got, forward_metadata(batch, pool), dead=0)
    assert got.page_table.shape[1] == -(-pool.max_context_len // pool.page_size)
    assert got.swa_page_table is None or got.swa_page_table.shape == got.page_table.shape
    assert all(tensor.is_contiguous() for tensor in tensors_of(got).values())
    has_no_prefix = batch.forward_mode.is_prefill and not any(batch.extend_prefix_lens_cpu or ())
    assert (got.cu_seqlens_q is got.cu_seqlens_k) is has_no_prefix
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or got.encoder_cache_seqlens is None:
        assert got.encoder_cache_seqlens is got.encoder_page_table is None
        return
    keys, pages = encoder_only_verify(batch, pool)
    assert (got.encoder_cache_seqlens.dtype, got.encoder_cache_seqlens.tolist()) == (torch.int32, keys)
    assert_live_pages_right(got.encoder_page_table, pages)


def assert_mla_right(got: Any, batch: ForwardBatch, pool: KVPool, attention: DraftAttention) -> None:
    assert_mla_live_cells_right(got, mla_truth(batch, pool, attention), dead=-1)
    bounds = (got.max_seq_len_k, got.block_kv_indices.shape[1], got.query_layout)
    assert bounds == mla_bounds(batch, pool, attention)
    if not batch.forward_mode.query_rows.in_extend_seq_lens:
        assert got.sum_seq_lens_q is got.cu_seqlens_q is got.seq_lens_q is None
        return
    news, is_ragged = list(batch.extend_seq_lens_cpu or ()), batch.forward_mode is ForwardMode.RAGGED_VERIFY
    assert (got.seq_lens_q.dtype, got.seq_lens_q.tolist()) == (torch.int32, news)
    assert got.sum_seq_lens_q == (batch.num_tokens if is_ragged else sum(news))


@dataclass(frozen=True)
class Eager:
    """A backend's builder of eager passes, its modes, and the assertion that its metadata is right."""

    build: Callable[[ForwardBatch, KVPool], Any]
    assert_right: Callable[[Any, ForwardBatch, KVPool], None]
    page_sizes: Sequence[int] = (32, 64)
    modes: Sequence[ForwardMode] = tuple(mode for mode in MODES if mode not in EXTENDS)
    fits: Callable[[Case], Case] = of_mla

    def cases(self, page_size: int = 32) -> list[Case]:
        return [self.fits(case) for case in all_modes(page_size) if case.mode in self.modes]

    def hold(self, case: Case) -> Any:
        batch, pool = build(case)
        got = self.build(batch, pool)
        self.assert_right(got, batch, pool)
        return got


def mla(attention: DraftAttention) -> Eager:
    return Eager(
        partial(build_mla_decode_metadata, attention=attention), partial(assert_mla_right, attention=attention)
    )


EAGER = {
    "MHA": Eager(
        partial(build_mha_metadata, expand_encoder_only_verify=True),
        assert_mha_right,
        PAGE_SIZES,
        MODES,
        lambda case: case,
    ),
    "MLA": mla(MLA),
    "MLA with offset": mla(MLA_WITH_OFFSET),
}
EVERY_PAGE_SIZE = pytest.mark.parametrize(
    ("eager", "page_size"),
    [
        pytest.param(eager, page_size, id=f"{name}-{page_size}")
        for name, eager in EAGER.items()
        for page_size in eager.page_sizes
    ],
)
EVERY_CASE = pytest.mark.parametrize(
    ("eager", "case"),
    [
        pytest.param(eager, case, id=f"{name}-{label(case)}-{index}")
        for name, eager in EAGER.items()
        if name != "MLA"  # which is MLA with offset in all but the lengths of draft steps
        for index, case in enumerate(eager.cases())
    ],
)


# --- right by the loops -----------------------------------------------------------------------------------------------


@EVERY_PAGE_SIZE
def test_every_mode(eager: Eager, page_size: int) -> None:
    for case in eager.cases(page_size):
        for dtype in (torch.int32, torch.int64):
            for flag in (False, True):  # a window, of which MLA has none, and the host's lengths
                eager.hold(
                    replace(case, index_dtype=dtype, sliding_window=flag and case.sliding_window, host_seq_lens=flag)
                )


@EVERY_PAGE_SIZE
@pytest.mark.parametrize("offset", range(5))
def test_every_boundary_with_every_offset(eager: Eager, page_size: int, offset: int) -> None:
    """Draft steps and verification widths over all lengths around page boundaries, the capacity included."""
    capacity = 4 * page_size + 5
    lens = tuple(n + offset for n in boundary_lengths(page_size, 1, capacity - offset))
    assert capacity in lens
    for mode in [ForwardMode.DECODE] + [ForwardMode.TARGET_VERIFY] * bool(offset):
        eager.hold(eager.fits(Case(mode, lens, (), offset, page_size, capacity)))


@EVERY_PAGE_SIZE
def test_extends_at_every_boundary(eager: Eager, page_size: int) -> None:
    """The capacity included, where the request table ends before MLA's padded queries do."""
    lens = tuple(boundary_lengths(page_size, 4, 4 * page_size))
    for mode in EXTENDS + DRAFT_EXTENDS:
        for news in (tuple(1 + i % 4 for i in range(len(lens))), (4,) * len(lens), lens):
            if mode in eager.modes:
                eager.hold(eager.fits(Case(mode, lens, news, 0, page_size, 4 * page_size)))


@settings(deadline=None, derandomize=True, max_examples=140)
@given(drawn_cases(virtual=None), st.sampled_from(sorted(EAGER)))
def test_drawn_batches(case: Case, name: str) -> None:
    eager = EAGER[name]
    eager.hold(eager.fits(case if case.mode in eager.modes else replace(case, mode=ForwardMode.DRAFT_EXTEND)))


PADDING = [
    *((name, ForwardMode.IDLE, [2, 1], [0, -2]) for name in EAGER),  # no keys, and fewer than none
    # One request at two lengths, around padding of row 0 and length 1, as SGLang's graph runner fills it.
    *((name, ForwardMode.TARGET_VERIFY, [1, 0, 1], [3, 1, 46]) for name in EAGER),
    ("MHA", ForwardMode.DECODE, [2, 1], [9, 999]),  # beyond the context, with which tables end
]


@pytest.mark.parametrize(("name", "mode", "rows", "seq_lens"), PADDING)
def test_padding_requests_and_slots_without_a_page(
    name: str, mode: ForwardMode, rows: list[int], seq_lens: list[int]
) -> None:
    eager = EAGER[name]
    _, pool = build(eager.fits(Case(mode, (50, 60), new=2, evict_before=16)))
    if pool.full_to_swa is not None:
        pool.full_to_swa[pool.slots(2, 32, 48)] = -1
    slots = torch.tensor([-1, *pool.slots(2, 0, 5).tolist()])[: len(rows) * (1 + (mode is ForwardMode.TARGET_VERIFY))]
    batch = ForwardBatch(mode, torch.tensor(rows), torch.tensor(seq_lens), slots, len(slots))
    eager.assert_right(eager.build(batch, pool), batch, pool)


# --- what must not matter, and what is not read -----------------------------------------------------------------------


@EVERY_CASE
def test_leftovers_in_the_request_table_are_never_looked_at(eager: Eager, case: Case) -> None:
    """Beyond each row's keys lie ids that no map has an entry for."""
    batch, pool = build(case)
    clean = eager.build(batch, pool)
    for row, length in zip(batch.req_pool_indices.tolist(), case.total_lens, strict=True):
        pool.req_to_token[row, length:] = 2**30
    assert_same(eager.build(batch, pool), clean)


@EVERY_CASE
def test_it_shares_no_memory_with_the_batch_or_the_pool(eager: Eager, case: Case) -> None:
    batch, pool = build(replace(case, index_dtype=torch.int32))
    built = eager.build(batch, pool)
    kept = {name: tensor.clone() for name, tensor in tensors_of(built).items()}
    for tensor in (batch.seq_lens, batch.out_cache_loc, pool.req_to_token, batch.extend_seq_lens):
        if tensor is not None:
            tensor.fill_(7)
    for name, tensor in tensors_of(built).items():
        assert torch.equal(tensor, kept[name]), name


@EVERY_CASE
def test_nothing_reads_the_device(eager: Eager, case: Case) -> None:
    batch, pool = build(case)
    with ForbidHostReads():
        real = eager.build(batch, pool)
    shapes = eager.build(*build(case, "meta"))
    assert shapes.max_seq_len_q == real.max_seq_len_q
    for name, tensor in tensors_of(real).items():
        other = tensors_of(shapes)[name]
        assert (other.device.type, other.shape, other.dtype) == ("meta", tensor.shape, tensor.dtype), name


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


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@EVERY_CASE
def test_never_synchronises_with_a_gpu(eager: Eager, case: Case, device: str) -> None:
    batch, pool = build(case, device=device)
    cache = pool.new_cache(2, 8, torch.float8_e4m3fn, KVLayout.HND)
    rows = torch.zeros(len(batch.out_cache_loc), 2, 8, dtype=torch.float8_e4m3fn, device=device)
    with synchronisation_is_an_error():
        got = eager.build(batch, pool)
        cache.write(batch.out_cache_loc, rows, rows)
    eager.assert_right(got, batch, pool)
