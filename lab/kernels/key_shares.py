"""How a batch's keys are shared out among a fixed number of programs, and how what each of them found is merged.

The tiles of keys of all requests and K/V heads lie end to end in one order, of which each program takes the same number.
Lengths are known on the device alone, so that is where the shares are: a long request is cut where a share ends, a short
one is not cut at all, and no program waits for another. What a program has of a (request, K/V head) that it does not have
as a whole is a partial result. It has two of them at most, where its share begins and where it ends, so that the scratch
has a fixed size: two slots per program. `merge_kernel` finds the slots of each output row by the same arithmetic.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lab.kernels.support import triton_interprets
from lab.kernels.triton_support import LOG2_E, Tile, log2_sum, rounded, scalar, store_rows
from lab.problem import PagedAttention

# Lengths that a program reads at a time to find its share: one per thread of 4 warps.
BLOCK_REQUESTS: tl.constexpr = tl.constexpr(128)
# Elements of head_dim that one program merges, and partial results that it reads at a time: 2,048 floats.
MERGED_DIMS = 128
MERGED_PIECES = 16
# What no row's reach exceeds: keys of a request are counted in int32.
NO_REACH: tl.constexpr = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Shares:
    """How the keys of a call are shared out.

    Attributes:
        pieces: programs for each block of query rows.
        least_tiles: tiles of keys that a share has at least, for which a program and its partial result are worth it.
    """

    pieces: int
    least_tiles: int = 1


def choose_shares(tile: Tile, q_blocks: int, device: torch.device, least_keys: int = 0) -> Shares:
    """As many programs as run at a time, so that all end together; in the interpreter that is one, which cuts nothing.

    Args:
        tile: its `per_multiprocessor` programs share a multiprocessor.
        q_blocks: blocks of query rows of a request, each with programs of its own.
        device: whose multiprocessors are counted.
        least_keys: fewest keys of a share.
    """
    if device.type != "cuda":
        return Shares(1)
    programs = tile.per_multiprocessor * num_multiprocessors(device)
    return Shares(max(1, programs // q_blocks), max(1, least_keys // tile.keys))


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class PartialResults:
    """Two slots per program: results of the keys that it had, normalised, so that a merge needs their log-sum-exp alone.

    Attributes:
        out: float32 [q_blocks * pieces * 2, rows, v_head_dim].
        lse_log2: float32 [q_blocks * pieces * 2, rows]; -inf where a row sees none of the keys.
    """

    out: torch.Tensor
    lse_log2: torch.Tensor

    @classmethod
    def empty(cls, shares: Shares, q_blocks: int, rows: int, problem: PagedAttention) -> "PartialResults":
        device = problem.query.device
        slots = 2 * q_blocks * shares.pieces
        return cls(
            torch.empty((slots, rows, problem.v_head_dim), dtype=torch.float32, device=device),
            torch.empty((slots, rows), dtype=torch.float32, device=device),
        )

    def merge(
        self, problem: PagedAttention, shares: Shares, tile: Tile, out: torch.Tensor, lse_log2: torch.Tensor | None
    ) -> None:
        """Write the output and, unless it is None, the LSE of all rows that no program had as a whole."""
        head_dim = problem.v_head_dim
        block_dims = min(head_dim, MERGED_DIMS)
        grid = (problem.max_q_len * problem.num_qo_heads, problem.batch_size, head_dim // block_dims)
        merge_kernel[grid](
            self.out,
            self.lse_log2,
            problem.seq_lens,
            problem.cu_seqlens_q,
            problem.sinks,
            problem.bmm2_scale,
            out,
            lse_log2,
            problem.max_q_len,
            problem.batch_size,
            problem.window_left,
            shares.pieces,
            shares.least_tiles,
            problem.num_kv_heads,
            GROUP=problem.num_qo_heads // problem.num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_ROWS=tile.rows,
            BLOCK_KEYS=tile.keys,
            BLOCK_DIMS=block_dims,
            BLOCK_PIECES=MERGED_PIECES,
            BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
            INTERPRETED=triton_interprets(),
            num_warps=1,
        )


@triton.jit
def reach_of(window_left, max_q_len):
    """Keys behind which no row of a request sees any, counted from its last."""
    return tl.where(window_left >= 0, tl.cast(window_left, tl.int64) + max_q_len, NO_REACH)


@triton.jit
def tiles_of(kv_len, reach, BLOCK_KEYS: tl.constexpr):
    """The first tile that a row may see, and the number of tiles: one at least, since rows without keys are written too."""
    first = tl.maximum(kv_len.to(tl.int64) - reach, 0) // BLOCK_KEYS
    return first, tl.maximum(tl.cdiv(kv_len.to(tl.int64), BLOCK_KEYS) - first, 1)


@triton.jit
def tiles_from(start, seq_lens, num_requests, reach, BLOCK_KEYS: tl.constexpr):
    """Tiles of BLOCK_REQUESTS requests from `start` on, int64; 0 of those from `num_requests` on, which do not exist."""
    requests = start + tl.arange(0, BLOCK_REQUESTS)
    kv_lens = tl.load(seq_lens + requests, mask=requests < num_requests, other=0)
    return tl.where(requests < num_requests, tiles_of(kv_lens, reach, BLOCK_KEYS)[1], 0)


@triton.jit
def first_tile_of(request, seq_lens, reach, units, BLOCK_KEYS: tl.constexpr):
    """The position of a request's first tile in the order; of the number of requests, that of the order's end."""
    sums = tl.zeros([BLOCK_REQUESTS], tl.int64)
    for start in range(0, request, BLOCK_REQUESTS):
        sums += tiles_from(start, seq_lens, request, reach, BLOCK_KEYS)
    return tl.sum(sums, 0) * units


@triton.jit
def tiles_per_share(seq_lens, batch_size, reach, units, pieces, least_tiles, BLOCK_KEYS: tl.constexpr):
    """(tiles of all requests and K/V heads, tiles of one share)."""
    total = first_tile_of(batch_size, seq_lens, reach, units, BLOCK_KEYS)
    return total, tl.maximum(tl.cdiv(total, pieces), least_tiles)


@triton.jit
def request_at(position, seq_lens, batch_size, reach, units, BLOCK_KEYS: tl.constexpr):
    """(the request that has the tile at `position` of the order, the position of its first tile)."""
    request = tl.zeros([], tl.int64)
    begin = tl.zeros([], tl.int64)
    end = tl.zeros([], tl.int64)
    for start in range(0, batch_size, BLOCK_REQUESTS):
        tiles = tiles_from(start, seq_lens, batch_size, reach, BLOCK_KEYS) * units
        is_before = (end + tl.cumsum(tiles, 0) <= position) & (tiles > 0)
        request += tl.sum(is_before.to(tl.int64), 0)
        begin += tl.sum(tl.where(is_before, tiles, 0), 0)
        end += tl.sum(tiles, 0)
    return request, begin


@triton.jit
def slot_of(piece, q_block, q_blocks, begins_unit):
    """Where a program keeps a partial result: what its share ends in, which begins a unit, apart from what it begins in."""
    return (piece * q_blocks + q_block) * 2 + begins_unit.to(tl.int64)


@triton.jit
def store_share(
    largest,
    denominator,
    sums,  # [ROWS, DIMS]
    is_whole,  # whether these are all keys of the rows
    sinks,
    head,
    bmm2_scale,
    out,
    lse_log2,
    row_head,  # of the output, int64 [ROWS]
    row_exists,
    partial_out,  # None: every share is whole
    partial_lse_log2,
    slot,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write what a share has of a block of rows: the output, or a slot's normalised sums and their LSE."""
    dims = tl.arange(0, DIMS)
    if is_whole or partial_out is None:
        sink_log2 = None
        if sinks is not None:
            sink_log2 = tl.load(sinks + head, mask=row_exists, other=0.0) * LOG2_E
        store_rows(
            largest,
            denominator,
            sums,
            sink_log2,
            bmm2_scale,
            out + row_head * DIMS,
            None if lse_log2 is None else lse_log2 + row_head,
            dims,
            row_exists,
            BMM2_IS_TENSOR,
            INTERPRETED,
        )
    else:
        place = slot * ROWS + tl.arange(0, ROWS)
        divisor = tl.where(denominator == 0, 1.0, denominator)
        tl.store(partial_out + place[:, None] * DIMS + dims[None, :], sums / divisor[:, None])
        tl.store(partial_lse_log2 + place, log2_sum(largest, denominator))


@triton.jit(do_not_specialize=["max_q_len", "batch_size", "window_left", "pieces", "least_tiles", "num_kv_heads"])
def merge_kernel(
    partial_out,  # float32 [slots, BLOCK_ROWS, HEAD_DIM]
    partial_lse_log2,  # float32 [slots, BLOCK_ROWS]
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,
    bmm2_scale,
    out,
    lse_log2,
    max_q_len,
    batch_size,
    window_left,
    pieces,
    least_tiles,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge BLOCK_DIMS of one row and head: its pieces' outputs weighted by 2 ** their LSE, the sink counted once."""
    rows_per_kv_head = max_q_len * GROUP
    kv_head = tl.program_id(0) // rows_per_kv_head
    packed = tl.program_id(0) % rows_per_kv_head
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    request = tl.program_id(1).to(tl.int64)
    if cu_seqlens_q is None:
        q_start = request * max_q_len
    else:
        q_start = tl.load(cu_seqlens_q + request).to(tl.int64)
        if token >= tl.load(cu_seqlens_q + request + 1) - q_start:
            return

    reach = reach_of(window_left, max_q_len)
    _, share = tiles_per_share(seq_lens, batch_size, reach, num_kv_heads, pieces, least_tiles, BLOCK_KEYS)
    _, tiles = tiles_of(tl.load(seq_lens + request), reach, BLOCK_KEYS)
    begin = first_tile_of(request, seq_lens, reach, num_kv_heads, BLOCK_KEYS) + kv_head * tiles
    first_piece = begin // share
    last_piece = (begin + tiles - 1) // share
    if first_piece == last_piece:  # a program had it as a whole, and has written it
        return

    q_blocks = tl.cdiv(rows_per_kv_head, BLOCK_ROWS)
    dims = tl.program_id(2) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    largest = tl.full([], float("-inf"), tl.float32)
    denominator = tl.zeros([], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head) * LOG2_E
        denominator = tl.where(largest == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([BLOCK_DIMS], tl.float32)
    for start in range(first_piece, last_piece + 1, BLOCK_PIECES):
        piece = start + tl.arange(0, BLOCK_PIECES)
        exists = piece <= last_piece
        slot = slot_of(piece, packed // BLOCK_ROWS, q_blocks, piece == first_piece)
        place = slot * BLOCK_ROWS + packed % BLOCK_ROWS
        lses = tl.load(partial_lse_log2 + place, mask=exists, other=float("-inf"))
        parts = tl.load(partial_out + place[:, None] * HEAD_DIM + dims[None, :], mask=exists[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lses, 0))
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(lses - origin)
        rescale = tl.exp2(largest - origin)
        sums = sums * rescale + tl.sum(parts * weights[:, None], 0)
        denominator = denominator * rescale + tl.sum(weights, 0)
        largest = new_largest
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = rounded(sums * scalar(bmm2_scale, BMM2_IS_TENSOR) / divisor, out.dtype.element_ty, INTERPRETED)
    row_head = (q_start + token) * (num_kv_heads * GROUP) + head
    tl.store(out + row_head * HEAD_DIM + dims, result)
    if lse_log2 is not None and tl.program_id(2) == 0:
        tl.store(lse_log2 + row_head, log2_sum(largest, denominator))
