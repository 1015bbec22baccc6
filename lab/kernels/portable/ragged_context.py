"""FlashInfer's ragged context call in Triton: any NVIDIA GPU that Triton compiles for, and a CPU in its interpreter.

MLA's prefill before absorption: keys are wider than values, 192 and 128, and 192 is no power of two. Q and K are therefore
loaded as two tiles, of 128 and of 64, and multiplied as two products into one sum: a tile of 256 with a quarter of it zero
would make a third more products of them and hold a third more shared memory. One program per block of query rows and head;
keys that every row of the block sees are walked without a mask, the rest with one, those that none sees not at all.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from lab.calls import takes
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall, check_ragged_values
from lab.gpus import Capability, capability_of, family_that_runs
from lab.kernels.portable.arithmetic import (
    LOG2_E,
    Tile,
    accumulate,
    dot,
    dot_dtype,
    fitted,
    fitting_power,
    has_rows,
    scalar,
    store_rows,
)
from lab.kernels.portable.triton_call import Launch, TritonCall
from lab.kernels.support import refuse_unsupported, triton_interprets
from lab.kernels.support.portable import PORTABLE_RAGGED, split_head_dim


@takes(RaggedContextCall)
def trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> Any:
    """Attention of each request's rows over K/V that lie end to end: MLA's prefill before absorption, new tokens or a chunk.

    Parameters, shapes, dtypes and errors are `lab.calls.RaggedContextCall`'s; what this kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`. On a GPU, lengths are not read:
    `lab.calls.check_ragged_values` checks them on request. Products are in the query's dtype, fp16 over e4m3, and sums
    in float32; `workspace_buffer` is not used. Rows behind the last request's are left as they are, or undefined.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    return _prepare(call.problem())()


@takes(RaggedContextCall)
def prepare_trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> TritonCall:
    """The same call, ready to be made any number of times. It raises what its checks raise, and launches no attention."""
    return _prepare(call.problem())


def _prepare(problem: RaggedAttention) -> TritonCall:
    out, lse_log2 = problem.results()
    launches: list[Launch] = []
    if has_rows(problem):
        refuse_unsupported(PORTABLE_RAGGED, problem)
        launches.append(_launch(problem, out, lse_log2))
    check = partial(check_ragged_values, problem)
    return TritonCall(problem.query.device, check, launches, problem.returned(out, lse_log2))


def choose_ragged_tile(max_q_len: int, head_dim: int, v_head_dim: int, capability: Capability | None) -> Tile:
    """The tile for requests of at most `max_q_len` rows.

    A prefill is bound by its products, so that rows are many, 128 of them as two warp groups of Hopper's asynchronous
    products. What Triton 3.7.1's compiler makes of bf16 for SM90, at 192 and 128 (compiled only: no time measured):

    * 128 rows, 64 keys, 3 stages: 196 registers, 172 kB of the 227 KiB, nothing spilled.
    * 128 rows, 128 keys, 2 stages: 255 registers and some spilled, 213 kB.

    At 256 and 256 it is 64 rows and 2 stages, 164 kB; 128 rows would spill. GPUs with less shared memory, 99 KiB, or
    without asynchronous products get 64 rows and 32 keys: 49 kB and 185 registers on SM89.

    Args:
        max_q_len: most rows of one request; the tile is one of four, so that lengths compile little anew.
        head_dim, v_head_dim: of keys and of values.
        capability: (major, minor) of the GPU; the interpreter, None, runs SM90's.
    """
    roomy = family_that_runs(capability).has_large_shared_memory
    wide = head_dim + v_head_dim > 320
    rows = min(max(16, triton.next_power_of_2(max_q_len)), 128 if roomy and not wide else 64)
    num_warps = 8 if rows == 128 or (roomy and wide and rows == 64) else 4
    return Tile(rows, keys=64 if roomy else 32, num_warps=num_warps, num_stages=3 if roomy and not wide else 2)


def _launch(problem: RaggedAttention, out: torch.Tensor, lse_log2: torch.Tensor | None) -> Launch:
    capability = capability_of(problem.query.device)
    tile = choose_ragged_tile(problem.max_q_len, problem.head_dim, problem.v_head_dim, capability)
    first, rest = split_head_dim(problem.head_dim)
    grid = (triton.cdiv(problem.max_q_len, tile.rows), problem.num_qo_heads, problem.batch_size)
    return Launch(
        _ragged_kernel,
        grid,
        problem.query,
        problem.key,
        problem.value,
        problem.cu_seqlens_q,
        problem.cu_seqlens_kv,
        problem.sinks,
        problem.bmm1_scale,
        problem.bmm2_scale,
        out,
        lse_log2,
        problem.window_left,
        *problem.query.stride()[:2],
        *problem.key.stride()[:2],
        *problem.value.stride()[:2],
        *((0, 0) if lse_log2 is None else lse_log2.stride()),
        GROUP=problem.num_qo_heads // problem.num_kv_heads,
        FIRST_DIMS=first,
        REST_DIMS=rest,
        V_DIMS=problem.v_head_dim,
        CAUSAL=problem.causal,
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        DOT_DTYPE=dot_dtype(problem.key),
        BMM1_IS_TENSOR=isinstance(problem.bmm1_scale, torch.Tensor),
        BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
        INTERPRETED=triton_interprets(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# The window varies from layer to layer, and must not compile again.
@triton.jit(do_not_specialize=["window_left"])
def _ragged_kernel(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_kv,
    sinks,  # None: no sink
    bmm1_scale,
    bmm2_scale,
    out,
    lse_log2,  # None: not wanted
    window_left,
    query_row_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    lse_row_stride,
    lse_head_stride,
    GROUP: tl.constexpr,
    FIRST_DIMS: tl.constexpr,
    REST_DIMS: tl.constexpr,  # 0: head_dim is a power of two
    V_DIMS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BMM1_IS_TENSOR: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One block of query rows of one head of one request, over all keys that any of them sees."""
    # Causal blocks see the more keys the later they are: the longest start first, so that none is left alone at the end.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    num_heads = tl.num_programs(1)
    # Times a stride, these may exceed 32 bits.
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)

    q_start = tl.load(cu_seqlens_q + request)
    q_len = tl.load(cu_seqlens_q + request + 1) - q_start
    first_token = q_block * BLOCK_ROWS
    if first_token >= q_len:
        return
    kv_start = tl.load(cu_seqlens_kv + request)
    kv_len = tl.load(cu_seqlens_kv + request + 1) - kv_start

    token = first_token + tl.arange(0, BLOCK_ROWS)
    row_exists = token < q_len
    row = (q_start + token).to(tl.int64)
    first_position = kv_len - q_len + first_token  # negative where a request has fewer keys than rows
    position = first_position + tl.arange(0, BLOCK_ROWS)

    first_dims = tl.arange(0, FIRST_DIMS)
    v_dims = tl.arange(0, V_DIMS)
    q_row = query + row * query_row_stride + head * query_head_stride
    q_first = tl.load(q_row[:, None] + first_dims[None, :], mask=row_exists[:, None], other=0.0)
    power = fitting_power(q_first, DOT_DTYPE)
    q_rest = q_first  # where there is no rest, nobody looks at it
    if REST_DIMS > 0:
        rest_dims = FIRST_DIMS + tl.arange(0, REST_DIMS)
        q_rest = tl.load(q_row[:, None] + rest_dims[None, :], mask=row_exists[:, None], other=0.0)
        power = tl.maximum(power, fitting_power(q_rest, DOT_DTYPE))
        q_rest = fitted(q_rest, power, DOT_DTYPE)
    q_first = fitted(q_first, power, DOT_DTYPE)
    row_scale_log2 = scalar(bmm1_scale, BMM1_IS_TENSOR) * LOG2_E * tl.exp2(power)

    # The keys that some row of the block sees, and of those the leading whole tiles that every row sees.
    key_start = 0
    key_end = kv_len
    seen_by_all = kv_len
    if CAUSAL:
        last_token = tl.minimum(first_token + BLOCK_ROWS, q_len) - 1
        key_end = tl.minimum(kv_len, tl.maximum(kv_len - q_len + last_token + 1, 0))
        seen_by_all = tl.maximum(first_position + 1, 0)
        if window_left >= 0:
            key_start = tl.maximum(first_position - window_left, 0) // BLOCK_KEYS * BLOCK_KEYS
            seen_by_all = key_start
    unmasked_end = tl.maximum(seen_by_all // BLOCK_KEYS * BLOCK_KEYS, key_start)

    key_head = key + kv_start.to(tl.int64) * key_token_stride + head // GROUP * key_head_stride
    value_head = value + kv_start.to(tl.int64) * value_token_stride + head // GROUP * value_head_stride
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, V_DIMS], tl.float32)
    in_tile = tl.arange(0, BLOCK_KEYS)
    for MASKED in tl.static_range(2):  # the loop twice: without a mask, and with one
        for start in range(unmasked_end if MASKED else key_start, key_end if MASKED else unmasked_end, BLOCK_KEYS):
            token_key = start + in_tile
            exists = (token_key < key_end)[:, None] if MASKED else None
            other = 0.0 if MASKED else None
            k_tile = key_head + (token_key.to(tl.int64) * key_token_stride)[:, None]
            v_tile = value_head + (token_key.to(tl.int64) * value_token_stride)[:, None]

            scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
            if REST_DIMS > 0:
                k_rest = tl.load(k_tile + (FIRST_DIMS + tl.arange(0, REST_DIMS))[None, :], mask=exists, other=other)
                scores = dot(q_rest, tl.trans(k_rest.to(DOT_DTYPE)), scores, INTERPRETED)
            k_first = tl.load(k_tile + first_dims[None, :], mask=exists, other=other)
            scores = dot(q_first, tl.trans(k_first.to(DOT_DTYPE)), scores, INTERPRETED) * row_scale_log2[:, None]
            if MASKED:
                # A row that does not exist has zeros for a query; what it sees is stored nowhere.
                visible = (token_key < key_end)[None, :]
                if CAUSAL:
                    visible = visible & (token_key[None, :] <= position[:, None])
                    visible = visible & ((window_left < 0) | (token_key[None, :] >= position[:, None] - window_left))
                scores = tl.where(visible, scores, float("-inf"))
            v = tl.load(v_tile + v_dims[None, :], mask=exists, other=other).to(DOT_DTYPE)
            largest, denominator, sums = accumulate(scores, v, largest, denominator, sums, DOT_DTYPE, INTERPRETED)

    store_rows(
        largest,
        denominator,
        sums,
        None if sinks is None else tl.load(sinks + head) * LOG2_E,
        bmm2_scale,
        out + (row * num_heads + head) * V_DIMS,
        None if lse_log2 is None else lse_log2 + row * lse_row_stride + head * lse_head_stride,
        v_dims,
        row_exists,
        BMM2_IS_TENSOR,
        INTERPRETED,
    )
