"""What the portable attention kernels share: how keys are split, how partial results merge, and Triton arithmetic.

Both kernels keep a running softmax in base 2 and float32 (`softmax_step`), cut long requests into pieces whose number is
decided on the device (`own_share`), and merge the pieces' results with one kernel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lab.kernels.support import triton_interprets
from lab.problem import PagedAttention
from lab.ragged_call import RaggedAttention

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

# Programs per multiprocessor that the split of long requests aims at: enough to hide latency, few enough to merge cheaply.
PROGRAMS_PER_MULTIPROCESSOR = 2
MAX_SPLITS = 64
# Pieces per request that a full GPU still gets, so that long requests can be cut; and how many times the fair share of
# pieces one request may have, which bounds the empty programs of the others. On an H200, decode of 64 requests with a real
# trace's lengths took 2,630 µs without a cut, 1,004 µs with 2 pieces per request and 958 µs with 4 (963 µs is the floor).
PIECES_PER_REQUEST = 4
UNEVENNESS = 16
# A CPU has no multiprocessors; a small stand-in lets the interpreter run the split path too.
INTERPRETED_MULTIPROCESSORS = 2
# Lengths that a program reads at a time to find its request's share, whatever the batch: one per thread of 4 warps.
BLOCK_REQUESTS: tl.constexpr = tl.constexpr(128)
# Elements of head_dim that one program merges: 64 splits of them are 8,192 floats.
MERGED_DIMS = 128


@dataclass(frozen=True)
class Tile:
    """Shape of one program: packed query rows, keys per step, and Triton's launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Splits:
    """How the keys of a batch are cut: `total` pieces shared out by length, at most `most` for one request."""

    total: int
    most: int


def choose_splits(
    batch_size: int, q_blocks: int, num_kv_heads: int, num_key_steps: int, num_multiprocessors: int
) -> Splits:
    """The pieces that a call's keys are cut into. Who gets how many is decided on the device, where the lengths are.

    A call whose queries fill one tile per K/V head (decode, verify, draft extend) may cut a request that is longer than
    others into many pieces even when the batch alone fills the GPU; a longer prompt's tiles have filled it already.

    Args:
        batch_size: requests.
        q_blocks, num_kv_heads: their product is the number of programs per request without a cut.
        num_key_steps: most steps of one program over the keys, from the host's bound of the lengths.
        num_multiprocessors: of the device.
    """
    total = -(-PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // (q_blocks * num_kv_heads))
    if q_blocks == 1:
        total = max(total, PIECES_PER_REQUEST * batch_size)
    fair_share = -(-total // batch_size)
    most = UNEVENNESS * fair_share if q_blocks == 1 else fair_share
    return Splits(total, max(1, min(most, num_key_steps, MAX_SPLITS)))


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_rows(problem: PagedAttention | RaggedAttention) -> bool:
    """Whether any request may have a query row; rows behind the last request's are padding, which nobody computes."""
    return min(problem.num_rows, problem.batch_size, problem.max_q_len) > 0


@dataclass(frozen=True)
class PartialResults:
    """Results of each piece of the keys, normalised, so that the merge needs their log-sum-exp alone.

    Attributes:
        out: float32 [num_splits, num_rows, num_qo_heads, v_head_dim].
        lse_log2: float32 [num_splits, num_rows, num_qo_heads]; -inf where a piece has no key, and its `out` no value.
    """

    out: torch.Tensor
    lse_log2: torch.Tensor

    @classmethod
    def empty(cls, problem: PagedAttention, num_splits: int) -> "PartialResults":
        shape = (num_splits, problem.num_rows, problem.num_qo_heads)
        device = problem.query.device
        return cls(
            torch.empty((*shape, problem.v_head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def merge(self, problem: PagedAttention, out: torch.Tensor, lse_log2: torch.Tensor | None) -> None:
        """Write the output and, unless it is None, the LSE."""
        num_splits, head_dim = self.out.shape[0], problem.v_head_dim
        block_dims = min(head_dim, MERGED_DIMS)
        merge_kernel[(problem.num_rows, problem.num_qo_heads, head_dim // block_dims)](
            self.out,
            self.lse_log2,
            problem.sinks,
            problem.bmm2_scale,
            out,
            lse_log2,
            problem.num_rows,
            num_splits,
            problem.num_qo_heads,
            HEAD_DIM=head_dim,
            BLOCK_DIMS=block_dims,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
            INTERPRETED=triton_interprets(),
            num_warps=1,
        )


def dot_dtype(query: torch.Tensor) -> tl.dtype:
    """What products are made in: the query's dtype, bf16 for e4m3."""
    return tl.float16 if query.dtype == torch.float16 else tl.bfloat16


@triton.jit
def scalar(scale, IS_TENSOR: tl.constexpr):
    """A scale given as a number, or as a tensor of one element."""
    return tl.load(scale) if IS_TENSOR else scale


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
def own_share(seq_lens, kv_len, most_keys, batch_size, total_splits, num_splits):
    """Pieces of a request of `kv_len` keys: the share of `total_splits` that it has of the batch's keys, 1 … num_splits.

    No row sees more than `most_keys` keys of a request.
    """
    lengths = tl.zeros([BLOCK_REQUESTS], tl.int64)
    for start in range(0, batch_size, BLOCK_REQUESTS):
        requests = start + tl.arange(0, BLOCK_REQUESTS)
        length = tl.load(seq_lens + requests, mask=requests < batch_size, other=0).to(tl.int64)
        lengths += tl.minimum(length, most_keys)
    all_keys = tl.maximum(tl.sum(lengths, 0), 1)
    share = tl.minimum(kv_len.to(tl.int64), most_keys)
    own_splits = ((share * total_splits + all_keys // 2) // all_keys).to(tl.int32)
    return tl.minimum(tl.maximum(own_splits, 1), num_splits)


@triton.jit
def softmax_step(scores, largest, denominator):
    """One step of a running softmax in base 2: weights of these scores, the factor of earlier sums, the new state."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet has no maximum to subtract.
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(largest - origin)
    return weights, rescale, new_largest, denominator * rescale + tl.sum(weights, 1)


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


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_qo_heads"])
def merge_kernel(
    partial_out,  # float32 [num_splits, num_rows, heads, head_dim]
    partial_lse_log2,  # float32 [num_splits, num_rows, heads]
    sinks,
    bmm2_scale,
    out,
    lse_log2,
    num_rows,
    num_splits,
    num_qo_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge BLOCK_DIMS of one row and head: the splits' outputs weighted by 2 ** their LSE, the sink counted once."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.program_id(2) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    exists = splits < num_splits
    row_heads = (splits * num_rows + row) * num_qo_heads + head
    lses = tl.load(partial_lse_log2 + row_heads, mask=exists, other=float("-inf"))
    largest = tl.max(lses, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        largest = tl.maximum(largest, sink)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(lses - origin)
    denominator = tl.sum(weights, 0)
    if sinks is not None:
        denominator += tl.exp2(sink - origin)
    # A split without keys has written no output.
    has_keys = (lses != float("-inf"))[:, None]
    parts = tl.load(partial_out + row_heads[:, None] * HEAD_DIM + dims[None, :], mask=has_keys, other=0.0)
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = tl.sum(parts * weights[:, None], 0) * scalar(bmm2_scale, BMM2_IS_TENSOR) / divisor
    result = rounded(result, out.dtype.element_ty, INTERPRETED)
    tl.store(out + (row * num_qo_heads + head) * HEAD_DIM + dims, result)
    if lse_log2 is not None and tl.program_id(2) == 0:
        tl.store(lse_log2 + row * num_qo_heads + head, log2_sum(largest, denominator))
