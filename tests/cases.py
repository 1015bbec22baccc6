"""Small attention problems by their truth, the four calls that pose them, and a second formula that solves them.

A `Batch` holds each request's query rows and K/V history, token by token. `decode_arguments`, `context_arguments` and
`mla_arguments` write it into a shuffled, poisoned pool and name FlashInfer's arguments, `ragged_arguments` needs no pool;
`expected` never sees that pool.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall

DECODE, CONTEXT, MLA, RAGGED, DSV4 = (call.value for call in AttentionCall)
RANK, ROPE = 8, 4  # of small MLA problems
Arguments = dict[str, Any]

SPARE_PAGES = 3  # pages of the pool that belong to nobody
SPARE_COLUMNS = 2  # columns of a page table after the longest request's


@dataclass(frozen=True)
class Batch:
    """queries[r]: [q_len, num_qo_heads, head_dim]; keys[r], values[r]: [kv_len, num_kv_heads, head_dim or v_head_dim]."""

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
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    magnitude: float = 1.0,
    seed: int = 0,
) -> Batch:
    """Normally distributed; `heads` are query and K/V heads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, num_heads: int, size: int, of: torch.dtype) -> Tensor:
        return (torch.randn(length, num_heads, size, generator=generator) * magnitude).to(of)

    return Batch(
        [draw(n, heads[0], head_dim, dtype) for n in q_lens],
        [draw(n, heads[1], head_dim, kv_dtype or dtype) for n in kv_lens],
        [draw(n, heads[1], v_head_dim or head_dim, kv_dtype or dtype) for n in kv_lens],
    )


def ragged_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (3, 3),
    dims: tuple[int, int] = (12, 8),
    **options: Any,
) -> Batch:
    """As `random_batch`; `dims` are those of keys and of values."""
    return random_batch(q_lens, kv_lens, heads=heads, head_dim=dims[0], v_head_dim=dims[1], **options)


def latent_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    rank: int = RANK,
    rope: int = ROPE,
    **options: Any,
) -> Batch:
    """As `random_batch`, of MLA: see `of_entries`."""
    drawn = random_batch(q_lens, kv_lens, heads=(heads, 1), head_dim=rank + rope, **options)
    return of_entries(drawn.queries, [keys[:, 0] for keys in drawn.keys], rank)


def of_entries(queries: list[Tensor], entries: list[Tensor], rank: int) -> Batch:
    """A batch of MLA: the one key of a token is its entry, [rank + rope], whose first `rank` elements are the value."""
    keys = [each.unsqueeze(1) for each in entries]
    return Batch(queries, keys, [each[..., :rank] for each in keys])


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
    """Output and base-2 LSE, float64."""
    return attended(batch, keys_seen(batch, masks=masks, **rule), sinks, bmm1_scale, bmm2_scale)


def attended(
    batch: Batch,
    keys_of_rows: Sequence[Iterable[int]],
    sinks: Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Output and base-2 LSE, float64, one (row, head) at a time over the keys that the row sees."""
    rows = [(request, row) for request, rows in enumerate(batch.queries) for row in rows]
    num_qo_heads, size = batch.queries[0].shape[1], batch.values[0].shape[2]
    out = torch.empty(len(rows), num_qo_heads, size, dtype=torch.float64)
    lse = torch.empty(len(rows), num_qo_heads, dtype=torch.float64)
    for number, ((request, row), seen) in enumerate(zip(rows, keys_of_rows, strict=True)):
        index = torch.tensor(sorted(seen), dtype=torch.int64)
        keys, values = (side[request].to(torch.float64)[index] for side in (batch.keys, batch.values))
        group = num_qo_heads // keys.shape[1]
        for head in range(num_qo_heads):
            logits = keys[:, head // group] @ row[head].to(torch.float64) * bmm1_scale
            if sinks is not None:
                logits = torch.cat((logits, sinks[head].to(torch.float64).view(1)))
            total = torch.logsumexp(logits, 0) if len(logits) else torch.tensor(-math.inf, dtype=torch.float64)
            weights = torch.exp(logits[: len(keys)] - total) if total.isfinite() else torch.zeros(len(keys)).double()
            out[number, head] = weights @ values[:, head // group] * bmm2_scale
            lse[number, head] = total / math.log(2.0)
    return out, lse


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
) -> Arguments:
    """Arguments of `trtllm_batch_decode_with_kv_cache`, the output in float64; `changes` are added to them."""
    k_cache, k_table = write_pages(batch.keys, page_size, seed=seed, poison=poison, foreign_id=foreign_id)
    v_seed = seed + 1 if separate_tables else seed
    v_cache, v_table = write_pages(batch.values, page_size, seed=v_seed, poison=poison, foreign_id=foreign_id)
    layout = changes.get("kv_layout", "HND")
    if layout == "NHD":
        k_cache, v_cache = (cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    arguments: Arguments = {
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


def block_sparse_arguments(
    batch: Batch, pages: Sequence[Sequence[Sequence[int]]], page_size: int = 16, **changes: Any
) -> Arguments:
    """As `decode_arguments`; `pages[head][request]` are the pages, in order, that a K/V head selects of a request."""
    arguments = decode_arguments(batch, page_size, **changes)
    table = arguments["block_tables"]
    tables = torch.full((len(pages), *table.shape), 2**30, dtype=torch.int32)
    for head, of_head in enumerate(pages):
        for request, chosen in enumerate(of_head):
            tables[head, request, : len(chosen)] = table[request, list(chosen)]
    lens = [of_kv_head(batch, head, of_head, page_size).kv_lens for head, of_head in enumerate(pages)]
    return arguments | {
        "block_tables": tables,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "enable_block_sparse_attention": True,
    }


def of_kv_head(batch: Batch, head: int, pages: Sequence[Sequence[int]], page_size: int = 16) -> Batch:
    """What one K/V head of a block-sparse call sees: its query heads, and the keys of its pages as whole requests."""
    group = batch.queries[0].shape[1] // batch.keys[0].shape[1]

    def chosen(side: list[Tensor]) -> list[Tensor]:
        positions = torch.arange(max(batch.kv_lens)).split(page_size)
        parts = [torch.cat([positions[0][:0], *(positions[page] for page in of_request)]) for of_request in pages]
        return [whole[part[part < len(whole)], head : head + 1] for whole, part in zip(side, parts, strict=True)]

    rows = [query[:, head * group : (head + 1) * group] for query in batch.queries]
    return Batch(rows, chosen(batch.keys), chosen(batch.values))


def context_arguments(batch: Batch, page_size: int = 16, **changes: Any) -> Arguments:
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


def mla_arguments(
    batch: Batch,
    page_size: int = 16,
    *,
    ragged: bool = False,
    poison: float = 0.0,
    foreign_id: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> Arguments:
    """Arguments of `trtllm_batch_decode_with_kv_cache_mla`, with an output in float64 and the LSE."""
    cache, table = write_pages(batch.keys, page_size, seed=seed, poison=poison, foreign_id=foreign_id)
    query = torch.cat(batch.queries) if ragged else torch.stack(batch.queries)
    rank = batch.values[0].shape[2]
    arguments: Arguments = {
        "query": query,
        "kv_cache": cache,
        "workspace_buffer": None,
        "qk_nope_head_dim": 6,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": query.shape[-1] - rank,
        "block_tables": table,
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "max_seq_len": max(batch.kv_lens),
        "out": torch.full((*query.shape[:-1], rank), math.nan, dtype=torch.float64),
        "return_lse": True,
        "return_lse_base": "base2",
    }
    if ragged:
        arguments |= {"cum_seq_lens_q": running_sum(batch.q_lens), "max_q_len": max(batch.q_lens)}
    return arguments | changes


def sparse_arguments(
    batch: Batch,
    columns: Sequence[Sequence[int]],
    page_size: int = 16,
    *,
    width: int = 0,
    lens: Sequence[int] | None = None,
    **options: Any,
) -> Arguments:
    """As `mla_arguments`, with the positions that each row of the batch selects, -1 for none, in place of a page table.

    A row starts `width` columns after the one before it, if that is more than `sparse_mla_top_k`. With `lens` the columns after
    them hold ids far outside the pool.
    """
    arguments = mla_arguments(batch, page_size, **options)
    table, top_k = arguments["block_tables"], len(columns[0])
    requests = [request for request, rows in enumerate(batch.queries) for _ in rows]
    places = torch.full((len(columns), max(top_k, width)), -1, dtype=torch.int32)
    for row, (request, positions) in enumerate(zip(requests, columns, strict=True)):
        for column, position in enumerate(positions):
            if position >= 0:
                page = int(table[request, position // page_size])
                places[row, column] = page * page_size + position % page_size
    if lens is not None:
        for row, used in enumerate(lens):
            places[row, used:] = 2**30
        arguments["sparse_mla_top_k_lens"] = torch.tensor(lens, dtype=torch.int32)
    places = places[:, :top_k].unflatten(0, arguments["query"].shape[:-2])
    return arguments | {"block_tables": places, "sparse_mla_top_k": top_k}


def selected_batch(batch: Batch, columns: Sequence[Sequence[int]]) -> Batch:
    """The truth of `sparse_arguments`: each row alone, with the entries that it selects as its history."""
    rows = [(request, row) for request, rows in enumerate(batch.queries) for row in rows.unsqueeze(1)]
    keys, values = (
        [
            side[request][[position for position in positions if position >= 0]]
            for (request, _), positions in zip(rows, columns, strict=True)
        ]
        for side in (batch.keys, batch.values)
    )
    return Batch([row for _, row in rows], keys, values)


def ragged_arguments(batch: Batch, **changes: Any) -> Arguments:
    """Arguments of `trtllm_ragged_attention_deepseek`, causal, with an output in float64 and the LSE."""
    query, key, value = (torch.cat(side) for side in (batch.queries, batch.keys, batch.values))
    out = torch.full((*query.shape[:2], value.shape[2]), math.nan, dtype=torch.float64)
    arguments: Arguments = {
        "query": query,
        "key": key,
        "value": value,
        "workspace_buffer": None,
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "max_q_len": max(batch.q_lens),
        "max_kv_len": max(batch.kv_lens),
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(batch.queries),
        "window_left": -1,
        "cum_seq_lens_q": running_sum(batch.q_lens),
        "cum_seq_lens_kv": running_sum(batch.kv_lens),
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": True,
        "out": out,
    }
    return arguments | changes


def mirrors(batch: Batch, dtype: torch.dtype = torch.int32) -> Arguments:
    return {
        "q_seq_lens_cpu": torch.tensor(batch.q_lens, dtype=dtype),
        "kv_seq_lens_cpu": torch.tensor(batch.kv_lens, dtype=dtype),
    }


BATCHES = {DECODE: random_batch, CONTEXT: random_batch, MLA: latent_batch, RAGGED: ragged_batch}


def arguments_of(function: str, batch: Batch, **changes: Any) -> Arguments:
    """Arguments of any of the four functions; requests of several widths make a decode call with offsets."""
    if function == RAGGED:
        return ragged_arguments(batch, **changes)
    if function == CONTEXT:
        return context_arguments(batch, **changes)
    make = mla_arguments if function == MLA else decode_arguments
    return make(batch, **{"ragged": len(set(batch.q_lens)) > 1 or 0 in batch.q_lens} | changes)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What an engine makes of results over disjoint keys: a mean weighted by 2 ** LSE."""
    lses = torch.stack([lse for _, lse in parts]).double()
    total = torch.logsumexp(lses * math.log(2.0), dim=0) / math.log(2.0)
    weights = torch.exp2(lses - total).nan_to_num(0.0)
    return torch.stack([out for out, _ in parts]).mul(weights.unsqueeze(-1)).sum(0), total


def chunk(batch: Batch, starts: Sequence[int], ends: Sequence[int]) -> Batch:
    keys, values = (
        [rows[start:end] for rows, start, end in zip(side, starts, ends, strict=True)]
        for side in (batch.keys, batch.values)
    )
    return Batch(batch.queries, keys, values)


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
    """Output to float64's accuracy, LSE to float32's; NaN never. A result may have the requests as a dimension."""
    size = float(truth[0].abs().max()) if truth[0].numel() else 0.0
    out, lse = (result[0].flatten(0, -3), result[1].flatten(0, -2)) if result[0].ndim > 3 else result
    torch.testing.assert_close(out.to(torch.float64), truth[0], rtol=1e-11, atol=1e-12 * size)
    torch.testing.assert_close(lse.to(torch.float64), truth[1], rtol=1e-6, atol=1e-6)
