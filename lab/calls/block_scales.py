"""SageAttention's arguments `sage_attn_sfs` and `num_elts_per_sage_attn_blk` of the ragged context call.

Each head of the query and of the key has one scale per block of consecutive tokens. A block has tokens of one request, so the
last block of a request may be shorter. With blocks of B tokens, token t of request r, whose first token is token `first` of the
batch, has the scale `first // B + r + t // B` of its head (FlashInfer 0.7.2, sageQuant.cu 38-41). Scales that no token has may
have any values.
"""

from dataclasses import dataclass
from typing import Any

import torch

from lab.calls.allowed import not_modelled
from lab.calls.arguments import check_tensor
from lab.calls.problem import E4M3

SAGE_DTYPES = (torch.int8, E4M3)  # of query and key; V is e4m3
BLOCK_SIZES = (1, 4, 16)  # numbers of tokens that FlashInfer 0.7.2 quantises together (prefill.py 6788)
PARTS = "q_sf, k_sf, p_sf, v_sf"


@dataclass(frozen=True, eq=False)
class BlockScales:
    """SageAttention's scales: attention is computed from the products of stored elements and these scales."""

    query: torch.Tensor  #: float32 [num_qo_heads, ceil(num_rows / q_block) + batch_size - 1]
    key: torch.Tensor  #: float32 [num_kv_heads, ceil(num_tokens / k_block) + batch_size - 1]
    value: torch.Tensor  #: float32 [num_kv_heads, v_head_dim]
    q_block: int  #: number of rows of a block
    k_block: int  #: number of keys of a block


def has_block_scales(call: Any) -> bool:
    """Return True if a ragged call has SageAttention's scales. Raises TypeError or ValueError unless `sage_attn_sfs` and
    `num_elts_per_sage_attn_blk` have four elements each.
    """
    for name in ("sage_attn_sfs", "num_elts_per_sage_attn_blk"):
        value = getattr(call, name)
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{name} must be a tuple ({PARTS}), got {type(value).__name__}")
        if len(value) != 4:
            raise ValueError(f"{name} must have the four parts {PARTS}, got {len(value)}")
    sizes = tuple(call.num_elts_per_sage_attn_blk)
    has_scales = any(each is not None for each in call.sage_attn_sfs)
    if not has_scales and sizes != (0, 0, 0, 0):
        raise ValueError(f"num_elts_per_sage_attn_blk={sizes} goes with sage_attn_sfs, which has no tensor")
    return has_scales


def check_block_scales(call: Any, batch_size: int) -> BlockScales | None:
    """Check and return SageAttention's scales of a ragged call, or None. The call's other tensors must already be checked."""
    if not has_block_scales(call):
        return None
    sizes, scales = call.num_elts_per_sage_attn_blk, call.sage_attn_sfs
    (q_block, k_block, *of_others), (q_sf, k_sf, p_sf, v_sf) = sizes, scales
    if p_sf is not None or any(each is None for each in (q_sf, k_sf, v_sf)):
        not_modelled("sage_attn_sfs", scales, "FlashInfer documents (q_sf, k_sf, None, v_sf) alone (prefill.py 6954)")
    if q_block not in BLOCK_SIZES or k_block not in BLOCK_SIZES or of_others != [0, 1]:
        remedy = f"FlashInfer documents (rows, keys, 0, 1) with {', '.join(map(str, BLOCK_SIZES))} rows and keys"
        not_modelled("num_elts_per_sage_attn_blk", sizes, remedy)
    if not batch_size:
        raise ValueError("sage_attn_sfs needs at least one request, got batch_size=0")
    q_count, k_count = (
        -(-len(side) // size) + batch_size - 1 for side, size in ((call.query, q_block), (call.key, k_block))
    )
    v_heads, v_head_dim = call.value.shape[1:]
    return BlockScales(
        _checked("q_sf", q_sf, (call.query.shape[1], q_count), "ceil(rows / block) + batch_size - 1"),
        _checked("k_sf", k_sf, (v_heads, k_count), "ceil(tokens / block) + batch_size - 1"),
        _checked("v_sf", v_sf, (v_heads, v_head_dim), "v_head_dim"),
        q_block,
        k_block,
    )


def _checked(name: str, scales: object, shape: tuple[int, int], words: str) -> torch.Tensor:
    tensor = check_tensor(f"{name} of sage_attn_sfs", scales, (torch.float32,))
    if tensor.shape not in (shape, (shape[0] * shape[1],)) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} of sage_attn_sfs must be contiguous {list(shape)}, [heads, {words}], or flat, got {list(tensor.shape)} "
            f"with stride {tensor.stride()}"
        )
    return tensor.view(shape)


def scaled_blocks(stored: torch.Tensor, scales: torch.Tensor, block: int, offsets: torch.Tensor) -> torch.Tensor:
    """Return `stored`, [num_tokens, heads, head_dim], as float64, with every vector multiplied by the scale of its block of
    `block` tokens. Blocks begin anew at each request: block b of request r has column offsets[r] // block + r + b of `scales`,
    [heads, num_blocks]. `offsets`, int32 [batch_size + 1], has the first token of each request.
    """
    token = torch.arange(len(stored), dtype=offsets.dtype, device=stored.device)
    request = torch.searchsorted(offsets[1:], token, right=True).clamp(max=len(offsets) - 2)  # of padding: the last
    first = offsets[request]
    of_tokens = scales[:, first // block + request + (token - first) // block]
    return stored.to(torch.float64) * of_tokens.T.unsqueeze(2).to(torch.float64)
