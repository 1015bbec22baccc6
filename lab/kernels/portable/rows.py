"""The query rows of a block, and the keys that they see.

A block has packed rows of one request: row r is query token r // GROUP, and head r % GROUP of the heads that use the same K/V
head. Token i of a request with q tokens and L keys has position L - q + i, and sees the keys up to that position.

A launch may serve only some requests. Its *kind*, (cu_seqlens_q, least_q_len, max_q_len), says which: requests with
`least_q_len` to `max_q_len` query tokens; all requests if `least_q_len` is None.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lab.calls.problem import PagedAttention


class KeyRange(NamedTuple):
    """The key tiles that one program reads for a block of query rows: those with a key that at least one row sees."""

    q_position: Any  # of the request's first query token; negative if the request has fewer keys than rows
    first_key: Any  # the first key that some row sees
    end: Any  # end of the keys that the program reads
    begin: Any  # first key of the first tile
    num_tiles: Any
    num_before: Any  # tiles before those in which every row sees every key
    num_common: Any  # tiles in which every row sees every key; all other tiles need a mask


def most_blocks(problem: PagedAttention, block_rows: int, least_q_len: int | None) -> int:
    """Return an upper bound of the number of blocks of query rows for each K/V head. Requests with fewer query tokens than
    `least_q_len` have no block; None: all requests have blocks.
    """
    requests = min(problem.batch_size, problem.num_rows // (least_q_len or 1))
    whole_blocks = problem.num_rows * problem.group // block_rows
    return max(1, min(whole_blocks + requests, triton.cdiv(problem.max_q_len * problem.group, block_rows) * requests))


@triton.jit
def request_rows(cu_seqlens_q, request, max_q_len):
    """Return the index of a request's first query row, and the number of its rows: `max_q_len` if `cu_seqlens_q` is None."""
    if cu_seqlens_q is None:
        q_start = request * max_q_len
        q_len = max_q_len
    else:
        q_start = tl.load(cu_seqlens_q + request).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q + request + 1) - q_start).to(tl.int32)
    return q_start, q_len


@triton.jit
def q_lens_of_kind(requests, batch_size, kind):
    """Return each request's number of query tokens; 0 if it does not exist, or if `kind` excludes it (see `block_at`)."""
    cu_seqlens_q, least_q_len, max_q_len = kind
    exists = requests < batch_size
    if cu_seqlens_q is None:
        q_lens = tl.where(exists, max_q_len, 0)
    else:
        begins = tl.load(cu_seqlens_q + requests, mask=exists, other=0)
        q_lens = tl.load(cu_seqlens_q + requests + 1, mask=exists, other=0) - begins
        if least_q_len is not None:
            q_lens = tl.where((q_lens >= least_q_len) & (q_lens <= max_q_len), q_lens, 0)
    return q_lens


@triton.jit
def block_at(number, batch_size, kind, lanes, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return (request of the `number`-th block of query rows of the batch, index of the request's first block, number of
    requests that have blocks, without those before this request, number of all blocks). If there is no such block, the
    request is `batch_size`. `kind` is (cu_seqlens_q, n, m): only requests of n to m query tokens have blocks. `lanes`:
    `arange(requests read at once)`."""
    request = number * 0
    begin = request
    left = request
    end = request
    for start in range(0, batch_size, lanes.shape[0]):
        blocks = tl.cdiv(q_lens_of_kind(start + lanes, batch_size, kind) * GROUP, BLOCK_ROWS)
        is_before = (end + tl.cumsum(blocks, 0) <= number) & (start + lanes < batch_size)
        request += tl.sum(is_before.to(tl.int32), 0)
        left += tl.sum((~is_before & (blocks > 0)).to(tl.int32), 0)
        begin += tl.sum(tl.where(is_before, blocks, 0), 0)
        end += tl.sum(blocks, 0)
    return request, begin, left, end


@triton.jit
def keys_of_block(
    first_in_reach,  # the first key tile that some row of the request may see
    first_tile,  # the program's first tile, counted from first_in_reach
    end_tile,  # the end of the program's tiles, counted from first_in_reach
    kv_len,
    q_len,
    q_block,  # index of the block among the request's blocks of rows
    window_left,  # -1: no window
    MASK_WORDS: tl.constexpr,  # 0: no mask
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per K/V head
    TILE: tl.constexpr,  # `ProgramTile` or `HopperTile`
):
    """Return the `KeyRange` of a block: the program's key tiles that some row of the block sees; no tile if it has no row."""
    BLOCK_ROWS: tl.constexpr = TILE.rows
    BLOCK_KEYS: tl.constexpr = TILE.keys
    q_position = kv_len - q_len
    first_token = (q_block * BLOCK_ROWS) // GROUP
    last_token = tl.minimum((q_block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, q_len - 1)
    first_key = 0
    key_end = kv_len
    common_end = kv_len
    if MASK_WORDS > 0:
        common_end = q_position
    elif CAUSAL:
        key_end = tl.minimum(kv_len, tl.maximum(q_position + last_token + 1, 0))
        common_end = q_position + first_token + 1
    common_begin = 0
    if window_left >= 0:
        first_key = tl.maximum(q_position + first_token - window_left, 0)
        common_begin = tl.maximum(q_position + last_token - window_left, 0)
    begin = tl.maximum(((first_in_reach + first_tile) * BLOCK_KEYS).to(tl.int32), first_key // BLOCK_KEYS * BLOCK_KEYS)
    end = tl.minimum(((first_in_reach + end_tile) * BLOCK_KEYS).to(tl.int32), key_end)
    if q_block * BLOCK_ROWS >= q_len * GROUP:
        end = begin
    num_tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_KEYS)
    num_before = tl.cdiv(tl.maximum(common_begin - begin, 0), BLOCK_KEYS)
    num_common = (tl.minimum(end, common_end) - begin) // BLOCK_KEYS - num_before
    return KeyRange(q_position, first_key, end, begin, num_tiles, num_before, tl.maximum(num_common, 0))


@triton.jit
def tile_begin(keys, number, MASKED: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Return the first key of the `number`-th tile among those that need a mask (MASKED), or among all other tiles."""
    first = tl.where(number < keys.num_before, 0, keys.num_common) if MASKED else keys.num_before
    return keys.begin + (number + first) * BLOCK_KEYS


@triton.jit
def row_bounds(
    position,  # int32 [rows], each row's
    keys,  # `KeyRange`
    window_left,  # -1: no window
    CAUSAL: tl.constexpr,  # True: a row sees no key after its position
):
    """Return the first key that each row sees, and the end of its keys, int32 [rows] each. The call has no draft mask."""
    first = tl.where(window_left >= 0, tl.maximum(position - window_left, keys.first_key), keys.first_key)
    end = keys.end + position * 0
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    return first, end


@triton.jit
def visible_keys(
    key,  # [keys], those of a tile
    key_exists,  # bool [keys]
    position,  # int32 [rows], each row's
    row_exists,  # bool [rows]
    keys,  # `KeyRange`
    mask,  # packed draft mask, MASK_WORDS words of 16 bits for each row, or None
    mask_row,  # int64 [rows], index of each row in the mask
    window_left,  # -1: no window
    MASK_WORDS: tl.constexpr,  # 0: no mask
    CAUSAL: tl.constexpr,  # True: a row sees no key after its position, unless there is a mask
):
    """Return bool [rows, keys], True where a row sees a key. A draft mask replaces the causal mask; a window limits both."""
    visible = row_exists[:, None] & key_exists[None, :]
    if MASK_WORDS > 0:
        is_draft = key >= keys.q_position
        draft = tl.maximum(key - keys.q_position, 0)  # index among the draft tokens
        word = tl.load(
            mask + mask_row[:, None] * MASK_WORDS + (draft // 16)[None, :], mask=visible & is_draft[None, :], other=0
        )
        shown = ((word.to(tl.int32) >> (draft % 16)[None, :]) & 1) != 0
        visible = visible & (shown | ~is_draft[None, :])
    elif CAUSAL:
        visible = visible & (key[None, :] <= position[:, None])
    if window_left >= 0:
        visible = visible & (key[None, :] >= position[:, None] - window_left)
    return visible
