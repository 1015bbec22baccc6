"""FlashInfer's TRT-LLM attention functions in float64: same names, same parameters, on a CPU or a GPU."""

import math
from typing import Any

from lab.calls import ContextCall, DecodeCall, takes
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.ragged_context import RaggedContextCall
from lab.references.paged_attention import paged_attention
from lab.references.ragged_attention import ragged_attention


@takes(DecodeCall)
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Compute attention of the last query tokens of each request over its paged K/V: decode, verify, draft extend.

    Parameters, shapes and dtypes are `lab.calls.DecodeCall`'s, which are FlashInfer 0.7.2's. Beyond those, `out_dtype`
    may be float32 or float64, so that an oracle is not rounded. Reads lengths and tables on the host.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.

    Raises:
        TypeError, ValueError, NotImplementedError: before any arithmetic; see `DecodeCall.problem` and `check_values`.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Compute attention of each request's newest query tokens, in any number, over its paged K/V: extend, prefill.

    Parameters, shapes and dtypes are `lab.calls.ContextCall`'s, which are FlashInfer 0.7.2's; the rest is as in
    `trtllm_batch_decode_with_kv_cache`.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(MLADecodeCall)
def trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> Any:
    """Compute latent attention (MLA) of the last query tokens of each request over its paged cache, after absorption.

    Parameters, shapes and dtypes are `lab.calls.MLADecodeCall`'s, which are FlashInfer 0.7.2's; an `out` of float64 makes
    an oracle that is not rounded. Any sizes of latent vector, rotary part and page are taken. Reads lengths and tables on
    the host.

    Returns:
        out, the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse`
        (out, lse), lse in base 2 unless `return_lse_base` is "basee".

    Raises:
        TypeError, ValueError, NotImplementedError: before any arithmetic; see `MLADecodeCall.problem` and `check_values`.
    """
    out, lse = paged_attention(call.problem())
    if lse is not None and call.return_lse_base == "basee":
        lse *= math.log(2.0)
    return call.returned(out, lse)


@takes(RaggedContextCall)
def trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> Any:
    """Compute attention of each request's rows over K/V that lie end to end: MLA's prefill before absorption.

    The keys are the new tokens' own, or a chunk of the prefix.

    Parameters, shapes and dtypes are `lab.calls.RaggedContextCall`'s, which are FlashInfer 0.7.2's; an `out` of float64
    makes an oracle that is not rounded. Any head_dims are taken. Reads lengths on the host.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim]; with `return_lse`, (out, lse), lse in base 2.

    Raises:
        TypeError, ValueError, NotImplementedError: before any arithmetic; see `RaggedContextCall.problem` and
            `check_ragged_values`.
    """
    problem = call.problem()
    return problem.returned(*ragged_attention(problem))
