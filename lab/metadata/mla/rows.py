"""Copy query rows into a tensor that pads each request to the same number of rows, copy outputs back, and merge partial outputs
by their LSEs.

The host does not read the device, so a CUDA graph can capture all functions. Rows are copied as bytes, because torch cannot
gather every 8-bit float dtype.
"""

import math

import torch
from torch import Tensor


def pad_draft_extend_query(query: Tensor, seq_lens_q: Tensor, cu_seqlens_q: Tensor, padded: Tensor) -> Tensor:
    """Copy the query rows of request i to the front of ``padded[i]``, and write zeros to the rest of it.

    Args:
        query: ``[num_rows, heads, head_dim]``; rows after the last request's are padding.
        seq_lens_q: ``[batch_size]`` int32, rows of each request.
        cu_seqlens_q: ``[batch_size + 1]`` int32, first row of each request.
        padded: ``[batch_size, max_seq_len_q, heads, head_dim]`` in the query's dtype; every element is written.

    Returns:
        ``padded``.

    Raises:
        TypeError, ValueError: the shapes or dtypes do not fit each other.
    """
    _check_block(padded, seq_lens_q.shape[0], query)
    if query.shape[0] == 0:
        return padded.zero_()
    position = torch.arange(padded.shape[1], device=query.device)
    row = (cu_seqlens_q[:-1, None] + position).clamp(max=query.shape[0] - 1)
    rows = _bytes(query)[row.long()]
    is_padding = position >= seq_lens_q[:, None]
    padded.view(torch.uint8).copy_(rows.masked_fill(is_padding[:, :, None, None], 0))
    return padded


def unpad_draft_extend_output(padded: Tensor, cu_seqlens_q: Tensor, out: Tensor) -> Tensor:
    """Copy the rows of each request i from the front of ``padded[i]`` to `out`, request after request. Rows of `out` after them
    become zero.

    Args:
        padded: ``[batch_size, max_seq_len_q, heads, kv_lora_rank]``.
        cu_seqlens_q: ``[batch_size + 1]`` int32, first row of each request.
        out: ``[num_rows, heads, kv_lora_rank]`` in the same dtype; every element is written.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: the shapes or dtypes do not fit each other.
    """
    batch_size, max_seq_len_q = padded.shape[:2]
    _check_block(padded, cu_seqlens_q.shape[0] - 1, out)
    if batch_size == 0 or max_seq_len_q == 0:
        return out.zero_()
    row = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    request = torch.searchsorted(cu_seqlens_q[1:], row, right=True)
    is_padding = request >= batch_size
    request = request.clamp(max=batch_size - 1)
    position = (row - cu_seqlens_q[request]).clamp(max=max_seq_len_q - 1)
    rows = _bytes(padded)[request, position.long()]
    out.view(torch.uint8).copy_(rows.masked_fill(is_padding[:, None, None], 0))
    return out


def without_keys(out: Tensor, lse: Tensor, is_empty: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, LSE), in which rows that see no key have the output 0 and the LSE -inf (SGLang's `fixup_zero_kv_rows`).

    Args:
        out, lse: ``[num_rows, heads, head_dim]`` and ``[num_rows, heads]``.
        is_empty: ``[num_rows]`` bool, True for a row that sees no key.
    """
    return out.masked_fill(is_empty[:, None, None], 0.0), lse.masked_fill(is_empty[:, None], -math.inf)


def merge_by_lse(outs: Tensor, lses: Tensor) -> Tensor:
    """Merge the outputs of attention over several parts of the keys by their LSEs. Return float32 ``[num_rows, heads,
    head_dim]``, 0 in rows that see no key in any part.

    Args:
        outs: ``[num_parts, num_rows, heads, head_dim]``.
        lses: ``[num_parts, num_rows, heads]`` float32, base 2, -inf for a part without keys.
    """
    weights = torch.softmax(lses * math.log(2.0), dim=0).nan_to_num(0.0)
    return (weights.unsqueeze(-1) * outs.float()).sum(dim=0)


def dense_block(buffer: Tensor, *shape: int) -> Tensor:
    """Return the first elements of a buffer as a contiguous tensor of the given shape.

    SGLang 0.5.12 instead slices ``buffer[:batch_size, :max_seq_len_q]``, which is not contiguous if the buffer is wider, and
    its kernel writes it as if it were contiguous.

    Raises:
        ValueError: the buffer is too small.
    """
    needed = torch.Size(shape).numel()
    if needed > buffer.numel():
        raise ValueError(f"the buffer {list(buffer.shape)} holds less than {list(shape)}: allocate a larger one")
    return buffer.flatten()[:needed].view(shape)


def _check_block(padded: Tensor, batch_size: int, rows: Tensor) -> None:
    if padded.dtype != rows.dtype:
        raise TypeError(f"padded has dtype {padded.dtype}, the rows {rows.dtype}: give both the same")
    if padded.dim() != 4 or padded.shape[0] != batch_size or padded.shape[2:] != rows.shape[1:]:
        raise ValueError(
            f"padded has shape {list(padded.shape)}, expected [{batch_size}, max_seq_len_q, *{list(rows.shape[1:])}] for rows "
            f"of shape {list(rows.shape)}"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
