"""The verify mask's sizes against numbers worked out by hand, and its contents against loops."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lab.metadata import KVPool
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.speculation.verify_mask import (
    VerifyMask,
    VerifyMaskForm,
    fill_verify_mask,
    preallocate_verify_mask,
    verify_mask_cells,
    write_chain_mask,
)
from lab.metadata.speculation.verify_plan import ChainVerify

FULL, QLEN_ONLY = VerifyMaskForm.FULL, VerifyMaskForm.QLEN_ONLY
FORMS = list(VerifyMaskForm)


def allocate(form: VerifyMaskForm, **changes: Any) -> VerifyMask | None:
    sizes = {"max_batch_size": 3, "num_draft_tokens": 2, "max_context_len": 5, "device": "cpu"}
    return preallocate_verify_mask(form, **sizes | changes)


def mask_of(form: VerifyMaskForm, **changes: Any) -> VerifyMask:
    mask = allocate(form, **changes)
    assert mask is not None
    return mask


def verify_with(mask: VerifyMask | None) -> ChainVerify:
    """The backend whose draft fills the mask; its pool says nothing about the mask's sizes."""
    pool = KVPool(num_requests=1, max_context_len=32, page_size=32, num_pages=2)
    return ChainVerify(pool, 2, [1], TRTLLMMLABackend(), mask)


def chain(form: VerifyMaskForm, seq_lens: list[int], num_draft_tokens: int) -> list[bool]:
    """Cell by cell, request by request, row by row."""
    return [
        key < prefix or key - prefix <= row
        for prefix in (seq_lens if form is FULL else [0] * len(seq_lens))
        for row in range(num_draft_tokens)
        for key in range(prefix + num_draft_tokens)
    ]


@pytest.mark.parametrize(("form", "size_bytes"), [(FULL, 134_221_824), (QLEN_ONLY, 4_096)])
def test_sizes_of_the_worked_case(form: VerifyMaskForm, size_bytes: int) -> None:
    mask = mask_of(form, max_batch_size=256, num_draft_tokens=4, max_context_len=131072, device="meta")
    assert mask.nbytes == size_bytes
    assert verify_mask_cells(form, 256, 4, max_context_len=131072) == size_bytes


@pytest.mark.parametrize("form", FORMS)
def test_a_new_buffer_is_false(form: VerifyMaskForm) -> None:
    mask = mask_of(form)
    assert mask.buffer.dtype == torch.bool
    assert not mask.buffer.any()
    with pytest.raises(FrozenInstanceError):
        mask.form = FULL  # type: ignore[misc]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes",
    [{"num_draft_tokens": None}, {"num_draft_tokens": 0}, {"skip_prefill": True}, {"is_draft_runner": True}],
)
def test_there_is_none_where_nothing_is_verified(form: VerifyMaskForm, changes: dict[str, Any]) -> None:
    mask = allocate(form, **changes)
    assert mask is None
    assert verify_with(mask).get_verify_buffers_to_fill_after_draft() == [None, None]


@pytest.mark.parametrize("form", FORMS)
def test_the_draft_stage_is_handed_the_buffer_itself_and_no_positions(form: VerifyMaskForm) -> None:
    mask = mask_of(form)
    tree_mask, positions = verify_with(mask).get_verify_buffers_to_fill_after_draft()
    assert tree_mask is mask.buffer
    assert positions is None


@pytest.mark.parametrize(("batch_size", "fits"), [(0, True), (2, True), (3, True), (4, False)])
def test_fits_up_to_the_largest_batch(batch_size: int, fits: bool) -> None:
    assert mask_of(QLEN_ONLY).fits(batch_size) is fits


def test_cells_of_a_step_by_hand() -> None:
    """Two requests of 3 and 4 tokens, 2 drafts: blocks of 2×5 and 2×6, or of 2×2 twice."""
    assert verify_mask_cells(FULL, 2, 2, max_context_len=5, seq_lens_sum=7) == 22
    assert verify_mask_cells(QLEN_ONLY, 2, 2, max_context_len=5, seq_lens_sum=7) == 8
    assert verify_mask_cells(FULL, 2, 2, max_context_len=5, seq_lens_sum=0) == 8  # a sum of 0 is known, not None


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    num_draft_tokens=st.integers(0, 4),
    form=st.sampled_from(FORMS),
)
@settings(deadline=None, derandomize=True)
def test_without_host_lengths_the_upper_bound_is_enough(
    lengths: list[int], num_draft_tokens: int, form: VerifyMaskForm
) -> None:
    batch_size, longest = len(lengths), max(lengths, default=0)
    known = verify_mask_cells(form, batch_size, num_draft_tokens, max_context_len=9, seq_lens_sum=sum(lengths))
    bound = verify_mask_cells(form, batch_size, num_draft_tokens, max_context_len=9, seq_lens_sum=None)
    tight = verify_mask_cells(form, batch_size, num_draft_tokens, max_context_len=longest)
    assert known == len(chain(form, lengths, num_draft_tokens)) <= bound
    if len(set(lengths)) <= 1:
        assert tight == known
    if form is QLEN_ONLY:
        assert known == bound


def test_the_buffer_is_as_large_as_the_largest_step_without_host_lengths() -> None:
    for form in FORMS:
        assert mask_of(form).nbytes == verify_mask_cells(form, 3, 2, max_context_len=5, seq_lens_sum=15)


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_is_filled_whole_however_small_the_batch(form: VerifyMaskForm) -> None:
    mask = mask_of(form)
    assert not mask.buffer.any()
    fill_verify_mask(mask, 1)
    assert mask.buffer.all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(
    seq_lens=st.lists(st.integers(0, 9), max_size=4),
    num_draft_tokens=st.integers(1, 5),
    stale=st.booleans(),
)
@settings(deadline=None, derandomize=True)
def test_a_chain_matches_the_loop(
    form: VerifyMaskForm, dtype: torch.dtype, seq_lens: list[int], num_draft_tokens: int, stale: bool
) -> None:
    mask = mask_of(form, max_batch_size=4, num_draft_tokens=num_draft_tokens, max_context_len=9)
    mask.buffer.fill_(stale)
    write_chain_mask(mask, torch.tensor(seq_lens, dtype=dtype))
    expected = chain(form, seq_lens, num_draft_tokens)
    assert mask.buffer.tolist() == expected + [True] * (mask.nbytes - len(expected))


def test_a_chain_by_hand() -> None:
    mask = mask_of(FULL)
    write_chain_mask(mask, torch.tensor([1, 0]))
    t, f = True, False
    assert mask.buffer.tolist() == [t, t, f, t, t, t] + [t, f, t, t] + [t] * 32


class ForbidHostReads(TorchDispatchMode):
    """Fails on the operations that `.item()`, `.tolist()` and boolean indexing come down to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_written_without_reading_the_lengths(form: VerifyMaskForm) -> None:
    mask, seq_lens = mask_of(form), torch.tensor([5, 2, 3])
    with ForbidHostReads():
        with pytest.raises(AssertionError):
            seq_lens.sum().item()
        write_chain_mask(mask, seq_lens)
    meta = mask_of(form, device="meta")  # where nothing can be read
    write_chain_mask(meta, seq_lens.to("meta"))


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused_before_anything_is_written(form: VerifyMaskForm) -> None:
    mask = mask_of(form)
    with pytest.raises(ValueError, match="batch_size=4 is more than the mask's max_batch_size=3"):
        write_chain_mask(mask, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="batch_size=4"):
        fill_verify_mask(mask, 4)
    with pytest.raises(ValueError, match="on meta but the mask on cpu"):
        write_chain_mask(mask, torch.zeros(1, dtype=torch.int64, device="meta"))
    assert not mask.buffer.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": -1}, "batch_size=-1 must not be negative"),
        ({"num_draft_tokens": -2}, "num_draft_tokens=-2 must not be negative"),
        ({"max_context_len": -3}, "max_context_len=-3 must not be negative"),
    ],
)
def test_a_negative_size_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(FULL, **changes)


@pytest.mark.parametrize(
    ("seq_lens_sum", "message"), [(11, "seq_lens_sum=11 is more than 2 requests"), (-1, "seq_lens_sum=-1")]
)
def test_a_sum_that_no_batch_has_is_refused(seq_lens_sum: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_mask_cells(FULL, 2, 2, max_context_len=5, seq_lens_sum=seq_lens_sum)


def test_a_buffer_of_another_size_or_dtype_is_refused() -> None:
    mask = mask_of(FULL)
    with pytest.raises(ValueError, match=r"shape \[41\], expected \[42\]"):
        replace(mask, buffer=mask.buffer[:-1])
    with pytest.raises(ValueError, match=r"expected \[12\]"):
        replace(mask, form=QLEN_ONLY)
    with pytest.raises(TypeError, match=r"torch\.uint8, expected torch\.bool"):
        replace(mask, buffer=mask.buffer.to(torch.uint8))
