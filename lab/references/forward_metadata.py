"""The expected metadata of attention calls in each forward mode, in plain loops over requests. Tests compare the metadata of
`lab.metadata` with it. A *slot* is the index of a token in the K/V pool.

``batch`` and ``pool`` are any objects with the attributes of ``lab.metadata``'s ``ForwardBatch`` and ``KVPool`` that
`forward_metadata` lists. Rules are SGLang 0.5.23's. The host reads device tensors, a whole row
at a time, because each read waits for the GPU.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ForwardMetadata:
    """The expected metadata of a forward pass on the MHA kernels, as lists. `cache_seqlens` has each request's number of keys.
    The fields `swa_...` belong to the sliding-window pool. A page table has only pages with tokens of the request.
    """

    cache_seqlens: list[int]
    max_seq_len_q: int
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    page_table: list[list[int]]
    swa_page_table: list[list[int]] | None
    swa_out_cache_loc: list[int] | None


def forward_metadata(batch: Any, pool: Any) -> ForwardMetadata:
    """Return the expected metadata of one forward pass on the MHA kernels: SGLang 0.5.23's; in DRAFT_EXTEND, SGLang 0.5.13's.

    Args:
        batch: an object with forward_mode (an enum member, read by its name), num_tokens, spec_info, and int tensors:
            req_pool_indices, seq_lens and extend_seq_lens or extend_seq_lens_cpu, [batch_size] each, and out_cache_loc,
            [num_tokens].
        pool: an object with req_to_token, int [num_rows, row_width], K/V slots by position; page_size; max_context_len;
            full_to_swa, int [num_slots], or None; and optionally v2p, int [num_virtual_pages], or None.

    Raises:
        ValueError: the mode runs no attention.
    """
    query_lens = [query_length(batch, i) for i in range(len(batch.seq_lens))]
    key_lens = [key_length(batch, i) for i in range(len(batch.seq_lens))]
    return _of_requests(batch, pool, batch.req_pool_indices.tolist(), query_lens, key_lens)


def _of_requests(batch: Any, pool: Any, rows: list[int], query_lens: list[int], key_lens: list[int]) -> ForwardMetadata:
    def tables(*full_to_swa: Tensor) -> list[list[int]]:
        return [live_pages(row, n, pool, *full_to_swa) for row, n in zip(rows, key_lens, strict=True)]

    has_swa = pool.full_to_swa is not None
    swa_slots = pool.full_to_swa[batch.out_cache_loc.long()].tolist() if has_swa else []
    return ForwardMetadata(
        cache_seqlens=key_lens,
        max_seq_len_q=max(query_lens) if query_lens else _stated_query_length(batch),
        cu_seqlens_q=list(accumulate(query_lens, initial=0)),
        cu_seqlens_k=list(accumulate(key_lens, initial=0)),
        page_table=tables(),
        swa_page_table=tables(pool.full_to_swa) if has_swa else None,
        swa_out_cache_loc=swa_slots + [0] * (batch.num_tokens - len(swa_slots)) if has_swa else None,
    )


def zigzag_forward_metadata(batch: Any, pool: Any, num_ranks: int, rank: int) -> tuple[list[int], ForwardMetadata]:
    """Return, for one rank of a prefill with zigzag context parallelism, (indices of its query rows, metadata of its call).

    The new tokens of each request are divided into 2 * num_ranks consecutive blocks, whose lengths differ by at most 1, the
    longer ones first. Rank r has block r and block 2 * num_ranks - 1 - r of each request. In its call each block is a request:
    first block r of every request, then block 2 * num_ranks - 1 - r of every request.
    """
    blocks = 2 * num_ranks
    whole = forward_metadata(batch, pool)
    my_rows, query_lens, key_lens, requests = [], [], [], []
    for block in (rank, blocks - 1 - rank):
        for i in range(len(batch.seq_lens)):
            sizes = [len(range(first, query_length(batch, i), blocks)) for first in range(blocks)]
            before, own = sum(sizes[:block]), sizes[block]
            my_rows += [whole.cu_seqlens_q[i] + before + token for token in range(own)]
            query_lens.append(own)
            key_lens.append(key_length(batch, i) - sum(sizes[block + 1 :]))
            requests.append(int(batch.req_pool_indices[i]))
    return my_rows, _of_requests(batch, pool, requests, query_lens, key_lens)


def encoder_only_verify(batch: Any, pool: Any) -> tuple[list[int], list[list[int]]]:
    """Return (number of keys, pages) of each query row of a target verify on an encoder-only layer. The metadata has an entry
    for each query row, and each query row sees all keys of its request, also those of later rows.
    """
    keys, pages = [], []
    for i, row in enumerate(batch.req_pool_indices.tolist()):
        keys += [key_length(batch, i)] * query_length(batch, i)
        pages += [live_pages(row, key_length(batch, i), pool)] * query_length(batch, i)
    return keys, pages


@dataclass(frozen=True)
class MLAForwardMetadata:
    """The expected metadata of a forward pass on the MLA decode kernel, as lists. Padding rows follow each request's rows, so
    that all requests have `max_seq_len_q` rows. A request's last padding row sees `seq_lens_k` keys, and its last own row
    `seen_lens` keys. A block table has only pages that rows may see.
    """

    seq_lens_k: list[int]
    seen_lens: list[int]
    max_seq_len_q: int
    cu_seqlens_q: list[int]
    block_table: list[list[int]]


def mla_forward_metadata(batch: Any, pool: Any, *, counts_draft: bool, block: int | None = None) -> MLAForwardMetadata:
    """Return the expected metadata of one pass on the MLA decode kernel. Raise ValueError if the mode runs no attention.

    Each request has a block of rows: its own rows, then padding. All blocks have the longest request's number of rows, except
    in a ragged verify, where they have the rows of a whole draft. The kernel puts a block's last row at the last key, so
    `seq_lens_k` counts the padding. The page table has page 0 for pages that only padding rows read.

    Args:
        counts_draft: True: the lengths of a draft step count the tokens drafted so far, the step's own included. False:
            they do not, as in SGLang.
        block: number of rows in a block, as a CUDA graph fixes it; None: the longest request's number of rows.
    """
    query_lens = [query_length(batch, i) for i in range(len(batch.seq_lens))]
    is_step = batch.forward_mode.name in ("DECODE", "IDLE") and batch.spec_info is not None
    leaves_out_draft = is_step and not counts_draft
    seen = [int(batch.seq_lens[i]) if leaves_out_draft else key_length(batch, i) for i in range(len(batch.seq_lens))]
    if block is None:
        is_ragged_verify = batch.forward_mode.name == "RAGGED_VERIFY"
        block = max(query_lens) if query_lens and not is_ragged_verify else _stated_query_length(batch)
    padded = [keys + block - rows for keys, rows in zip(seen, query_lens, strict=True)]
    table = []
    for row, own, most in zip(batch.req_pool_indices.tolist(), seen, padded, strict=True):
        pages = live_pages(row, own, pool)
        table.append(pages + [0 for _ in range(len(pages) * pool.page_size, most, pool.page_size)])
    return MLAForwardMetadata(padded, seen, block, list(accumulate(query_lens, initial=0)), table)


def mla_prefix_chunks(batch: Any, pool: Any, capacity: int) -> list[list[list[int]]]:
    """Return the slots of the cached prefix tokens in each chunk of an MLA prefill, as [chunk][request][token]. A chunk has at
    most `capacity` // (number of requests) tokens of each request. Raise ValueError if this is 0.
    """
    remaining = [
        pool.req_to_token[row, :prefix].tolist()
        for row, prefix in zip(batch.req_pool_indices.tolist(), batch.extend_prefix_lens.tolist(), strict=True)
    ]
    each, chunks = capacity // max(len(remaining), 1), []
    if each < 1 and any(remaining):
        raise ValueError(f"capacity={capacity} has no token for each of {len(remaining)} requests")
    while any(remaining):
        chunks.append([slots[:each] for slots in remaining])
        remaining = [slots[each:] for slots in remaining]
    return chunks


def mla_dcp_metadata(keys: int, row: int, pool: Any, size: int, rank: int) -> tuple[int, list[int]]:
    """Return (number of tokens, page ids) of a request on one rank of decode context parallelism. The token at position p is on
    rank p % size; its pages have ``page_size / size`` tokens. The request has `keys` tokens and row `row` of ``req_to_token``.
    """
    page_size = pool.page_size // size
    own = [position for position in range(keys) if position % size == rank]
    tokens = pool.req_to_token[row].tolist()
    return len(own), [tokens[own[i]] // size // page_size for i in range(0, len(own), page_size)]


def dsa_forward_metadata(
    batch: Any, pool: Any, topk_indices: Tensor, *, index_topk: int, index_kpool: int = 1
) -> tuple[list[int], list[list[int]]]:
    """Return the expected metadata of one forward pass of DeepSeek sparse attention, in which a query row sees only selected
    tokens: (``seq_lens``, K/V pool indices of the selected entries), each with one element per query row, because each row is a
    request of the sparse MLA decode call. In a mode with drafts, all requests must have equally many rows.

    `topk_indices`, int [num_rows, top_k], are the positions that are selected for each row, -1 for none. Rows after
    these, such as padding, select nothing. Whole groups of `index_kpool` positions are selected, at most `index_topk` positions
    per row. The positions after a request's last whole group are always selected.
    """
    selected, columns = topk_indices.tolist(), -(-topk_indices.shape[1] // 4) * 4
    is_decode = batch.forward_mode.name in ("DECODE", "IDLE")
    seq_lens: list[int] = []
    places: list[list[int]] = []
    for i, request in enumerate(batch.req_pool_indices.tolist()):
        rows = query_length(batch, i)
        last = int(batch.seq_lens[i]) if is_decode else key_length(batch, i)
        tokens = pool.req_to_token[request].tolist()
        for seen in range(last - rows + 1, last + 1):
            whole = max(seen, 0) // index_kpool * index_kpool
            seq_lens.append(seen if is_decode else min(whole, index_topk) + max(seen, 0) - whole)
            own = selected[len(places)] if len(places) < len(selected) else []
            places.append([tokens[at] if at >= 0 else -1 for at in own])
    if places and not is_decode:
        seq_lens += [0] * (batch.num_tokens - len(places))
        places += [[]] * (batch.num_tokens - len(places))
    return seq_lens, [row + [-1] * (columns - len(row)) for row in places]


def dsa_metadata_of_rank(places: list[list[int]], size: int, rank: int) -> tuple[list[int], list[list[int]]]:
    """Return the part of `places`, the selected entries of each query row, that belongs to one of `size` GPUs in decode context
    parallelism: (number of entries of each row in this GPU's cache, their indices in this cache, followed by -1).
    """
    own = [[at // size for at in row if at >= 0 and at % size == rank] for row in places]
    padded = [row + [-1] * (len(every) - len(row)) for row, every in zip(own, places, strict=True)]
    return [len(row) for row in own], padded


@dataclass(frozen=True)
class DSV4ForwardMetadata:
    """The expected lengths, entry indices and row offsets of DeepSeek-V4's attention call, as lists."""

    seq_lens: list[int]  # of each query row
    sparse_indices: list[list[int]]  # the used columns of each query row
    cum_seq_lens_q: list[int]
    request_lens: list[int]


def dsv4_forward_metadata(
    batch: Any, pool: Any, *, compress_ratio: int, topk_indices: Tensor | None = None
) -> DSV4ForwardMetadata:
    """Return the expected metadata of one forward pass of DeepSeek-V4, in any mode except DRAFT_EXTEND.

    In `sparse_indices`, the first 128 columns of a query row are its token and the tokens before it, in the sliding-window
    pool. The other columns are compressed entries of its request. The compressed pool has the page ids of the token pool, and
    pages of ``page_size / compress_ratio`` entries. At the ratios 4 and 128, a row without compressed entries has one column
    with -1.

    Args:
        compress_ratio: number of tokens that a compressed entry represents; 0: there are no such entries.
        topk_indices: int [num_rows, index_topk]: the selected compressed entries, by their index in the request. If a row sees
            n complete groups of tokens, only its first n indices are used. None: each row uses all its n entries.
    """
    mode, rows, lasts = batch.forward_mode.name, list[tuple[int, int]](), list[int]()
    for i, request in enumerate(batch.req_pool_indices.tolist()):
        lasts.append(int(batch.seq_lens[i]) if mode in ("DECODE", "IDLE") else key_length(batch, i))
        for seen in range(lasts[-1] - query_length(batch, i) + 1, lasts[-1] + 1):
            rows.append((request, max(seen, 1) if mode == "DRAFT_EXTEND_V2" else seen))
    if mode == "RAGGED_VERIFY" and rows:
        # Padding rows: as in SGLang's Triton kernel, even if the last request has no rows
        rows += [(int(batch.req_pool_indices[-1]), 1)] * (batch.num_tokens - len(rows))
    table, slots_of, windowed = [], {}, {}
    for request, most in dict(sorted(rows)).items():
        tokens = pool.req_to_token[request, : max(most, 0)]
        slots_of[request], windowed[request] = tokens.tolist(), pool.full_to_swa[tokens.long()].tolist()
    for row, (request, seen) in enumerate(rows):
        slots = slots_of[request]
        cells = [windowed[request][at] if at >= 0 else -1 for at in range(seen - 1, seen - 129, -1)]
        groups = list(range(seen // compress_ratio)) if compress_ratio else []
        if topk_indices is not None:
            groups = topk_indices[row].tolist()[: len(groups)]
        for group in groups:
            page, offset = divmod(slots[group * compress_ratio], pool.page_size)
            cells.append(page * (pool.page_size // compress_ratio) + offset // compress_ratio)
        table.append(cells if groups or compress_ratio < 4 else [*cells, -1])
    boundaries = accumulate((query_length(batch, i) for i in range(len(lasts))), initial=0)
    return DSV4ForwardMetadata([seen for _, seen in rows], table, list(boundaries), lasts)


def block_sparse_forward_metadata(batch: Any, pool: Any, topk_pages: Tensor) -> tuple[list[int], list[list[list[int]]]]:
    """Return the expected metadata of one decode or target verify of MiniMax-M3: (number of keys of each query row, K/V pool
    slots [K/V head][query row][key]). In the call each query row is a request.

    The keys of a row are the tokens that it sees: those in its own page up to the row, and all tokens of at most 15 earlier
    pages. If it sees none, its number of keys is given as 1. `topk_pages`, int [num_kv_heads, num_rows, 16], has the page table
    columns that the row selects, -1 for none.
    """
    seq_lens: list[int] = []
    slots: list[list[list[int]]] = [[] for _ in topk_pages]
    chosen = topk_pages.tolist()
    for i, request in enumerate(batch.req_pool_indices.tolist()):
        last, tokens = key_length(batch, i), pool.req_to_token[request].tolist()
        for seen in range(last - query_length(batch, i) + 1, last + 1):
            pages = range(0, seen, pool.page_size)
            seq_lens.append(max(1, seen - pool.page_size * len(pages[:-16])))
            visible = tokens[: max(seen, 0)]
            for of_head, selected in zip(slots, chosen, strict=True):
                starts = [page * pool.page_size for page in selected[len(of_head)] if page >= 0]
                of_head.append([at for start in starts for at in visible[start : start + pool.page_size]])
    return seq_lens, slots


def query_length(batch: Any, i: int) -> int:
    """Return the number of query rows of request ``i`` in the batch's forward mode. Raise ValueError in the mode PREBUILT."""
    mode = batch.forward_mode.name
    if mode in ("DECODE", "IDLE"):
        return 1
    if mode == "TARGET_VERIFY":
        return int(batch.num_tokens) // len(batch.seq_lens)
    if mode == "PREBUILT":
        raise ValueError("PREBUILT runs no attention")
    lengths = batch.extend_seq_lens if batch.extend_seq_lens is not None else batch.extend_seq_lens_cpu
    return int(lengths[i])


def key_length(batch: Any, i: int) -> int:
    """Return the number of keys that the last query row of request ``i`` may see, its own key included.

    In draft steps and verifications ``seq_lens`` counts tokens up to the last accepted one. Step s of a draft adds s + 1
    tokens, a verification as many tokens as it has rows, and a draft over a frozen K/V cache (step -1) no token.
    """
    mode, length = batch.forward_mode.name, int(batch.seq_lens[i])
    if mode in ("DECODE", "IDLE") and batch.spec_info is not None:
        length += int(batch.spec_info.speculative_step_id) + 1
    if mode in ("TARGET_VERIFY", "RAGGED_VERIFY"):
        length += query_length(batch, i)
    return length


def live_pages(row: int, length: int, pool: Any, full_to_swa: Tensor | None = None) -> list[int]:
    """Return the page ids of the first ``length`` tokens (at most ``max_context_len``) of a request, in order. ``row`` is the
    request's row of ``req_to_token``. With ``full_to_swa`` the pages are those of the sliding-window pool. Slot -1 is in page
    -1. If ``pool.v2p`` exists, the id in the full pool is 0 for slot -1 and for a virtual page without a physical page.
    """
    v2p = getattr(pool, "v2p", None)
    slots = pool.req_to_token[row, : max(0, min(length, pool.max_context_len)) : pool.page_size]
    pages = (slots if full_to_swa is None else full_to_swa[slots.long()]) // pool.page_size
    if full_to_swa is None and v2p is not None:
        pages = v2p[pages.clamp(min=0).long()].clamp(min=0).where(pages >= 0, 0)
    found: list[int] = pages.tolist()
    return found


def _stated_query_length(batch: Any) -> int:
    mode = batch.forward_mode.name
    if mode in ("TARGET_VERIFY", "RAGGED_VERIFY"):
        return int(batch.spec_info.num_draft_tokens)
    return 1 if mode in ("DECODE", "IDLE") else 0
