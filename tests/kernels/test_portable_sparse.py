"""Sparse decode by the portable kernels: the truth is the dense call over what each row or K/V head selects."""

from typing import Any

import torch
from torch import Tensor

from lab import references
from lab.kernels import portable
from tests.cases import (
    DECODE,
    MLA,
    Arguments,
    Batch,
    block_sparse_arguments,
    decode_arguments,
    latent_batch,
    mla_arguments,
    of_kv_head,
    random_batch,
    selected_batch,
    sparse_arguments,
)
from tests.kernels.conftest import Split
from tests.kernels.held import BF16, FP16, on


def run(function: str, arguments: Arguments, device: str) -> Any:
    call = getattr(portable, function)
    call.cache_clear()
    out, lse = call(**{name: on(device, value) for name, value in arguments.items()})
    return out.cpu(), lse.cpu()


def hold(truth: Arguments, results: tuple[Tensor, Tensor]) -> None:
    references.assert_close_to_reference(
        results, arithmetic=FP16 if truth["query"].dtype == FP16 else BF16, check_dtype=False, **truth
    )


# Entries selected for each row of an MLA decode.


def test_columns_after_a_rows_position_are_not_read(device: str) -> None:
    """Row i uses as many columns as there are keys up to its position."""
    columns = [[2, 1, 0, 3], [3, -1, 1, 0]]
    batch = latent_batch([2], [4], heads=4, rank=64, rope=16)
    arguments = sparse_arguments(batch, columns, out=None, bmm1_scale=0.125)
    arguments["block_tables"][0, 0, 3] = 2**30
    seen = selected_batch(batch, [[2, 1, 0, -1], columns[1]])
    out, lse = run(MLA, arguments, device)
    hold(mla_arguments(seen, out=None, bmm1_scale=0.125), (out.view(-1, 1, *out.shape[-2:]), lse))


# Pages selected for each K/V head of a decode.


def dense_arguments(batch: Batch, **changes: Any) -> Arguments:
    ragged = len(set(batch.q_lens)) > 1
    return decode_arguments(batch, bmm1_scale=0.125, out_dtype=BF16, ragged=ragged, **changes)


def test_keys_count_for_each_head(device: str, split: Split) -> None:
    """With one row each, and lengths that make one head's work many times another's."""
    split(3)
    batch = random_batch([1, 1], [640, 640], heads=(2, 2), head_dim=64, dtype=BF16)
    pages = [[[], list(range(40))], [[3], [39]]]
    out, lse = run(DECODE, block_sparse_arguments(batch, pages, bmm1_scale=0.125, out_dtype=BF16), device)
    assert lse[0, 0] == -torch.inf
    assert not out[0, 0].any()
    for head, of_head in enumerate(pages):
        hold(dense_arguments(of_kv_head(batch, head, of_head)), (out[:, head : head + 1], lse[:, head : head + 1]))
