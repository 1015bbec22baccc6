"""Small attention problems by their truth, the paged calls that pose them, and a second formula that solves them.

A `Batch` holds each request's query rows and K/V history, token by token. `decode_arguments` and `context_arguments`
write it into a shuffled, poisoned pool and name FlashInfer's arguments; `expected` never sees that pool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SPARE_PAGES = 3  # pages of the pool that belong to nobody
SPARE_COLUMNS = 2  # columns of a page table after the longest request's


@dataclass(frozen=True)
class Batch:
    """queries[r]: [q_len, num_qo_heads, head_dim]; keys[r], values[r]: [kv_len, num_kv_heads, head_dim]."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def q_lens(self) -> list[int]:
        return [len(rows) for rows in self.queries]

    @property
    def kv_lens(self) -> list[int]:
        return [len(rows) for rows in self.keys]


def random_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    magnitude: float = 1.0,
    seed: int = 0,
) -> Batch:
    """Normally distributed; `heads` are query and K/V heads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, num_heads: int, of: torch.dtype) -> Tensor:
        return (torch.randn(length, num_heads, head_dim, generator=generator) * magnitude).to(of)

    return Batch(
        [draw(n, heads[0], dtype) for n in q_lens],
        [draw(n, heads[1], kv_dtype or dtype) for n in kv_lens],
        [draw(n, heads[1], kv_dtype or dtype) for n in kv_lens],
    )


def coded_batch(q_lens: Sequence[int], kv_lens: Sequence[int], heads: tuple[int, int] = (2, 1)) -> Batch:
    """Q = K = 0 and V = 2 ** position, so that a row's output says exactly which keys it saw: see `seen_keys`."""
    assert max(kv_lens) <= 50, "float64 adds powers of two exactly up to 2 ** 52"
    return Batch(
        [torch.zeros(n, heads[0], 1, dtype=torch.float64) for n in q_lens],
        [torch.zeros(n, heads[1], 1, dtype=torch.float64) for n in kv_lens],
        [(2.0 ** torch.arange(n, dtype=torch.float64)).view(n, 1, 1).repeat(1, heads[1], 1) for n in kv_lens],
    )


def seen_keys(out: Tensor, lse: Tensor) -> list[set[int]]:
    """The keys that each row of a coded batch saw, every head alike."""
    total = torch.round(out[:, :, 0] * torch.exp2(lse.to(torch.float64)).round())
    assert (total == total[:, :1]).all(), "heads differ"
    return [{key for key in range(52) if int(row) >> key & 1} for row in total[:, 0].tolist()]


def sees(
    row: int, key: int, q_len: int, kv_len: int, *, causal: bool = True, window_left: int = -1, mask: Any = None
) -> bool:
    """Whether a row of a request sees a key of it, from the definition; `mask[row][draft token]` replaces causal."""
    position = kv_len - q_len + row
    draft_token = key - (kv_len - q_len)
    allowed = key <= position or not causal
    shown = allowed if mask is None else draft_token < 0 or bool(mask[row][draft_token])
    return shown and (window_left < 0 or position - key <= window_left)


def keys_seen(batch: Batch, *, masks: Any = None, **rule: Any) -> list[set[int]]:
    """`sees` for all rows of a batch, in row order."""
    return [
        {
            key
            for key in range(kv_len)
            if sees(row, key, q_len, kv_len, mask=None if masks is None else masks[request], **rule)
        }
        for request, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True))
        for row in range(q_len)
    ]


def expected(
    batch: Batch,
    *,
    masks: Any = None,
    sinks: Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    **rule: Any,
) -> tuple[Tensor, Tensor]:
    """Output and base-2 LSE, float64, one (row, head) at a time over the keys that it sees."""
    rows = [(request, row) for request, rows in enumerate(batch.queries) for row in rows]
    outs, lses = [], []
    for (request, row), seen in zip(rows, keys_seen(batch, masks=masks, **rule), strict=True):
        index = torch.tensor(sorted(seen), dtype=torch.int64)
        keys, values = (side[request].to(torch.float64)[index] for side in (batch.keys, batch.values))
        group = row.shape[0] // keys.shape[1]
        for head in range(row.shape[0]):
            logits = keys[:, head // group] @ row[head].to(torch.float64) * bmm1_scale
            if sinks is not None:
                logits = torch.cat((logits, sinks[head].to(torch.float64).view(1)))
            lse = torch.logsumexp(logits, 0) if len(logits) else torch.tensor(-math.inf, dtype=torch.float64)
            weights = torch.exp(logits[: len(seen)] - lse) if lse.isfinite() else torch.zeros(len(seen)).double()
            outs.append(weights @ values[:, head // group] * bmm2_scale)
            lses.append(lse / math.log(2.0))
    num_qo_heads, head_dim = batch.queries[0].shape[1:]
    return torch.stack(outs).view(-1, num_qo_heads, head_dim), torch.stack(lses).view(-1, num_qo_heads)


def write_pages(
    histories: Sequence[Tensor], page_size: int, *, seed: int, poison: float = 0.0, foreign_id: int | None = None
) -> tuple[Tensor, Tensor]:
    """Write histories into shuffled pages; what no history covers holds `poison`.

    Args:
        histories: per request [kv_len, num_heads, last].
        foreign_id: what the table holds after a request's pages; None for ids of other pages.

    Returns:
        cache [num_pages, num_heads, page_size, last], and table int32 [batch_size, max_num_pages_per_seq].
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-len(history) // page_size) for history in histories]
    num_pages, width = sum(counts) + SPARE_PAGES, max(counts) + SPARE_COLUMNS
    free = torch.randperm(num_pages, generator=generator).tolist()
    first = histories[0]
    cache = torch.full((num_pages, first.shape[1], page_size, first.shape[2]), poison).to(first.dtype)
    table = torch.randint(num_pages, (len(histories), width), generator=generator, dtype=torch.int32)
    if foreign_id is not None:
        table.fill_(foreign_id)
    for request, history in enumerate(histories):
        for column in range(counts[request]):
            page = free.pop()
            table[request, column] = page
            tokens = history[column * page_size : (column + 1) * page_size]
            cache[page, :, : len(tokens)] = tokens.transpose(0, 1)
    return cache, table


def decode_arguments(
    batch: Batch,
    page_size: int = 16,
    *,
    seed: int = 0,
    separate_tables: bool = False,
    ragged: bool = False,
    poison: float = 0.0,
    foreign_id: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of `trtllm_batch_decode_with_kv_cache`, the output in float64; `changes` are added to them."""
    k_cache, k_table = write_pages(batch.keys, page_size, seed=seed, poison=poison, foreign_id=foreign_id)
    v_seed = seed + 1 if separate_tables else seed
    v_cache, v_table = write_pages(batch.values, page_size, seed=v_seed, poison=poison, foreign_id=foreign_id)
    layout = changes.get("kv_layout", "HND")
    if layout == "NHD":
        k_cache, v_cache = (cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    arguments: dict[str, Any] = {
        "query": torch.cat(batch.queries),
        "kv_cache": (k_cache, v_cache),
        "workspace_buffer": None,
        "block_tables": torch.stack((k_table, v_table), dim=1) if separate_tables else k_table,
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "max_seq_len": max(batch.kv_lens),
        "out_dtype": torch.float64,
        "return_lse": True,
        "uses_shared_paged_kv_idx": not separate_tables,
    }
    if ragged:
        arguments |= {
            "q_len_per_req": None,
            "max_q_len": max(batch.q_lens),
            "cum_seq_lens_q": running_sum(batch.q_lens),
        }
    else:
        arguments["q_len_per_req"] = batch.q_lens[0]
    return arguments | changes


def context_arguments(batch: Batch, page_size: int = 16, **changes: Any) -> dict[str, Any]:
    """Arguments of `trtllm_batch_context_with_kv_cache`, else as `decode_arguments`."""
    arguments = decode_arguments(batch, page_size, ragged=True, **changes)
    del arguments["q_len_per_req"]
    bounds = {
        "max_kv_len": arguments.pop("max_seq_len"),
        "batch_size": len(batch.queries),
        "cum_seq_lens_kv": running_sum(batch.kv_lens),
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
    }
    return bounds | arguments


def running_sum(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def pack_mask(masks: Any) -> Tensor:
    """XQA's packed draft mask of nested lists [batch][row][draft token], one bit at a time."""
    q_len = len(masks[0])
    packed = [[[0] * (2 * math.ceil(q_len / 32)) for _ in range(q_len)] for _ in masks]
    for request, mask in enumerate(masks):
        for row in range(q_len):
            for token in range(q_len):
                if mask[row][token]:
                    packed[request][row][token // 16] |= 1 << (token % 16)
    return torch.tensor(packed, dtype=torch.int32).to(torch.uint16)


def assert_same(result: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    """Output to float64's accuracy, LSE to float32's; NaN never."""
    size = float(truth[0].abs().max()) if truth[0].numel() else 0.0
    torch.testing.assert_close(result[0].to(torch.float64), truth[0], rtol=1e-11, atol=1e-12 * size)
    torch.testing.assert_close(result[1].to(torch.float64), truth[1], rtol=1e-6, atol=1e-6)
