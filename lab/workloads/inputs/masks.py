"""Masks over draft tokens, and the packed words that XQA reads."""

import itertools

import torch
from torch import Tensor

from lab.calls.problem import MASK_BITS_PER_WORD, mask_words
from lab.workloads.attention_case import AttentionCase


def packed_mask(shown: Tensor) -> Tensor:
    """Pack draft masks, bool [batch, q_len, columns], into XQA's uint16 words [batch, q_len, words]. Bit b of word w
    is column 16 w + b. Columns below q_len are draft tokens. Columns from q_len on, if any, fill the last word's unused bits.
    """
    batch, q_len, bits = shown.shape
    words = torch.zeros(batch, q_len, mask_words(q_len), dtype=torch.int32)
    for token in range(bits):
        words[..., token // MASK_BITS_PER_WORD] |= shown[..., token].to(torch.int32) << (token % MASK_BITS_PER_WORD)
    return words.to(torch.uint16)


def draft_masks(case: AttentionCase) -> dict[str, Tensor]:
    """Return draft masks by name, bool [batch, q_len, q_len]: causal, full, tree, and a different one of these per request."""
    count, q_len = len(case.q_lens), case.q_lens[0]
    causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    shapes = {"causal": causal, "full": torch.ones_like(causal), "tree": tree(q_len)}
    masks = {f"{name} mask": shown.expand(count, -1, -1) for name, shown in shapes.items()}
    masks["mask that differs by request"] = torch.stack([*itertools.islice(itertools.cycle(shapes.values()), count)])
    return masks


def with_bits_after(packed: Tensor) -> Tensor:
    """Return packed masks, uint16 [batch, q_len, words], with all bits from q_len on set, which belong to no draft token."""
    count, q_len, words = packed.shape
    after = torch.arange(MASK_BITS_PER_WORD * words) >= q_len
    bits = packed_mask(after.expand(count, q_len, -1))
    return (packed.to(torch.int32) | bits.to(torch.int32)).to(torch.uint16)


def tree(q_len: int) -> Tensor:
    """Return the mask of a binary tree of draft tokens, bool [q_len, q_len]: each row sees itself and its ancestors."""
    shown = torch.eye(q_len, dtype=torch.bool)
    for row in range(1, q_len):
        shown[row] |= shown[(row - 1) // 2]  # its parent's row
    return shown
