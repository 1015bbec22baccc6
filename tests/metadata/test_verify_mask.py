"""The verify mask's sizes against numbers worked out by hand, and its contents against loops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import KVPool
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.speculation.plan_stream import ChainVerify
from lab.metadata.speculation.verify_mask import (
    VerifyMask,
    VerifyMaskForm,
    fill_verify_mask,
    preallocate_verify_mask,
    verify_mask_cells,
    write_chain_mask,
)
from tests.metadata.host_reads import ForbidHostReads

FULL, QLEN_ONLY = VerifyMaskForm.FULL, VerifyMaskForm.QLEN_ONLY

each_form = pytest.mark.parametrize("form", VerifyMaskForm)


def allocate(form: VerifyMaskForm, **changes: Any) -> Any:
    sizes = {"max_batch_size": 3, "num_draft_tokens": 2, "max_context_len": 5, "device": "cpu"}
    return preallocate_verify_mask(form, **sizes | changes)


def buffers_of_draft(mask: VerifyMask | None) -> list[torch.Tensor | None]:
    """What a draft stage fills, of a backend with the mask; its pool says nothing about the mask's sizes."""
    pool = KVPool(num_requests=1, max_context_len=32, page_size=32, num_pages=2)
    return list(ChainVerify(pool, 2, [1], TRTLLMMLABackend(), mask).get_verify_buffers_to_fill_after_draft())


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
    mask = allocate(form, max_batch_size=256, num_draft_tokens=4, max_context_len=131072, device="meta")
    assert mask.nbytes == size_bytes
    assert verify_mask_cells(form, 256, 4, max_context_len=131072) == size_bytes


@each_form
def test_the_draft_stage_fills_the_buffer_itself_and_no_positions(form: VerifyMaskForm) -> None:
    mask = allocate(form)
    tree_mask, positions = buffers_of_draft(mask)
    assert tree_mask is mask.buffer
    assert positions is None
    assert (mask.buffer.dtype, bool(mask.buffer.any())) == (torch.bool, False)
    fill_verify_mask(mask, 1)  # whole, however small the batch
    assert mask.buffer.all()
    for nothing in (
        {"num_draft_tokens": None},
        {"num_draft_tokens": 0},
        {"skip_prefill": True},
        {"is_draft_runner": True},
    ):
        assert allocate(form, **nothing) is None
    assert buffers_of_draft(None) == [None, None]


@each_form
@given(lengths=st.lists(st.integers(0, 9), max_size=5), num_draft_tokens=st.integers(0, 4))
@settings(deadline=None, derandomize=True)
def test_without_host_lengths_the_upper_bound_is_enough(
    form: VerifyMaskForm, lengths: list[int], num_draft_tokens: int
) -> None:
    def cells(longest: int, seq_lens_sum: int | None = None) -> int:
        facts = {"max_context_len": longest, "seq_lens_sum": seq_lens_sum}
        return verify_mask_cells(form, len(lengths), num_draft_tokens, **facts)

    known, bound = cells(9, sum(lengths)), cells(9)
    assert known == len(chain(form, lengths, num_draft_tokens)) <= bound
    if len(set(lengths)) <= 1:
        assert cells(max(lengths, default=0)) == known
    if form is QLEN_ONLY:
        assert known == bound


@each_form
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(seq_lens=st.lists(st.integers(0, 9), max_size=4), num_draft_tokens=st.integers(1, 5), stale=st.booleans())
@settings(deadline=None, derandomize=True)
def test_a_chain_matches_the_loop(
    form: VerifyMaskForm, dtype: torch.dtype, seq_lens: list[int], num_draft_tokens: int, stale: bool
) -> None:
    mask = allocate(form, max_batch_size=4, num_draft_tokens=num_draft_tokens, max_context_len=9)
    mask.buffer.fill_(stale)
    lengths = torch.tensor(seq_lens, dtype=dtype)
    with ForbidHostReads():
        write_chain_mask(mask, lengths)
    expected = chain(form, seq_lens, num_draft_tokens)
    assert mask.buffer.tolist() == expected + [True] * (mask.nbytes - len(expected))


@each_form
def test_what_does_not_fit_is_refused_before_anything_is_written(form: VerifyMaskForm) -> None:
    mask = allocate(form)
    with pytest.raises(ValueError, match="batch_size=4 is more than the mask's max_batch_size=3"):
        write_chain_mask(mask, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="batch_size=4"):
        fill_verify_mask(mask, 4)
    with pytest.raises(ValueError, match="on meta but the mask on cpu"):
        write_chain_mask(mask, torch.zeros(1, dtype=torch.int64, device="meta"))
    assert not mask.buffer.any()


def test_sizes_that_nothing_has_are_refused() -> None:
    for name, written, size in (
        ("max_batch_size", "batch_size", -1),
        ("num_draft_tokens", "num_draft_tokens", -2),
        ("max_context_len", "max_context_len", -3),
    ):
        with pytest.raises(ValueError, match=f"{written}={size} must not be negative"):
            allocate(FULL, **{name: size})
    for seq_lens_sum, message in ((11, "seq_lens_sum=11 is more than 2 requests"), (-1, "seq_lens_sum=-1")):
        with pytest.raises(ValueError, match=message):
            verify_mask_cells(FULL, 2, 2, max_context_len=5, seq_lens_sum=seq_lens_sum)


def test_a_buffer_of_another_size_or_dtype_is_refused() -> None:
    mask = allocate(FULL)
    with pytest.raises(ValueError, match=r"shape \[41\], expected \[42\]"):
        replace(mask, buffer=mask.buffer[:-1])
    with pytest.raises(ValueError, match=r"expected \[12\]"):
        replace(mask, form=QLEN_ONLY)
    with pytest.raises(TypeError, match=r"torch\.uint8, expected torch\.bool"):
        replace(mask, buffer=mask.buffer.to(torch.uint8))
