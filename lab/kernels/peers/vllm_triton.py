"""vLLM's Triton attention, `unified_attention`, under the names of FlashInfer's decode and context calls.

The installed vLLM is imported at the first call; the lab is written for 0.33.0. A call is one launch. For few requests with few
rows vLLM splits the keys into 16 segments, and a call is two launches. vLLM's `TritonAttentionMetadataBuilder` has the
thresholds (`vllm/v1/attention/backends/triton_attn.py`).
"""

from functools import partial
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import E4M3, PagedAttention
from lab.kernels.flashinfer_call import PreparedCall, entries, installed_function
from lab.kernels.support.peers import VLLM_TRITON

WRITTEN_FOR = "0.33.0"
UNIFIED = "vllm.v1.attention.ops.triton_unified_attention.unified_attention"
QUANT_MODE = "vllm.v1.kv_cache_interface.KVQuantMode"
# The builder's NUM_PAR_SOFTMAX_SEGMENTS and MIN_LAUNCH_GRID_SIZE_2D, and the kernel's MAX_3D_QUERY_LEN.
SEGMENTS = 16
LEAST_GRID = 128
MOST_ROWS_OF_SEGMENTS = 8


def _prepare(call: DecodeCall | ContextCall, problem: PagedAttention) -> PreparedCall:
    """Return a function that runs a decode or context call by vLLM's kernel. `lab.calls.DecodeCall` and `ContextCall` document
    shapes and errors. Raises NotImplementedError with the reason if the kernel does not support the call, and TypeError if the
    installed function takes other arguments. `workspace_buffer` is not used.
    """
    out, _ = problem.results()
    offsets = problem.cu_seqlens_q
    if offsets is None:
        rows = torch.arange(problem.batch_size + 1, dtype=torch.int32, device=problem.query.device)
        offsets = rows * problem.max_q_len
    number = partial(torch.full, (1,), dtype=torch.float32, device=problem.query.device)
    quantised = problem.kv_dtype == E4M3
    mode: Any = installed_function(__name__, QUANT_MODE, WRITTEN_FOR)
    arguments: dict[str, Any] = {
        "q": problem.query,
        "k": problem.k_cache.transpose(1, 2),
        "v": problem.v_cache.transpose(1, 2),
        "out": out,
        "cu_seqlens_q": offsets,
        "max_seqlen_q": problem.max_q_len,
        "seqused_k": problem.seq_lens.view(torch.int32),
        "max_seqlen_k": problem.max_kv_len,
        "softmax_scale": float(problem.bmm1_scale),
        "causal": problem.causal,
        "window_size": (problem.window_left, 0 if problem.causal else -1),
        "block_table": problem.k_block_tables,
        "softcap": 0.0,
        "q_descale": None,
        # The scale of K is in bmm1_scale.
        "k_descale": number(1.0) if quantised else None,
        "v_descale": number(float(problem.bmm2_scale)) if quantised else None,
        "sinks": problem.sinks,
        "kv_quant_mode": mode.FP8_PER_TENSOR if quantised else mode.NONE,
    }
    threshold = LEAST_GRID // problem.num_kv_heads
    if problem.max_q_len <= MOST_ROWS_OF_SEGMENTS and problem.batch_size <= threshold:
        shape = (problem.num_rows, problem.num_qo_heads, SEGMENTS)
        head_dim = 1 << (problem.head_dim - 1).bit_length()
        new = partial(torch.empty, dtype=torch.float32, device=problem.query.device)
        arguments |= {
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": new((*shape, head_dim)),
            "softmax_segm_max": new(shape),
            "softmax_segm_expsum": new(shape),
        }
    attention = installed_function(__name__, UNIFIED, WRITTEN_FOR, frozenset(arguments))
    return PreparedCall(attention, arguments, returned=out)


prepare_trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache = entries(
    "prepare", DecodeCall, _prepare, VLLM_TRITON
)
prepare_trtllm_batch_context_with_kv_cache, trtllm_batch_context_with_kv_cache = entries(
    "prepare", ContextCall, _prepare, VLLM_TRITON
)
