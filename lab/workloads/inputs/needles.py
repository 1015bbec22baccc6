"""Needles: a few keys of a request that outweigh all other keys. They lie where an error of one position shows.

Each K/V head has its own direction. Every query row has a component in this direction, and a needle is a key in this
direction. A needle's logit exceeds the other logits, which are within about ± 1, by `HEIGHT`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lab.workloads.requests import History, PassLens

TILE_SIZES = (64, 128)  # keys that kernels process at a time
LEAN = 4.0  # factor of the direction that is added to a query row, whose elements are N(0, 1)
HEIGHT = 10.0  # a needle's logit above the other logits


def needle_positions(kv_len: int, q_len: int, page_size: int, window_left: int = -1) -> list[int]:
    """Return positions for needles of a request, whose rows belong to its newest tokens: the first and last keys that rows see,
    edges of pages and tiles between them, and the neighbours of all these positions.
    """
    edges = {0, kv_len - 1}
    for position in {kv_len - q_len, kv_len - q_len // 2 - 1, kv_len - 1}:
        edges |= {position, *(position // size * size for size in (page_size, *TILE_SIZES))}
        if window_left >= 0:
            edges |= {position - window_left}
    return sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 <= near < kv_len})


def leaning(query: Tensor, directions: Tensor) -> Tensor:
    """Return the query, [num_rows, num_qo_heads, head_dim], with a multiple of its K/V head's direction added to each row, so
    that needles get large logits. `directions` is [num_kv_heads, head_dim], each of length 1.
    """
    return query + LEAN * directions.repeat_interleave(query.shape[1] // len(directions), dim=0)


def plant(keys: Tensor, positions: Iterable[int], directions: Tensor, softmax_scale: float) -> None:
    """Turn the keys at some positions into needles, in place, by adding a multiple of their head's direction. `keys` is
    [kv_len, num_kv_heads, head_dim].
    """
    index = torch.tensor(sorted(positions), dtype=torch.int64, device=keys.device)
    keys[index] += directions * (HEIGHT / (LEAN * softmax_scale))


def draw_histories(
    lens: PassLens,
    generator: torch.Generator,
    needles: Sequence[Iterable[int]] | None,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dims: Sequence[int],
    softmax_scale: float,
) -> tuple[Tensor, list[History]]:
    """Draw the query rows of a pass and its requests' tokens, N(0, 1), float32, on the generator's device.

    Args:
        lens: the lengths of the pass.
        generator: draws the query first, then the needles' directions, then each request's tokens.
        needles: positions of each request's needles; None: no needles.
        head_dims: head_dim of K and of V, or only of a latent entry. The query has the first.

    Returns:
        The query, [num_rows, num_qo_heads, head_dim], and for each request its K and V or its entries, [kv_len, num_kv_heads,
        head_dim] each. Branches of a request have the same tokens.
    """

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=generator.device, generator=generator)

    query = randn(sum(lens.q_lens), num_qo_heads, head_dims[0])
    directions = torch.nn.functional.normalize(randn(num_kv_heads, head_dims[0]), dim=-1)
    drawn: list[History] = []
    for request, kv_len in enumerate(lens.kv_lens):
        if request % lens.topk:
            drawn.append(drawn[-1])
            continue
        drawn.append(tuple(randn(kv_len, num_kv_heads, head_dim) for head_dim in head_dims))
        if needles is not None:
            plant(drawn[-1][0], needles[request], directions, softmax_scale)
    return query if needles is None else leaning(query, directions), drawn
