"""Row of torch's `flex_attention` over a paged cache (torch 2.13, `torch/nn/attention/flex_attention.py`)."""

from lab.calls.problem import AttentionCall, Feature, PagedAttention
from lab.gpus import FAMILIES, Capability
from lab.kernels.support.common import HALVES, TAKEN_PAGES
from lab.kernels.support.kernel import Dtypes, Kernel, sizes
from lab.kernels.support.stored_cache import no_token_list


def _limits(_capability: Capability | None, problem: PagedAttention) -> str | None:
    return no_token_list(problem)


FLEX_ATTENTION = Kernel(
    "torch's flex_attention",
    calls=(AttentionCall.DECODE, AttentionCall.CONTEXT),
    gpus=FAMILIES,
    on_cpu=True,
    dtypes=Dtypes(
        HALVES,
        queries="is taken for fp16 or bf16 queries, not {q}",
        kv="takes K/V in the query's dtype, not {kv}",
        out="writes the query's dtype {q}, not {out}",
    ),
    sizes=(
        sizes("is taken for head_dim", lambda problem: problem.head_dim, 16, 32, 64, 128, 256),
        TAKEN_PAGES,
    ),
    honours=frozenset(
        {
            Feature.SEVERAL_ROWS,
            Feature.RAGGED_ROWS,
            Feature.STRIDED_QUERY,
            Feature.OTHER_V_STRIDES,
            Feature.NON_CAUSAL,
            Feature.WINDOW,
            Feature.MASK,
            Feature.OUT,
            Feature.LSE,
            Feature.STRIDED_LSE,
        }
    ),
    says={
        Feature.SINKS: "has no sinks",
        Feature.SEPARATE_TABLES: "has one list of blocks for K and V: uses_shared_paged_kv_idx must be True",
        Feature.TENSOR_SCALES: "takes its scale as a number, not as a tensor",
        Feature.V_SCALE: "has no scale of its values: bmm2_scale must be 1",
    },
    limits=_limits,
)
KERNELS = (FLEX_ATTENTION,)
