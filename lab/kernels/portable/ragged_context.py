"""FlashInfer's ragged context call in Triton: any NVIDIA GPU that Triton compiles for, and a CPU in its interpreter.

Keys have 192 elements, no power of two: Q and K are loaded as tiles of 128 and of 64 elements, because one tile of 256 would
need a third more products and shared memory. Each block of query rows of a head has a program.
"""

import torch
import triton
import triton.language as tl

from lab.calls import takes
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.gpus import capability_of
from lab.kernels.portable.softmax import (
    LOG2_E,
    accumulate,
    dot,
    dot_dtype,
    empty_denominator,
    fitted,
    fitting_power,
    logit_scale,
    logits_log2,
    row_scale,
    store_rows,
)
from lab.kernels.portable.tile_choices import choose_ragged_tile
from lab.kernels.portable.triton_call import TritonCall, TritonLaunch, prepared
from lab.kernels.support.portable import PORTABLE_RAGGED, split_head_dim


@takes(RaggedContextCall)
def prepare_trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> TritonCall:
    """Return a prepared call: MLA's prefill before absorption, over unpaged K/V of new tokens or of a chunk of a prefix.

    `lab.calls.RaggedContextCall` documents parameters, shapes, dtypes and errors. Raises NotImplementedError with the reason if
    the kernel does not support the call (`lab.kernels.support.why_not`). On a GPU, lengths are not read: call
    `RaggedAttention.check_values` to check them. Products are in the query's dtype, in fp16 over e4m3; sums are in float32.
    `workspace_buffer` is not used. Output rows after the last request's rows are not written. A run returns out [num_rows,
    num_qo_heads, v_head_dim]; with `return_lse` (out, lse), lse in base 2.
    """
    problem = call.problem()
    return prepared(PORTABLE_RAGGED, problem, lambda *results: [_launch(problem, *results)])


def _launch(problem: RaggedAttention, out: torch.Tensor, lse_log2: torch.Tensor | None) -> TritonLaunch:
    capability = capability_of(problem.query.device)
    tile = choose_ragged_tile(problem.max_q_len, problem.head_dim, problem.v_head_dim, capability)
    first, rest = split_head_dim(problem.head_dim)
    grid = (triton.cdiv(problem.max_q_len, tile.rows), problem.num_qo_heads, problem.batch_size)
    return TritonLaunch(
        _ragged_kernel,
        grid,
        problem.query,
        problem.key,
        problem.value,
        problem.cu_seqlens_q,
        problem.cu_seqlens_kv,
        problem.sinks,
        problem.scales,
        (out, lse_log2),
        problem.window_left,
        problem.query.stride()[:2],
        problem.key.stride()[:2],
        problem.value.stride()[:2],
        (0, 0) if lse_log2 is None else lse_log2.stride(),
        GROUP=problem.group,
        FIRST_DIMS=first,
        REST_DIMS=rest,
        V_DIMS=problem.v_head_dim,
        CAUSAL=problem.causal,
        TILE=tile,
        DOT_DTYPE=dot_dtype(problem.key),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# The window differs from layer to layer, and Triton must not compile the kernel again for it.
@triton.jit(do_not_specialize=["window_left"])
def _ragged_kernel(
    query,  # [num_rows, query heads, head_dim]
    key,  # [number of keys, K/V heads, head_dim]
    value,  # [number of keys, K/V heads, V_DIMS]
    cu_seqlens_q,
    cu_seqlens_kv,
    sinks,  # None: no sink
    scales,  # (bmm1_scale, bmm2_scale), each a number or a pointer
    results,  # (out, lse_log2 or None)
    window_left,  # -1: no window
    query_strides,  # (of rows, of heads), like the next three
    key_strides,
    value_strides,
    lse_strides,
    GROUP: tl.constexpr,  # query heads per K/V head
    FIRST_DIMS: tl.constexpr,  # elements of Q and K in the first of two tiles
    REST_DIMS: tl.constexpr,  # elements in the second tile; 0: head_dim is a power of two
    V_DIMS: tl.constexpr,  # elements of V and of the output
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,  # `ProgramTile`
    DOT_DTYPE: tl.constexpr,  # dtype of the operands of products
):
    """Compute attention of one block of query rows of one head and request, over the keys that some row of the block sees."""
    BLOCK_ROWS: tl.constexpr = TILE.rows
    BLOCK_KEYS: tl.constexpr = TILE.keys
    # A later causal block sees more keys. The longest blocks start first, so that no long block runs alone at the end.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    num_heads = tl.num_programs(1)
    # int64, because a product with a stride may exceed 32 bits.
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
    first_position = kv_len - q_len + first_token  # negative if the request has fewer keys than rows
    position = first_position + tl.arange(0, BLOCK_ROWS)

    first_dims = tl.arange(0, FIRST_DIMS)
    v_dims = tl.arange(0, V_DIMS)
    q_row = query + row * query_strides[0] + head * query_strides[1]
    q_first = tl.load(q_row[:, None] + first_dims[None, :], mask=row_exists[:, None], other=0.0)
    power = fitting_power(q_first, DOT_DTYPE)
    q_rest = q_first  # not used where there is no rest
    if REST_DIMS > 0:
        rest_dims = FIRST_DIMS + tl.arange(0, REST_DIMS)
        q_rest = tl.load(q_row[:, None] + rest_dims[None, :], mask=row_exists[:, None], other=0.0)
        power = tl.maximum(power, fitting_power(q_rest, DOT_DTYPE))
        q_rest = fitted(q_rest, power, DOT_DTYPE)
    q_first = fitted(q_first, power, DOT_DTYPE)
    scale_of_rows = row_scale(logit_scale(scales), power)

    # The keys that some row of the block sees, and the leading tiles in which every row sees every key.
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

    key_head = key + kv_start.to(tl.int64) * key_strides[0] + head // GROUP * key_strides[1]
    value_head = value + kv_start.to(tl.int64) * value_strides[0] + head // GROUP * value_strides[1]
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = empty_denominator(BLOCK_ROWS, BLOCK_KEYS, TILE.denominator_per_key)
    sums = tl.zeros([BLOCK_ROWS, V_DIMS], tl.float32)
    in_tile = tl.arange(0, BLOCK_KEYS)
    for MASKED in tl.static_range(2):  # the loop twice: without a mask, and with one
        for start in range(unmasked_end if MASKED else key_start, key_end if MASKED else unmasked_end, BLOCK_KEYS):
            token_key = start + in_tile
            exists = (token_key < key_end)[:, None] if MASKED else None
            other = 0.0 if MASKED else None
            k_tile = key_head + (token_key.to(tl.int64) * key_strides[0])[:, None]
            v_tile = value_head + (token_key.to(tl.int64) * value_strides[0])[:, None]

            scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
            if REST_DIMS > 0:
                k_rest = tl.load(k_tile + (FIRST_DIMS + tl.arange(0, REST_DIMS))[None, :], mask=exists, other=other)
                scores = dot(q_rest, tl.trans(k_rest.to(DOT_DTYPE)), scores)
            k_first = tl.load(k_tile + first_dims[None, :], mask=exists, other=other)
            scores = logits_log2(dot(q_first, tl.trans(k_first.to(DOT_DTYPE)), scores), scale_of_rows)
            if MASKED:
                # A row that does not exist has a query of zeros, and its result is not stored.
                visible = (token_key < key_end)[None, :]
                if CAUSAL:
                    visible = visible & (token_key[None, :] <= position[:, None])
                    visible = visible & ((window_left < 0) | (token_key[None, :] >= position[:, None] - window_left))
                scores = tl.where(visible, scores, float("-inf"))
            v = tl.load(v_tile + v_dims[None, :], mask=exists, other=other).to(DOT_DTYPE)
            largest, denominator, sums = accumulate(scores, v, largest, denominator, sums, DOT_DTYPE)

    store_rows(
        largest,
        denominator,
        sums,
        None if sinks is None else tl.load(sinks + head) * LOG2_E,
        scales[1],
        results[0] + (row * num_heads + head) * V_DIMS,
        None if results[1] is None else results[1] + row * lse_strides[0] + head * lse_strides[1],
        v_dims,
        row_exists,
    )
