"""FlashInfer's attention function over contiguous K/V in float64, with the same name and parameters."""

from typing import Any

from lab.calls import RaggedContextCall, takes
from lab.calls.entry import with_own_settings
from lab.references.attention_calls import attention_of


@takes(RaggedContextCall)
@with_own_settings
def trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> Any:
    """Compute attention over contiguous K/V in float64. An MLA prefill with up-projected K and V (no absorbed weights) makes
    this call over the new tokens, and over chunks of the cached prefix.

    The arguments are the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.RaggedContextCall` documents. In
    addition, `out` may be float64, so that the result is not rounded, and head_dims may have any size. Wrong arguments raise an
    error before any arithmetic. The host reads lengths.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    return problem.returned(*attention_of(problem))
