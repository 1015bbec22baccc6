"""How a batch's keys are shared out among a fixed number of programs, and how what each of them found is merged.

The tiles of keys of all requests and K/V heads lie end to end in one order, each request and K/V head behind some empty places
for what it takes to begin it; each program takes the same number of places.
Lengths are known on the device alone, so that is where the shares are: a long request is cut where a share ends, a short
one is not cut at all, and no program waits for another. What a program has of a (request, K/V head) that it does not have
as a whole is a partial result. It has two of them at most, where its share begins and where it ends, so that the scratch
has a fixed size: two slots per program. Which programs have keys of it is written by the one that begins it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lab.calls.problem import PagedAttention
from lab.gpus import capability_of, family_of
from lab.kernels.portable.arithmetic import LOG2_E, Tile, log2_sum, rounded, scalar, store_rows
from lab.kernels.portable.triton_call import Launch
from lab.kernels.support import triton_interprets

# Lengths that a program reads at a time to find its share: one per thread of 4 warps.
BLOCK_REQUESTS: tl.constexpr = tl.constexpr(128)
# So many keys more than an equal share are taken where requests of one length are then cut nowhere, or at equal parts: a
# program that ends one request and begins another waits for its keys anew, and what is cut is written, read and merged.
CUT_KEYS: tl.constexpr = tl.constexpr(256)
# A program of the merge has so many sums, 16 a thread, and reads so many pieces at a time for each; of their LSE more.
MERGED_SUMS = 2048
MERGED_AT_A_TIME = 4
MERGE_WARPS = 4
LSES_AT_A_TIME: tl.constexpr = tl.constexpr(64)
# Most rows of such a program, and programs that fill a GPU: eight of each of 132 multiprocessors.
MOST_MERGED_ROWS = 16
MERGE_PROGRAMS = 1024
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
        pieces: int32 [batch_size * num_kv_heads, 2]: the first and the last piece that have keys of a request and K/V head.
        overlaps: whether the merge may be launched beside the end of the attention.
    """

    out: torch.Tensor
    lse_log2: torch.Tensor
    pieces: torch.Tensor
    overlaps: bool

    @classmethod
    def empty(cls, shares: Shares, q_blocks: int, rows: int, problem: PagedAttention) -> "PartialResults":
        device = problem.query.device
        programs = q_blocks * shares.pieces
        return cls(
            torch.empty((2 * programs, rows, problem.v_head_dim), dtype=torch.float32, device=device),
            torch.empty((2 * programs, rows), dtype=torch.float32, device=device),
            torch.empty((problem.batch_size * problem.num_kv_heads, 2), dtype=torch.int32, device=device),
            overlaps_launches(device),
        )

    def merge(
        self, problem: PagedAttention, shares: Shares, out: torch.Tensor, lse_log2: torch.Tensor | None
    ) -> Launch:
        """What writes the output and, unless it is None, the LSE of all rows that no program had as a whole."""
        units, block_rows = self.pieces.shape[0], self.out.shape[1]
        packed_rows = problem.max_q_len * problem.num_qo_heads // problem.num_kv_heads
        rows, dims = merge_block(units * packed_rows, problem.v_head_dim)
        return Launch(
            merge_kernel,
            (units, triton.cdiv(packed_rows, rows), problem.v_head_dim // dims),
            self.out,
            self.lse_log2,
            self.pieces,
            problem.cu_seqlens_q,
            problem.sinks,
            problem.bmm2_scale,
            out,
            lse_log2,
            problem.max_q_len,
            self.out.shape[0] // (2 * shares.pieces),
            problem.num_kv_heads,
            GROUP=problem.num_qo_heads // problem.num_kv_heads,
            HEAD_DIM=problem.v_head_dim,
            BLOCK_ROWS=block_rows,
            MERGED_ROWS=rows,
            MERGED_DIMS=dims,
            LANES=max(1, MERGED_SUMS // (rows * dims)),
            AT_A_TIME=MERGED_AT_A_TIME,
            BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
            OVERLAPS=self.overlaps,
            INTERPRETED=triton_interprets(),
            num_warps=MERGE_WARPS,
            launch_pdl=self.overlaps,
        )


def merge_block(num_rows: int, head_dim: int) -> tuple[int, int]:
    """(rows, elements of head_dim) of one program of the merge: few rows have many pieces each, which its threads then share.

    Args:
        num_rows: of all requests and heads.
        head_dim: of the output.
    """
    elements = num_rows * head_dim // MERGE_PROGRAMS
    if elements < 64:  # one request of 4,096 keys, 32 heads: 15.3 µs for 15.7; of 16 tokens, not here: 24.8 for 21.9
        return 1, min(head_dim, 32)
    return min(MOST_MERGED_ROWS, triton.next_power_of_2(max(1, elements // 128))), min(head_dim, 128)


def overlaps_launches(device: torch.device) -> bool:
    """Return True where a launch may begin beside the end of the one before it (programmatic dependent launch)."""
    family = family_of(capability_of(device))
    return family is not None and family.overlaps_launches


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
def places_from(start, seq_lens, num_requests, reach, BLOCK_KEYS: tl.constexpr, UNIT_PLACES: tl.constexpr):
    """Places that a K/V head of BLOCK_REQUESTS requests from `start` on has in the order, int64: one for each of its tiles,
    and UNIT_PLACES before them; 0 of those from `num_requests` on, which do not exist."""
    requests = start + tl.arange(0, BLOCK_REQUESTS)
    kv_lens = tl.load(seq_lens + requests, mask=requests < num_requests, other=0)
    places = tiles_of(kv_lens, reach, BLOCK_KEYS)[1] + UNIT_PLACES
    return tl.where(requests < num_requests, places, 0)


@triton.jit
def places_per_share(
    seq_lens, batch_size, reach, units, pieces, least_tiles, BLOCK_KEYS: tl.constexpr, UNIT_PLACES: tl.constexpr
):
    """(places of all requests and K/V heads, places of one share)."""
    sums = tl.zeros([BLOCK_REQUESTS], tl.int64)
    longest = tl.zeros([BLOCK_REQUESTS], tl.int64)
    for start in range(0, batch_size, BLOCK_REQUESTS):
        places = places_from(start, seq_lens, batch_size, reach, BLOCK_KEYS, UNIT_PLACES)
        sums += places
        longest = tl.maximum(longest, places)
    total = tl.sum(sums, 0) * units
    most = tl.max(longest, 0)
    equal_share = tl.maximum(tl.cdiv(total, pieces), least_tiles)
    num_units = tl.cast(batch_size, tl.int64) * units
    # If all had the most: shares that hold whole requests and K/V heads, or equal parts of one.
    parts = tl.maximum(pieces // num_units, 1)
    even_share = tl.maximum(tl.cdiv(most, parts) * tl.cdiv(num_units, pieces), least_tiles)
    return total, tl.where(even_share <= equal_share + CUT_KEYS // BLOCK_KEYS, even_share, equal_share)


@triton.jit
def request_at(position, seq_lens, batch_size, reach, units, BLOCK_KEYS: tl.constexpr, UNIT_PLACES: tl.constexpr):
    """(the request that has a place of the order, its first place)."""
    request = tl.zeros([], tl.int64)
    begin = tl.zeros([], tl.int64)
    end = tl.zeros([], tl.int64)
    for start in range(0, batch_size, BLOCK_REQUESTS):
        places = places_from(start, seq_lens, batch_size, reach, BLOCK_KEYS, UNIT_PLACES) * units
        is_before = (end + tl.cumsum(places, 0) <= position) & (places > 0)
        request += tl.sum(is_before.to(tl.int64), 0)
        begin += tl.sum(tl.where(is_before, places, 0), 0)
        end += tl.sum(places, 0)
    return request, begin


@triton.jit
def slot_of(piece, q_block, q_blocks, begins_unit):
    """Where a program keeps a partial result: what its share ends in, which begins a unit, apart from what it begins in."""
    return (piece * q_blocks + q_block) * 2 + begins_unit.to(tl.int64)


@triton.jit
def store_pieces(unit_pieces, unit, first_place, tiles, share):
    """Write which pieces have keys of a unit, a request and K/V head; `first_place` is its first tile's."""
    tl.store(unit_pieces + unit * 2, (first_place // share).to(tl.int32))
    tl.store(unit_pieces + unit * 2 + 1, ((first_place + tiles - 1) // share).to(tl.int32))


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


@triton.jit(do_not_specialize=["max_q_len", "q_blocks", "num_kv_heads"])
def merge_kernel(
    partial_out,  # float32 [slots, BLOCK_ROWS, HEAD_DIM]
    partial_lse_log2,  # float32 [slots, BLOCK_ROWS]
    unit_pieces,  # int32 [batch_size * num_kv_heads, 2]
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,
    bmm2_scale,
    out,
    lse_log2,
    max_q_len,
    q_blocks,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED_DIMS: tl.constexpr,
    LANES: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge some rows of one request and K/V head: its pieces' outputs weighted by 2 ** their LSE, the sink counted once."""
    if OVERLAPS:  # every program, for what is launched next waits for this launch alone
        gdc_wait()
    unit = tl.program_id(0)
    first_piece = tl.load(unit_pieces + unit * 2).to(tl.int64)
    last_piece = tl.load(unit_pieces + unit * 2 + 1).to(tl.int64)
    if first_piece == last_piece:  # a program had it as a whole, and has written it
        return
    request = (unit // num_kv_heads).to(tl.int64)
    q_start = request * max_q_len
    q_len = max_q_len
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + request).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q + request + 1) - q_start).to(tl.int32)
    first_packed = tl.program_id(1) * MERGED_ROWS
    if first_packed >= q_len * GROUP:
        return
    packed = first_packed + tl.arange(0, MERGED_ROWS)
    token = packed // GROUP
    head = unit % num_kv_heads * GROUP + packed % GROUP
    row_exists = token < q_len
    dims = tl.program_id(2) * MERGED_DIMS + tl.arange(0, MERGED_DIMS)
    q_block = first_packed // BLOCK_ROWS
    block_row = packed % BLOCK_ROWS

    largest = tl.full([MERGED_ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head, mask=row_exists, other=float("-inf")) * LOG2_E
    sink_log2 = largest
    for start in range(first_piece, last_piece + 1, LSES_AT_A_TIME):
        piece = start + tl.arange(0, LSES_AT_A_TIME)
        place = slot_of(piece, q_block, q_blocks, piece == first_piece)[:, None] * BLOCK_ROWS + block_row[None, :]
        lses = tl.load(partial_lse_log2 + place, mask=(piece <= last_piece)[:, None], other=float("-inf"))
        largest = tl.maximum(largest, tl.max(lses, 0))
    origin = tl.where(largest == float("-inf"), 0.0, largest)

    denominators = tl.zeros([LANES, MERGED_ROWS], tl.float32)
    sums = tl.zeros([LANES, MERGED_ROWS, MERGED_DIMS], tl.float32)
    for start in range(first_piece, last_piece + 1, LANES * AT_A_TIME):
        for step in tl.static_range(AT_A_TIME):
            piece = start + step * LANES + tl.arange(0, LANES)
            exists = (piece <= last_piece)[:, None]
            place = slot_of(piece, q_block, q_blocks, piece == first_piece)[:, None] * BLOCK_ROWS + block_row[None, :]
            parts = tl.load(
                partial_out + place[:, :, None] * HEAD_DIM + dims[None, None, :], mask=exists[:, :, None], other=0.0
            )
            lses = tl.load(partial_lse_log2 + place, mask=exists, other=float("-inf"))
            weights = tl.exp2(lses - origin[None, :])
            sums += parts * weights[:, :, None]
            denominators += weights
    denominator = tl.sum(denominators, 0)
    if sinks is not None:
        denominator += tl.exp2(sink_log2 - origin)
    row_head = (q_start + token) * (num_kv_heads * GROUP) + head
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = tl.sum(sums, 0) * scalar(bmm2_scale, BMM2_IS_TENSOR) / divisor[:, None]
    result = rounded(result, out.dtype.element_ty, INTERPRETED)
    tl.store(out + row_head[:, None] * HEAD_DIM + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None and tl.program_id(2) == 0:
        tl.store(lse_log2 + row_head, log2_sum(largest, denominator), mask=row_exists)
