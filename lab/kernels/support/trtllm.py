"""The kernel that runs each of FlashInfer's TRT-LLM functions on a GPU: trtllm-gen's, or XQA or fmha_v2 on GPUs without
trtllm-gen. For decode context parallelism on SM100 it is FlashInfer 0.7.2's Cake kernel, which the lab has not run.
"""

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall, PagedAttention
from lab.gpus import SM90, SM100, SM120, Capability, family_of, sm_name, trtllm_backend_of
from lab.kernels.support.common import (
    BF16,
    HALVES,
    OUT_IN_QUERY_DTYPE,
    STRIDED_QUERY,
    TAKEN_PAGES,
    USUAL,
    misplaced_paged,
)
from lab.kernels.support.kernel import Dtypes, Kernel, head_dims, sizes, triples
from lab.kernels.support.stored_cache import stored_cache
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_DSV4, TRTLLM_GEN_KERNELS
from lab.kernels.support.xqa import XQA, XQA_MLA

PAGE_SIZES = {BF16: 16, E4M3: 64}


def _fmha_v2(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources, of FlashInfer 0.7.2: `trtllm_fmha_v2_prefill`, fmha_v2_run.cu, epilogues.
    q = problem.query.dtype
    if q == E4M3 and capability is not None and family_of(capability) is not SM90:
        return f"takes fp16 and bf16 queries, and e4m3 on SM90 alone, not {q} on {sm_name(capability)}"
    if problem.skip_softmax and capability is not None and family_of(capability) is not SM90:  # fmha_library.py 1302
        return f"leaves out parts of the softmax on SM90 only, not on {sm_name(capability)}"
    if problem.cu_seqlens_q is None:
        return "needs cum_seq_lens_q"
    if problem.bmm1_scale == 0:
        return "takes bmm1_scale 0 for 1 / sqrt(head_dim)"
    if problem.bmm1_scale < 0:
        return f"takes a row's maximum before it scales: bmm1_scale {problem.bmm1_scale} overflows"
    if q in HALF_DTYPES and problem.bmm2_scale != 1:  # the epilogues of 16 bits do not read bmm2_scale
        return f"applies no bmm2_scale to {q}: it must be 1.0, not {problem.bmm2_scale}"
    return _fmha_v2_cache(problem) or misplaced_paged(problem)


def _fmha_v2_cache(problem: PagedAttention) -> str | None:
    """Return an error sentence unless K and V lie in memory as fmha_v2 assumes. The kernel computes strides from shapes, and
    counts all pages from K's first page (`_check_paged_kv_non_interleaved`, fmha_v2_run.cu).
    """
    stored = stored_cache(problem)
    if problem.k_block_tables is not problem.v_block_tables:
        is_one_pool = stored.distance_bytes == 0 and stored.k.is_contiguous() and stored.k.stride() == stored.v.stride()
        if is_one_pool and len(stored.k) > 1:
            return None
        return (
            "counts the page ids of K and of V from one address: uses_shared_paged_kv_idx must be True, or K and V the same "
            "contiguous pool of two pages or more"
        )
    if stored.is_stacked or stored.is_halves:
        return None
    return (
        "needs K and V to be one contiguous [num_pages, 2, ...] tensor, or contiguous halves of one allocation, V whole "
        f"pages after K; got strides {stored.k.stride()} and {stored.v.stride()}, V {stored.distance_bytes} bytes after K, "
        f"pages of {stored.page_bytes} bytes"
    )


# FlashInfer generates kernels for head_dims of 32 to 256 on SM90, and 512 on SM120 (results/blackwell-dry-run/compiled.md). The
# lab judged the three below. With an unsupported head_dim `run_fmha_v2` launches nothing and raises no error.
FMHA_V2 = Kernel(
    "trtllm_fmha_v2_prefill",
    calls=(AttentionCall.CONTEXT,),
    gpus=(SM90, SM120),
    dtypes=Dtypes(
        HALVES | triples((E4M3,), (E4M3,), (E4M3, *HALF_DTYPES)),
        queries="takes fp16 and bf16 queries, and e4m3 on SM90 alone, not {q}",
        kv="takes K/V in the query's dtype, not {kv} with {q}",
        out=dict.fromkeys(HALF_DTYPES, OUT_IN_QUERY_DTYPE)
        | {E4M3: "writes the query's dtype {q}, fp16 or bf16, not {out}"},
    ),
    sizes=(TAKEN_PAGES, head_dims(64, 128, 256)),
    honours=USUAL
    | {Feature.RAGGED_ROWS, Feature.SEPARATE_TABLES, Feature.OTHER_V_STRIDES, Feature.NON_CAUSAL, Feature.SKIP_SOFTMAX},
    says=dict.fromkeys((Feature.LSE, Feature.STRIDED_LSE), "returns softmax statistics, not the LSE of this call")
    | {Feature.TENSOR_SCALES: "takes its scales as host numbers, not as tensors", Feature.STRIDED_QUERY: STRIDED_QUERY},
    limits=_fmha_v2,
)


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
    """Return the kernel that FlashInfer runs for a call on a GPU, even if it does not support all the arguments.

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
