"""The masks of a target verification: a bool mask that SGLang fills while it builds the draft tree, and the packed mask of the
decode call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.calls.problem import MASK_BITS_PER_WORD, mask_words
from lab.named_enum import NamedEnum


class VerifyMaskForm(NamedEnum):
    """The shape of the bool mask of a verification with d draft tokens per request. The requests' blocks are concatenated.

    FULL: a request of L tokens has a block ``[d, L + d]``, as in SGLang 0.5.13 and 0.5.14. QLEN_ONLY: a request has a block
    ``[d, d]`` of its draft tokens, as in SGLang 0.5.23 if no kernel reads the mask.
    """

    FULL = "full"
    QLEN_ONLY = "query length only"


@dataclass(frozen=True, eq=False)
class VerifyMask:
    """A buffer for the bool mask of a verification of at most ``max_batch_size`` requests, each with ``num_draft_tokens`` draft
    tokens after at most ``max_context_len`` tokens.
    """

    #: bool, one dimension, one byte per cell, with `verify_mask_cells` cells for the largest batch and the longest lengths
    buffer: Tensor
    form: VerifyMaskForm
    max_batch_size: int
    num_draft_tokens: int
    max_context_len: int

    def __post_init__(self) -> None:
        if self.buffer.dtype != torch.bool:
            raise TypeError(f"buffer has dtype {self.buffer.dtype}, expected torch.bool")
        cells = verify_mask_cells(
            self.form, self.max_batch_size, self.num_draft_tokens, max_context_len=self.max_context_len
        )
        if list(self.buffer.shape) != [cells]:
            raise ValueError(
                f"buffer has shape {list(self.buffer.shape)}, expected [{cells}]: make it with preallocate_verify_mask"
            )

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


def verify_mask_cells(
    form: VerifyMaskForm,
    batch_size: int,
    num_draft_tokens: int,
    *,
    max_context_len: int,
    seq_lens_sum: int | None = None,
) -> int:
    """Return the number of cells (bytes) of the bool mask of one verification with d = ``num_draft_tokens`` per request:
    ``d * seq_lens_sum + batch_size * d * d`` for FULL, ``batch_size * d * d`` for QLEN_ONLY. If `seq_lens_sum` is None, every
    request has ``max_context_len`` tokens.
    """
    sizes = {
        "batch_size": batch_size,
        "num_draft_tokens": num_draft_tokens,
        "max_context_len": max_context_len,
        "seq_lens_sum": seq_lens_sum or 0,
    }
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size} must not be negative")
    upper_bound = batch_size * max_context_len
    if seq_lens_sum is not None and seq_lens_sum > upper_bound:
        raise ValueError(
            f"seq_lens_sum={seq_lens_sum} is more than {batch_size} requests of max_context_len={max_context_len} have"
        )
    draft_cells = batch_size * num_draft_tokens**2
    if form is VerifyMaskForm.QLEN_ONLY:
        return draft_cells
    return num_draft_tokens * (upper_bound if seq_lens_sum is None else seq_lens_sum) + draft_cells


def preallocate_verify_mask(
    form: VerifyMaskForm,
    *,
    max_batch_size: int,
    num_draft_tokens: int | None,
    max_context_len: int,
    device: torch.device | str,
    skip_prefill: bool = False,
    is_draft_runner: bool = False,
) -> VerifyMask | None:
    """Allocate the zero-filled mask that a backend uses in all its verifications. Return None if the backend does not verify
    (SGLang 0.5.23, `maybe_create_verify_mask`): there are no draft tokens, or the backend runs draft steps (`skip_prefill`) or
    a draft model (`is_draft_runner`). SGLang 0.5.14 allocates a mask also for a draft model.

    For 256 requests, 4 draft tokens and 131,072 tokens of context the mask has 134,221,824 bytes (FULL) or 4,096 (QLEN_ONLY).
    """
    cells = verify_mask_cells(form, max_batch_size, num_draft_tokens or 0, max_context_len=max_context_len)
    if not num_draft_tokens or skip_prefill or is_draft_runner:
        return None
    buffer = torch.zeros(cells, dtype=torch.bool, device=device)
    return VerifyMask(buffer, form, max_batch_size, num_draft_tokens, max_context_len)


def fill_verify_mask(mask: VerifyMask, batch_size: int) -> None:
    """Set all cells of the mask's buffer to True, also cells that a batch of `batch_size` requests does not use. Raise
    ValueError if `batch_size` exceeds the mask's `max_batch_size`.

    SGLang does the same before it builds a draft tree: SGLang 0.5.13 in every step, SGLang 0.5.23 only for kernels that read
    the mask. This function always fills the buffer.
    """
    if batch_size > mask.max_batch_size:
        raise ValueError(
            f"batch_size={batch_size} is more than the mask's max_batch_size={mask.max_batch_size}: "
            "preallocate a larger one"
        )
    mask.buffer.fill_(True)


def write_chain_mask(mask: VerifyMask, seq_lens: Tensor) -> None:
    """Write the mask of a chain of drafts (top-k 1): each draft token sees the prefix, the draft tokens before it, and itself.

    `seq_lens`, ``[batch_size]`` int32 or int64, does not count draft tokens. The other cells of the buffer become True. The
    host does not read the device, so a length above ``max_context_len`` is not refused.
    """
    if seq_lens.device != mask.buffer.device:
        raise ValueError(f"seq_lens is on {seq_lens.device} but the mask on {mask.buffer.device}: use one device")
    fill_verify_mask(mask, seq_lens.shape[0])
    d, device = mask.num_draft_tokens, mask.buffer.device
    is_full = mask.form is VerifyMaskForm.FULL
    prefix = seq_lens.to(torch.int64) if is_full else torch.zeros_like(seq_lens, dtype=torch.int64)
    width = prefix + d
    block_start = d * (torch.cumsum(width, dim=0) - width)
    row, column = torch.arange(d, device=device)[:, None], torch.arange(d, device=device)
    cells = (block_start + prefix)[:, None, None] + row * width[:, None, None] + column
    sees = (column <= row).expand_as(cells)
    mask.buffer.scatter_(0, cells.flatten(), sees.flatten())


def pack_tree_mask(parents: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the decode call's packed mask of draft trees, in which a draft token sees itself and its ancestors.

    Args:
        parents: ``[batch_size, d]`` int32 or int64: the index of each draft token's parent; -1, or any number outside 0 … d -
            1, if the parent is the last accepted token. A parent may have a larger index than its child.
        out: uint16 ``[batch_size, d, 2 * ceil(d / 32)]``, which is written and returned; None: a new tensor. If bit b of word w
            of row j is set, row j sees draft token 16 w + b.
    """
    batch_size, d = parents.shape
    words = mask_words(d)
    columns = torch.arange(d, device=parents.device)
    sees = (parents[:, :, None] == columns) | (columns[:, None] == columns)
    for _ in range((d - 1).bit_length()):  # each round doubles how far up the tree a token sees
        reach = sees.to(torch.float32)  # ones and zeros, whose products and sums are exact even in TF32
        sees = (reach @ reach) > 0
    padded = torch.nn.functional.pad(sees, (0, words * MASK_BITS_PER_WORD - d))
    bits = padded.view(batch_size, d, words, MASK_BITS_PER_WORD)
    weights = 1 << torch.arange(MASK_BITS_PER_WORD, dtype=torch.int32, device=parents.device)
    packed = (bits * weights).sum(dim=-1, dtype=torch.int32)
    return packed.to(torch.uint16) if out is None else out.copy_(packed)
