"""What FlashInfer 0.7.2's Cake kernel of decode context parallelism supports. The lab has not run it (SM100)."""

from lab.calls.features import Feature
from lab.calls.problem import E4M3, AttentionCall, PagedAttention
from lab.gpus import SM100, Capability
from lab.kernels.support.common import BF16, STRIDED_QUERY
from lab.kernels.support.kernel import Dtypes, Kernel, head_dims, sizes

PAGE_SIZES = {BF16: 16, E4M3: 64}


def _cake(_capability: Capability | None, problem: PagedAttention) -> str | None:
    """Source: `_validate_core_inputs` (cake_dcp.py), which also requires 1, 2, 4 or 8 ranks."""
    kv, page_size = problem.kv_dtype, PAGE_SIZES[problem.kv_dtype]
    if problem.page_size != page_size:
        return f"reads pages of {page_size} tokens with {kv} K/V, not {problem.page_size}"
    if kv == BF16 and (problem.head_dim != 128 or problem.bmm2_scale != 1):
        return f"over bf16 K/V takes head_dim 128 and bmm2_scale 1, not {problem.head_dim} and {problem.bmm2_scale}"
    if problem.head_dim == 128 and problem.group > 8:
        return f"takes at most 8 query heads of a K/V head with head_dim 128, not {problem.group}"
    if problem.head_dim == 256 and (problem.num_kv_heads, problem.group) != (1, 16):
        return f"takes 16 query heads over 1 K/V head with head_dim 256, not {problem.num_qo_heads} over {problem.num_kv_heads}"
    if problem.max_q_len == 7 and problem.head_dim == 128:
        return "is not built for 7 rows with head_dim 128"
    return None


CAKE = Kernel(
    "Cake decode of one rank",
    calls=(AttentionCall.DECODE,),
    gpus=(SM100,),
    dtypes=Dtypes(
        frozenset({(BF16, BF16, BF16), (BF16, E4M3, BF16)}),
        queries="takes bf16 queries, not {q}",
        kv="takes bf16 or e4m3 K/V, not {kv}",
        out="writes bf16, not {out}",
    ),
    sizes=(head_dims(128, 256), sizes("is built for q_len_per_req", lambda problem: problem.max_q_len, *range(1, 9))),
    honours=frozenset({Feature.RANK_KEYS, Feature.SEVERAL_ROWS, Feature.V_SCALE, Feature.OUT, Feature.LSE}),
    says={Feature.STRIDED_QUERY: STRIDED_QUERY},
    limits=_cake,
)
