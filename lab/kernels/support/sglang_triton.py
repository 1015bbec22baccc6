"""Row of SGLang 0.5.23's Triton attention, `sglang/kernels/ops/attention/decode_attention.py` and `extend_attention.py`."""

from lab.calls.problem import E4M3, AttentionCall, Feature, PagedAttention
from lab.gpus import FAMILIES, Capability
from lab.kernels.support.common import TRITON_DTYPES
from lab.kernels.support.kernel import Kernel, sizes
from lab.kernels.support.stored_cache import no_token_list


def _limits(_capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes, by both files."""
    if problem.bmm1_scale == 0:
        return "takes a bmm1_scale of 0 for none given"  # `sm_scale or 1.0 / (Lq**0.5)`
    if problem.window_left == 0:
        return "takes a window of no key to the left for no window"  # `SLIDING_WINDOW_SIZE > 0`
    if problem.kv_dtype == E4M3 and problem.head_dim < 32:
        return f"multiplies 32 elements of e4m3 at least, not a head_dim of {problem.head_dim}"
    return no_token_list(problem)


SGLANG_TRITON = Kernel(
    "SGLang's Triton attention",
    calls=(AttentionCall.DECODE, AttentionCall.CONTEXT),
    gpus=FAMILIES,
    uses_triton=True,
    on_cpu=True,
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
            Feature.MASK,
            Feature.V_SCALE,
            Feature.OUT,
        }
    ),
    says={
        Feature.SEPARATE_TABLES: "reads one list of tokens for K and V: uses_shared_paged_kv_idx must be True",
        Feature.TENSOR_SCALES: "takes its scales as numbers, not as tensors",
        Feature.LSE: "hands no LSE of all keys out",
        Feature.STRIDED_LSE: "hands no LSE of all keys out",
    },
    limits=_limits,
)
KERNELS = (SGLANG_TRITON,)
