"""Arithmetic of the portable attention kernels: matrix products, rounding, and an online softmax in base 2 and float32.

The state of the softmax is (largest, denominator, sums): for each row the largest logit in base 2 (or a number near it), the
sum of the weights, and the weighted sum of the values. The weight of a key is 2 ** (logit - largest).
"""

import torch
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# True in Triton's interpreter, which `triton.jit` chooses when this module is imported.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


def dot_dtype(cache: torch.Tensor) -> tl.dtype:
    """Return the dtype of the operands of matrix products: K/V's, or float16 over an e4m3 cache. float16 holds every e4m3
    value, and SM89 and later convert two values to float16 by one instruction, but to bf16 by six.
    """
    return tl.bfloat16 if cache.dtype == torch.bfloat16 else tl.float16


@triton.jit
def fitting_power(q, DOT_DTYPE: tl.constexpr):
    """Return an exponent p for each row of a query, float32 [rows], such that the row divided by 2 ** p fits DOT_DTYPE. Only a
    bf16 query with float16 products, whose range is smaller, needs p; otherwise return a single 0 of shape [1].

    The largest element of a divided row is in [2 ** 14, 2 ** 15). Elements of at most 2 ** -39 of it may become 0 in float16.
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
    if q.dtype == tl.bfloat16 and tl.float16 == DOT_DTYPE:
        q = q.to(tl.float32) * tl.exp2(-power)[:, None]
    return q.to(DOT_DTYPE)


@triton.jit
def scalar(scale):
    """Return the value of `scale`, a kernel argument that is a number or a pointer to a number."""
    return tl.load(scale) if hasattr(scale, "dtype") and scale.dtype.is_ptr() else scale


@triton.jit
def logit_scale(scales):
    return scalar(scales[0]) * LOG2_E


@triton.jit
def row_scale(scale, power):
    return scale * tl.exp2(power)


@triton.jit
def logits_log2(products, scale):
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
    """Round float32 `x` to nearest even so that its last COUNT bits are zero."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (COUNT - 1)) - 1 + ((bits >> COUNT) & 1)
    return (bits & -(1 << COUNT)).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, sums):
    if INTERPRETED:  # Triton 3.7's interpreter would multiply the bit patterns of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)


@triton.jit
def softmax_step(scores, scale, largest, DOT_DTYPE: tl.constexpr):
    """Return (weights of a tile of keys, factor for the earlier sums, new `largest`) of an online softmax.

    The largest weight is 1, or 2 ** 14 for float16 products, where `largest` is 14 less than the largest logit. With a largest
    weight of 1, float16 would round weights below 2 ** -25 to 0, and the weights of very many such keys may have a large sum.

    Args:
        scores: float32 [rows, keys], logits in base 2 divided by `scale`; -inf where a row does not see a key.
        scale: positive, one number or one for each row.
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
    """Add a tile's weights to the softmax's denominator: [rows], or [rows, keys] with a part for each key."""
    if len(denominator.shape) == 2:
        return denominator * rescale[:, None] + weights
    else:  # noqa: RET505 - Triton compiles one of the two
        return denominator * rescale + tl.sum(weights, 1)


@triton.jit
def empty_denominator(BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PER_KEY: tl.constexpr):
    return tl.zeros([BLOCK_ROWS, BLOCK_KEYS] if PER_KEY else [BLOCK_ROWS], tl.float32)


@triton.jit
def whole_denominator(denominator):
    if len(denominator.shape) == 2:
        denominator = tl.sum(denominator, 1)
    return denominator


@triton.jit
def accumulate(scores, values, largest, denominator, sums, DOT_DTYPE: tl.constexpr):
    """Return the softmax state (largest, denominator, sums) after one more tile. `scores` [rows, keys]: logits in base 2."""
    weights, rescale, largest = softmax_step(scores, 1.0, largest, DOT_DTYPE)
    denominator = with_weights(denominator, rescale, weights)
    return largest, denominator, dot(rounded(weights, DOT_DTYPE), values, sums * rescale[:, None])


@triton.jit
def log2_sum(largest, denominator):
    """Return the LSE in base 2 of a softmax, [rows]; -inf for a row without keys, NaN if its state is NaN."""
    divisor = tl.where(denominator == 0, 1.0, denominator)
    return tl.where(denominator == 0, float("-inf"), largest + tl.log2(divisor))


@triton.jit
def store_rows(
    largest,  # [rows], like the denominator
    denominator,
    sums,  # [rows, dims]
    sink_log2,  # the sink's logit in base 2, [rows] or one for all rows; None: no sink
    bmm2_scale,
    out,  # [rows], pointers to the first element of each output row
    lse_log2,  # [rows], pointers to the LSE of each row; None: no LSE
    dims,  # indices of the written elements of an output row, [dims]
    row_exists,  # bool [rows], False where nothing is written
):
    """Write output rows and their LSE from the state of a softmax over all keys. The state does not include the sink."""
    rescale = 1.0
    if sink_log2 is not None:  # one more logit, without a value
        new_largest = tl.maximum(largest, sink_log2)
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        rescale = tl.exp2(largest - origin)
        largest, denominator = new_largest, denominator * rescale + tl.exp2(sink_log2 - origin)
    # One division for each row, not for each element: a program that reads a single tile of keys divides as often as it reads.
    factor = rescale * scalar(bmm2_scale) / tl.where(denominator == 0, 1.0, denominator)
    result = rounded(sums * factor[:, None], out.dtype.element_ty)
    tl.store(out[:, None] + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None:
        tl.store(lse_log2, log2_sum(largest, denominator), mask=row_exists)
