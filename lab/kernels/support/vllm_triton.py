"""Row of vLLM 0.33.0's Triton attention, `vllm/v1/attention/ops/triton_unified_attention.py`."""

from lab.calls.problem import E4M3, AttentionCall, Feature, PagedAttention
from lab.gpus import FAMILIES, Capability
from lab.kernels.support.common import TRITON_DTYPES
from lab.kernels.support.kernel import Kernel, sizes


def _limits(_capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes: only an e4m3 cache has scales, which are read with it."""
    if problem.kv_dtype != E4M3 and problem.bmm2_scale != 1:
        return f"has no scale of a {problem.kv_dtype} cache: bmm2_scale must be 1, not {problem.bmm2_scale}"
    return None


VLLM_TRITON = Kernel(
    "vLLM's Triton attention",
    calls=(AttentionCall.DECODE, AttentionCall.CONTEXT),
    gpus=FAMILIES,
    uses_triton=True,  # which vLLM imports only beside a GPU
    dtypes=TRITON_DTYPES,
    sizes=(sizes("is taken for head_dim", lambda problem: problem.head_dim, 16, 32, 64, 128, 256),),
    honours=frozenset(
        {
            Feature.SEVERAL_ROWS,
            Feature.RAGGED_ROWS,
            Feature.STRIDED_QUERY,
            Feature.OTHER_V_STRIDES,
            Feature.NON_CAUSAL,
            Feature.WINDOW,
            Feature.SINKS,
            Feature.V_SCALE,
            Feature.OUT,
        }
    ),
    says={
        Feature.SEPARATE_TABLES: "reads one page table for K and V: uses_shared_paged_kv_idx must be True",
        Feature.TENSOR_SCALES: "takes its scales as numbers, not as tensors",
        Feature.MASK: "has one bias of draft tokens for all requests, and no mask of each",  # `qq_bias`
        Feature.LSE: "hands no LSE out",
        Feature.STRIDED_LSE: "hands no LSE out",
    },
    limits=_limits,
)
KERNELS = (VLLM_TRITON,)
