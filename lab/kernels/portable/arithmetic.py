"""What the portable attention kernels share of arithmetic: products, rounding, a running softmax in base 2 and float32."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lab.calls.problem import PagedAttention
from lab.calls.ragged_context import RaggedAttention

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tile:
    """Shape of one program: packed query rows, keys per step, Triton's launch options, and programs of a multiprocessor.

    To begin and end a request and K/V head takes a program as long as `unit_keys` keys, in which it waits for its first keys
    and writes its results: a program that has many short ones gets fewer keys. With `by_descriptor`, tiles that need no mask
    are loaded by Hopper's copy engine where `tiles_of_pages` can describe them. With `denominator_per_key`, the softmax's
    denominator is kept in a part for each key of a tile, which are summed up once, behind the last tile: warps that share rows
    wait for each other less often, and a thread needs as many registers more as it has scores.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    per_multiprocessor: int = 1
    unit_keys: int = 256
    by_descriptor: bool = False
    denominator_per_key: bool = False


def has_rows(problem: PagedAttention | RaggedAttention) -> bool:
    """Whether any request may have a query row; rows behind the last request's are padding, which nobody computes."""
    return min(problem.num_rows, problem.batch_size, problem.max_q_len) > 0


def tiles_of_pages(cache: torch.Tensor, tile: Tile, dims: int) -> TensorDescriptor | None:
    """A descriptor of the pool's tiles of keys, or None where none is wanted, or the copy engine could not load them.

    Args:
        cache: [num_pages, num_kv_heads, page_size, head_dim], strided.
        tile: its keys are the tile's, its `by_descriptor` says whether a descriptor is wanted.
        dims: elements of head_dim that a tile has, a power of two.
    """
    if not tile.by_descriptor or not loads_by_descriptor(cache, tile.keys):
        return None
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, tile.keys, dims])


def loads_by_descriptor(cache: torch.Tensor, keys: int) -> bool:
    """Whether the copy engine can load tiles of `keys` keys that lie in a page, and gains something.

    It takes strides and addresses of multiples of 16 bytes. An e4m3 tile, converted before it is multiplied, gains nothing.
    """
    aligned = _is_aligned(cache, strides_bytes=16) and cache.stride(3) == 1
    return aligned and cache.numel() > 0 and cache.shape[2] % keys == 0 and cache.element_size() > 1


def _is_aligned(cache: torch.Tensor, strides_bytes: int) -> bool:
    """Whether the pool begins at a multiple of 16 bytes, and its strides but the last are multiples of `strides_bytes`."""
    strides = [stride * cache.element_size() for stride in cache.stride()[:3]]
    return cache.data_ptr() % 16 == 0 and all(stride % strides_bytes == 0 for stride in strides)


def paired(caches: tuple[torch.Tensor, torch.Tensor], tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """The pools of K and V, e4m3 elements as int16 pairs where a tile's products take them from registers.

    So do products of less than 64 rows. A register of theirs holds two elements, and one of the pool four: pairs are sorted by
    one permutation of those bytes (`halves_of_pairs`), where single bytes would be masked, shifted and moved one by one.
    """
    k_cache, v_cache = caches
    if k_cache.dtype != torch.float8_e4m3fn or tile.rows >= 64 or not all(_has_pairs(cache) for cache in caches):
        return caches
    return k_cache.view(torch.int16), v_cache.view(torch.int16)


def _has_pairs(cache: torch.Tensor) -> bool:
    """Whether an e4m3 pool has a view of pairs, and Triton still sees that 16 bytes can be loaded at a time.

    For that it wants strides to be multiples of 16 elements, be they bytes or pairs.
    """
    return _is_aligned(cache, strides_bytes=32) and cache.storage_offset() % 16 == 0


def dot_dtype(cache: torch.Tensor) -> tl.dtype:
    """What products are made in: the dtype of K/V, which is the query's, and float16 where that is e4m3.

    float16 holds every e4m3 value, and SM89 and later convert two of them by one instruction; bf16 takes six, by way of
    float32, four of which wait for a unit of a quarter of the others' rate.
    """
    return tl.bfloat16 if cache.dtype == torch.bfloat16 else tl.float16


@triton.jit
def fitting_power(q, DOT_DTYPE: tl.constexpr):
    """float32 [rows], or [1] where nothing is to be done: each row of `q`, divided by 2 ** this, fits DOT_DTYPE.

    bf16 reaches beyond float16 at both ends, so that its rows are moved to where their largest elements are of
    [2 ** 14, 2 ** 15): what then falls below float16's least is 2 ** -39 of those.
    """
    power = tl.zeros([1], tl.float32)
    if q.dtype == tl.bfloat16 and tl.float16 == DOT_DTYPE:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        # Of a row of zeros or infinities the power is one whose inverse is finite.
        power = tl.minimum(tl.floor(tl.log2(tl.maximum(largest, 1e-26))) - 14.0, 113.0)
    return power


@triton.jit
def fitted(q, power, DOT_DTYPE: tl.constexpr):
    """`q` in DOT_DTYPE, its rows divided by 2 ** `power` where they would not fit.

    A query of DOT_DTYPE is left alone: Triton keeps what it has loaded in shared memory, and the rest in registers.
    """
    if q.dtype == tl.bfloat16 and tl.float16 == DOT_DTYPE:
        q = q.to(tl.float32) * tl.exp2(-power)[:, None]
    return q.to(DOT_DTYPE)


@triton.jit
def scalar(scale, IS_TENSOR: tl.constexpr):
    """A scale given as a number, or as a tensor of one element."""
    return tl.load(scale) if IS_TENSOR else scale


@triton.jit
def pages_of(table, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Page ids, int64, of the tile of keys that begins at `begin`: one for all where pages hold whole tiles, else one per key.

    A tile begins at a multiple of BLOCK_KEYS; ids of keys from `end` on are not read.
    """
    if PAGE_SIZE % BLOCK_KEYS == 0:
        page = tl.load(table + begin // PAGE_SIZE, mask=begin < end, other=0)
    else:
        key = begin + tl.arange(0, BLOCK_KEYS)
        page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page.to(tl.int64)


@triton.jit
def offsets_of(page, begin, page_stride, token_stride, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Where the tile's keys lie in the pool, in elements, int64 [BLOCK_KEYS]; `page` is of `pages_of`."""
    if PAGE_SIZE % BLOCK_KEYS == 0:
        slot = begin % PAGE_SIZE + tl.arange(0, BLOCK_KEYS)
    else:
        slot = (begin + tl.arange(0, BLOCK_KEYS)) % PAGE_SIZE
    return page * page_stride + slot.to(tl.int64) * token_stride


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 `x` in DTYPE, to nearest even; e4m3 saturates, and keeps NaN."""
    if tl.float8e4nv == DTYPE:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if INTERPRETED:  # Triton 3.7's interpreter would truncate
        if tl.bfloat16 == DTYPE:
            x = without_bits(x, 16)
        if tl.float8e4nv == DTYPE:
            # Below 2 ** -6, e4m3's steps are 2 ** -9, which are those of float32 at 1.5 * 2 ** 14.
            x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, without_bits(x, 20))
    return x.to(DTYPE)


@triton.jit
def without_bits(x, COUNT: tl.constexpr):
    """float32 `x` rounded to nearest even where its last COUNT bits are zero."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (COUNT - 1)) - 1 + ((bits >> COUNT) & 1)
    return (bits & -(1 << COUNT)).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, sums, INTERPRETED: tl.constexpr):
    """`sums + a @ b` with float32 sums."""
    if INTERPRETED:  # Triton 3.7's interpreter would multiply the bit patterns of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)


@triton.jit
def softmax_step(scores, largest, denominator, DOT_DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """One step of a running softmax in base 2: weights of these scores in DOT_DTYPE, the factor of earlier sums, the new state.

    The denominator is of `empty_denominator`.

    The largest weight is 1, in float16 2 ** 14, and `largest` is below the largest score by as much: float16 has nothing below
    2 ** -24, and where one key has nearly all the weight, a hundred thousand others share what is left.
    """
    tile_largest = tl.max(scores, 1)
    if tl.float16 == DOT_DTYPE:
        tile_largest -= 14.0
    new_largest = tl.maximum(largest, tile_largest)
    # A row that has seen no key yet has no maximum to subtract.
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(largest - origin)
    if len(denominator.shape) == 2:
        denominator = denominator * rescale[:, None] + weights
    else:
        denominator = denominator * rescale + tl.sum(weights, 1)
    return rounded(weights, DOT_DTYPE, INTERPRETED), rescale, new_largest, denominator


@triton.jit
def empty_denominator(BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PER_KEY: tl.constexpr):
    """A softmax's denominator before its first key: [rows], or [rows, keys] of a tile with `denominator_per_key`."""
    return tl.zeros([BLOCK_ROWS, BLOCK_KEYS] if PER_KEY else [BLOCK_ROWS], tl.float32)


@triton.jit
def whole_denominator(denominator):
    """[rows], behind the last key."""
    if len(denominator.shape) == 2:
        denominator = tl.sum(denominator, 1)
    return denominator


@triton.jit
def accumulate(scores, values, largest, denominator, sums, DOT_DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """One tile of keys: the scores' weights times the values into the sums; (largest, denominator, sums) anew."""
    weights, rescale, largest, denominator = softmax_step(scores, largest, denominator, DOT_DTYPE, INTERPRETED)
    return largest, denominator, dot(weights, values, sums * rescale[:, None], INTERPRETED)


@triton.jit
def halves_of_pairs(pairs, INTERPRETED: tl.constexpr):
    """(the even, the odd elements) in float16 of int16 `pairs` of e4m3 elements."""
    if INTERPRETED:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return even.to(tl.float16), odd.to(tl.float16)
    # Two pairs at a time, sorted by one permutation, for which compilers make six operations of the lines above.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def add_sink(sink_log2, largest, denominator):
    """A sink is one more logit without a value: the factor of the sums, and the new state."""
    new_largest = tl.maximum(largest, sink_log2)
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    rescale = tl.exp2(largest - origin)
    return rescale, new_largest, denominator * rescale + tl.exp2(sink_log2 - origin)


@triton.jit
def log2_sum(largest, denominator):
    """The LSE of a softmax's state, -inf without keys; a NaN stays one: it must not pass for a row without keys."""
    divisor = tl.where(denominator == 0, 1.0, denominator)
    return tl.where(denominator == 0, float("-inf"), largest + tl.log2(divisor))


@triton.jit
def store_rows(
    largest,
    denominator,
    sums,  # [rows, dims]
    sink_log2,  # None: no sink; [rows] or one for all
    bmm2_scale,
    out,  # pointers to each row's first element
    lse_log2,  # pointers to each row's, or None
    dims,
    row_exists,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the output rows, and their LSE, of a softmax that has seen all its keys but the sink."""
    if sink_log2 is not None:
        rescale, largest, denominator = add_sink(sink_log2, largest, denominator)
        sums = sums * rescale[:, None]
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = sums * scalar(bmm2_scale, BMM2_IS_TENSOR) / divisor[:, None]
    result = rounded(result, out.dtype.element_ty, INTERPRETED)
    tl.store(out[:, None] + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None:
        tl.store(lse_log2, log2_sum(largest, denominator), mask=row_exists)
