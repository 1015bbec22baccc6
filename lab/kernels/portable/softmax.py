"""Arithmetic of the portable attention kernels: matrix products, rounding, and a running softmax in base 2 and float32.

The state of a running softmax is (largest, denominator, sums): for each row the largest logit, the sum of the weights, and the
weighted sum of the values. `largest` is the origin of the weights' exponents.
"""

import torch
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# True in Triton's interpreter. `triton.jit` decides the same when these modules are imported.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


def dot_dtype(cache: torch.Tensor) -> tl.dtype:
    """Return the dtype of the matrix products: float16 over an e4m3 cache, else the dtype of K/V, which is also the query's.

    float16 holds every e4m3 value, and SM89 and later convert two e4m3 values by one instruction. A conversion to bf16 goes
    through float32 and takes six instructions, four of them at a quarter of the usual rate.
    """
    return tl.bfloat16 if cache.dtype == torch.bfloat16 else tl.float16


@triton.jit
def fitting_power(q, DOT_DTYPE: tl.constexpr):
    """Return float32 [rows], an exponent p for each query row such that the row divided by 2 ** p fits DOT_DTYPE.

    Only a bf16 query for float16 products needs it, because the range of bf16 exceeds that of float16 at both ends; else the
    result is zero, [1]. Rows are scaled so that their largest element is in [2 ** 14, 2 ** 15). An element that float16 then
    rounds to 0 is at most 2 ** -39 of the largest.
    """
    if q.dtype == tl.bfloat16 and tl.float16 == DOT_DTYPE:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        # A row of zeros or infinities gets a power whose inverse is finite.
        power = tl.minimum(tl.floor(tl.log2(tl.maximum(largest, 1e-26))) - 14.0, 113.0)
    else:
        power = tl.zeros([1], tl.float32)
    return power


@triton.jit
def fitted(q, power, DOT_DTYPE: tl.constexpr):
    """Return `q` in DOT_DTYPE. Rows that would not fit are divided by 2 ** `power`.

    A query that already has DOT_DTYPE is returned as it is: Triton keeps loaded tensors in shared memory, computed ones in
    registers.
    """
    if q.dtype == tl.bfloat16 and tl.float16 == DOT_DTYPE:
        q = q.to(tl.float32) * tl.exp2(-power)[:, None]
    return q.to(DOT_DTYPE)


@triton.jit
def scalar(scale):
    """Return the value of a scale, which is a number or a pointer to one. The interpreter's numbers have no dtype."""
    return tl.load(scale) if hasattr(scale, "dtype") and scale.dtype.is_ptr() else scale


@triton.jit
def logit_scale(scales):
    """Return the factor that turns products of queries and keys into logits in base 2: bmm1_scale * log2(e)."""
    return scalar(scales[0]) * LOG2_E


@triton.jit
def row_scale(scale, power):
    """Return the factor for the logits of rows that `fitted` has divided by 2 ** `power`. `scale` is from `logit_scale`."""
    return scale * tl.exp2(power)


@triton.jit
def logits_log2(products, scale):
    """Return float32 [rows, keys], logits in base 2: a tile's products times the `row_scale` of each row."""
    return products * scale[:, None]


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return float32 `x` in DTYPE, rounded to nearest even. For e4m3, values beyond ±448 become ±448. NaN stays NaN."""
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
    """Return float32 `x` rounded to nearest even such that its last COUNT bits are zero."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (COUNT - 1)) - 1 + ((bits >> COUNT) & 1)
    return (bits & -(1 << COUNT)).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, sums):
    """Return `sums + a @ b` with float32 sums."""
    if INTERPRETED:  # Triton 3.7's interpreter would multiply the bit patterns of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)


@triton.jit
def softmax_step(scores, scale, largest, DOT_DTYPE: tl.constexpr):
    """Return one step of a running softmax in base 2: (weights for DOT_DTYPE, factor of earlier sums, largest).

    The largest weight is 1. In float16 it is 2 ** 14, and `largest` is 14 less than the largest score: float16 has no value
    below 2 ** -24, and if one key has nearly all the weight, a hundred thousand other keys may share the rest.

    Args:
        scores: float32 [rows, keys], in base 2 after a multiplication by `scale`; -inf where a row does not see a key.
        scale: 1, a positive number, or a positive number for each row. One instruction multiplies by it and subtracts the
            largest.
        largest: float32 [rows], -inf before the first key.
    """
    tile_largest = tl.max(scores, 1) * scale
    if tl.float16 == DOT_DTYPE:
        tile_largest -= 14.0
    new_largest = tl.maximum(largest, tile_largest)
    # A row that has seen no key yet has no maximum to subtract.
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    if hasattr(scale, "shape"):  # noqa: SIM102 - a float, which Triton would ask for its shape, too
        if len(scale.shape) == 1:
            scale = scale[:, None]
    return tl.exp2(scores * scale - origin[:, None]), tl.exp2(largest - origin), new_largest


@triton.jit
def with_weights(denominator, rescale, weights):
    """Return the denominator of a running softmax after one more tile of keys: `denominator * rescale` plus the tile's weights.

    A denominator [rows, keys] adds weights key by key, a denominator [rows] adds each row's sum. The first denominator is the
    result of `empty_denominator`.
    """
    if len(denominator.shape) == 2:
        return denominator * rescale[:, None] + weights
    else:  # noqa: RET505 - Triton compiles one of the two
        return denominator * rescale + tl.sum(weights, 1)


@triton.jit
def empty_denominator(BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PER_KEY: tl.constexpr):
    """Return the zero denominator of a running softmax before its first key: [rows], or [rows, keys] if PER_KEY.

    PER_KEY is `ProgramTile.denominator_per_key`.
    """
    return tl.zeros([BLOCK_ROWS, BLOCK_KEYS] if PER_KEY else [BLOCK_ROWS], tl.float32)


@triton.jit
def whole_denominator(denominator):
    """Return a running softmax's denominator as one number for each row, [rows]."""
    if len(denominator.shape) == 2:
        denominator = tl.sum(denominator, 1)
    return denominator


@triton.jit
def accumulate(scores, values, largest, denominator, sums, DOT_DTYPE: tl.constexpr):
    """Add a tile of keys, with logits `scores` in base 2, to a running softmax, and return (largest, denominator, sums)."""
    weights, rescale, largest = softmax_step(scores, 1.0, largest, DOT_DTYPE)
    denominator = with_weights(denominator, rescale, weights)
    return largest, denominator, dot(rounded(weights, DOT_DTYPE), values, sums * rescale[:, None])


@triton.jit
def log2_sum(largest, denominator):
    """Return the LSE in base 2 of a running softmax, [rows]; -inf for a row without keys.

    NaN stays NaN, so that it is not taken for a row without keys.
    """
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
):
    """Write output rows and their LSE from the state of a softmax over all keys, after adding the sink's weight."""
    rescale = 1.0
    if sink_log2 is not None:  # one more logit, without a value
        new_largest = tl.maximum(largest, sink_log2)
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        rescale = tl.exp2(largest - origin)
        largest, denominator = new_largest, denominator * rescale + tl.exp2(sink_log2 - origin)
    # One division and one factor for each row, none for its elements: a block of few keys ends as often as it reads a tile.
    factor = rescale * scalar(bmm2_scale) / tl.where(denominator == 0, 1.0, denominator)
    result = rounded(sums * factor[:, None], out.dtype.element_ty)
    tl.store(out[:, None] + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None:
        tl.store(lse_log2, log2_sum(largest, denominator), mask=row_exists)
