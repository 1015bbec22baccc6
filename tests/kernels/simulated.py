"""What the simulations of other people's kernels share: a workspace's memory, a paged cache, and a request's attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.references.softmax_attention import rounded
from tests.cases import Batch, attended

MEBIBYTE = 2**20


def write_scratch(workspace: Tensor) -> None:
    """Write a workspace as XQA does: its scratch whole, its semaphores not, which must be zero."""
    semaphores, scratch = workspace.view(torch.uint8).split([8 * MEBIBYTE, workspace.nbytes - 8 * MEBIBYTE])
    assert scratch.numel() > 0
    assert not semaphores.any(), "semaphores must be zero at each launch"
    scratch.fill_(0xFF)


def paged(cache: Tensor, page_ids: Tensor, kv_len: int, strides: Sequence[int] | None = None) -> Tensor:
    """[kv_len, num_kv_heads, head_dim] in float64 of a [pages, heads, tokens, head_dim] cache, read with `strides`."""
    cache = cache if strides is None else torch.as_strided(cache, cache.shape, strides)
    page_size = cache.shape[2]
    tokens = [cache[int(page_ids[key // page_size]), :, key % page_size].to(torch.float64) for key in range(kv_len)]
    return torch.stack(tokens) if tokens else torch.empty(0, *cache.shape[1::2], dtype=torch.float64)


def attend_request(
    query: Tensor,
    rows: range,
    keys: Tensor,
    values: Tensor,
    scales: tuple[float, float],
    out: Tensor,
    lse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    shown: Sequence[set[int]] | None = None,
) -> list[int]:
    """Write the results of a request's rows; return the rows that see no key.

    Args:
        query, out, lse: of all requests, [num_rows, num_qo_heads, ...]; row i of q over L keys sits at L - q + i.
        keys, values: [L, num_kv_heads, ...].
        scales: of logits, and of the output.
        shown: the keys that each row may see, instead of those up to its own.
    """
    may_see = [range(len(keys))] * len(rows) if shown is None else shown
    seen = []
    for position, of_row in enumerate(may_see, len(keys) - len(rows)):
        last = position if causal and shown is None else len(keys)
        seen.append([key for key in of_row if key <= last and (window_left < 0 or key >= position - window_left)])
    of_request = Batch([query[rows.start : rows.stop]], [keys], [values])
    outs, lses = attended(of_request, seen, sinks, *scales)
    out[rows.start : rows.stop] = rounded(outs, out.dtype)
    if lse is not None:
        lse[rows.start : rows.stop] = lses
    return [row for row, own in zip(rows, seen, strict=True) if not own]
