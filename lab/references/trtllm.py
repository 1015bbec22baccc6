"""FlashInfer's TRT-LLM attention functions over a paged cache in float64, with the same names and parameters."""

import math
from typing import Any

from lab.calls import ContextCall, DecodeCall, takes
from lab.calls.mla_decode import MLADecodeCall
from lab.references.paged_attention import paged_attention


@takes(DecodeCall)
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Compute attention of the last query tokens of each request over its paged K/V: decode, verify, draft extend.

    `lab.calls.DecodeCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's. In addition, `out_dtype` may
    be float32 or float64, so that the result is not rounded. The host reads lengths and tables.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.

    Raises:
        TypeError, ValueError, NotImplementedError: `DecodeCall.problem` or `PagedAttention.check_values` refuses the call,
            before any arithmetic.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Compute attention of any number of newest query tokens of each request over its paged K/V: extend, prefill.

    `lab.calls.ContextCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's. For the rest see
    `trtllm_batch_decode_with_kv_cache`.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(MLADecodeCall)
def trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> Any:
    """Compute latent attention (MLA) of the last query tokens of each request over its paged cache, after absorption.

    `lab.calls.MLADecodeCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's. In addition, `out` may be
    float64, so that the result is not rounded, and latent vector, rotary part and page may have any size. The host reads
    lengths and tables.

    Returns:
        out, the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse`
        (out, lse), lse in base 2 unless `return_lse_base` is "basee".

    Raises:
        TypeError, ValueError, NotImplementedError: `MLADecodeCall.problem` or `PagedAttention.check_values` refuses the call,
            before any arithmetic.
    """
    out, lse = paged_attention(call.problem())
    if lse is not None and call.return_lse_base == "basee":
        lse *= math.log(2.0)
    return call.returned(out, lse)
