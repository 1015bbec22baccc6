"""What the simulations of other people's kernels share: a workspace's memory, a paged cache, and a request's attention."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lab.references.softmax_attention import rounded

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
    empty = []
    for row in rows:
        position = len(keys) - (rows.stop - row)
        may_see = range(len(keys)) if shown is None else sorted(shown[row - rows.start])
        seen = [
            key
            for key in may_see
            if (key <= position or not causal or shown is not None)
            and (window_left < 0 or key >= position - window_left)
        ]
        empty += [] if seen else [row]
        group, index = query.shape[1] // keys.shape[1], torch.tensor(seen, dtype=torch.int64)
        for head, q in enumerate(query[row].to(torch.float64)):
            k, v = (side[index, head // group].to(torch.float64) for side in (keys, values))
            logits = k @ q * scales[0]
            everything = logits if sinks is None else torch.cat((logits, sinks[head : head + 1].to(torch.float64)))
            total = everything.logsumexp(0) if len(everything) else torch.tensor(-math.inf, dtype=torch.float64)
            out[row, head] = rounded(torch.exp(logits - total) @ v * scales[1], out.dtype)
            if lse is not None:
                lse[row, head] = total / math.log(2.0)
    return empty
