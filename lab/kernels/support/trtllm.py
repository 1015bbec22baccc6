"""The kernel that runs each of FlashInfer's TRT-LLM functions on a GPU: trtllm-gen's kernel, or XQA or fmha_v2 on GPUs without
trtllm-gen.

The module also says what FlashInfer 0.7.2's Cake kernel supports, which serves decode context parallelism on SM100. The lab has
not run it.
"""

from lab.calls.features import Feature
from lab.calls.problem import E4M3, AttentionCall, PagedAttention
from lab.gpus import SM100, Capability, trtllm_backend_of
from lab.kernels.support.common import BF16, STRIDED_QUERY
from lab.kernels.support.dsv4 import TRTLLM_GEN_DSV4
from lab.kernels.support.fmha_v2 import FMHA_V2
from lab.kernels.support.kernel import Dtypes, Kernel, head_dims, sizes
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_KERNELS
from lab.kernels.support.xqa import XQA, XQA_MLA

PAGE_SIZES = {BF16: 16, E4M3: 64}


def _cake(_capability: Capability | None, problem: PagedAttention) -> str | None:
    # Source: `_validate_core_inputs` (cake_dcp.py), which also requires 1, 2, 4 or 8 ranks.
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
KERNELS = (CAKE, *TRTLLM_GEN_KERNELS, TRTLLM_GEN_DSV4, XQA, FMHA_V2, XQA_MLA)
TRTLLM_GEN = {call: kernel for kernel in (*TRTLLM_GEN_KERNELS, TRTLLM_GEN_DSV4) for call in kernel.calls}
# The kernel of each call on GPUs without trtllm-gen. If only trtllm-gen has one, `why_not` refuses the call there.
ELSEWHERE = {call: kernel for kernel in KERNELS[1:] for call in kernel.calls}


def kernel_for(call: AttentionCall, capability: Capability, backend: str = "auto", of_one_rank: bool = False) -> Kernel:
    """Return the kernel that FlashInfer runs for a call on a GPU. `why_not` says whether that kernel supports the call there.

    Args:
        call: FlashInfer's function. On GPUs without trtllm-gen, CONTEXT runs fmha_v2, as in SGLang 0.5.23.
        capability: (major, minor) of the GPU.
        backend: the call's `backend`: "auto", "trtllm-gen" or "xqa". "cute-dsl" raises NotImplementedError.
        of_one_rank: True if the call has only the keys of one rank of decode context parallelism.
    """
    if backend == "cute-dsl":
        raise NotImplementedError(
            "lab.kernels.trtllm does not run FlashInfer's CuTe DSL kernels: use backend 'auto' or 'trtllm-gen', or "
            "lab.references"
        )
    if of_one_rank and call is AttentionCall.DECODE:
        return CAKE
    return (TRTLLM_GEN if trtllm_backend_of(capability, backend) == "trtllm-gen" else ELSEWHERE)[call]
