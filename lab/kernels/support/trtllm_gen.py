"""Rows of trtllm-gen's kernels. Limits are FlashInfer 0.7.2's, and each names its source. The lab ran none."""

from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall, Feature, PagedAttention
from lab.gpus import SM100, Capability
from lab.kernels.support.common import (
    BF16,
    HALVES,
    MLA_DTYPES,
    NVFP4,
    RAGGED_SIZES,
    STRIDED_QUERY,
    TAKEN_PAGES,
    USUAL,
    unaligned_tensors,
)
from lab.kernels.support.kernel import Dtypes, Kernel, dims, mla_dims, page_sizes, triples

GEN_HONOURS = USUAL | {Feature.RAGGED_ROWS, Feature.TENSOR_SCALES, Feature.LSE, Feature.STRIDED_LSE}


def _trtllm_gen(_capability: Capability | None, problem: PagedAttention) -> str | None:
    if problem.page_size >= 128 and problem.num_qo_heads == problem.num_kv_heads:
        return f"at page size {problem.page_size} needs more than one query head per K/V head"
    for factors in (problem.k_scale_factors, problem.v_scale_factors):
        if factors is not None and factors.stride()[2:] != (factors.shape[3], 1):
            return "needs each head's scale factors contiguous in a page: lay them out as HND"
    return None


GEN_TRIPLES = frozenset().union(*(triples((q,), (q,), HALF_DTYPES) for q in HALF_DTYPES)) | triples(
    (E4M3,), (E4M3, NVFP4), (E4M3, *HALF_DTYPES)
)
GEN_QUERIES = "takes fp16, bf16 or e4m3 queries, not {q}"
GEN_NVFP4 = "reads NVFP4 K/V for e4m3 queries only, not for {q}"
GEN_OUT = "writes the query's dtype, fp16 or bf16, not {out}"
GEN_E4M3 = "reads e4m3 K/V for e4m3 or, with bf16 output, bf16 queries, not for {q}"
GEN_PAGED_HONOURS = GEN_HONOURS | {
    Feature.STRIDED_QUERY,
    Feature.SEPARATE_TABLES,
    Feature.NVFP4,
    Feature.INTERLEAVED_FACTORS,
}
GEN_SAYS = {
    Feature.OTHER_V_STRIDES: "reads V with K's strides, and they differ",
    Feature.MASK: "takes no mask: its rows are causal",
}
TRTLLM_GEN_DECODE = Kernel(
    "trtllm-gen decode",
    calls=(AttentionCall.DECODE,),
    gpus=(SM100,),
    dtypes=Dtypes(
        GEN_TRIPLES | {(BF16, E4M3, BF16)},
        GEN_QUERIES,
        {E4M3: GEN_E4M3, NVFP4: GEN_NVFP4},
        f"{GEN_OUT}, and {GEN_E4M3}",
    ),
    sizes=(TAKEN_PAGES,),
    honours=GEN_PAGED_HONOURS,
    says=GEN_SAYS,
    limits=_trtllm_gen,
)
TRTLLM_GEN_CONTEXT = Kernel(
    "trtllm-gen context",
    calls=(AttentionCall.CONTEXT,),
    gpus=(SM100,),
    dtypes=Dtypes(
        GEN_TRIPLES,
        GEN_QUERIES,
        {E4M3: "reads e4m3 K/V for e4m3 queries, not for {q}", NVFP4: GEN_NVFP4},
        GEN_OUT,
    ),
    sizes=(TAKEN_PAGES,),
    honours=GEN_PAGED_HONOURS | {Feature.NON_CAUSAL},
    says=GEN_SAYS,
    limits=_trtllm_gen,
)


def _trtllm_gen_mla(_capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes, by the checks of the dense path (`_check_trtllm_gen_mla_shape`)."""
    if 64 < problem.num_qo_heads < 128:
        return f"takes at most 64 query heads, or 128 and more, not {problem.num_qo_heads}"
    if problem.cu_seqlens_q is not None and problem.return_lse:
        return "gives no LSE with cum_seq_lens_q"
    return None


TRTLLM_GEN_MLA = Kernel(
    "trtllm-gen MLA",
    calls=(AttentionCall.MLA_DECODE,),
    gpus=(SM100,),
    dtypes=MLA_DTYPES,
    sizes=(dims("(kv_lora_rank, qk_rope_head_dim)", mla_dims, (512, 64), (256, 64)), page_sizes(32, 64)),
    honours=GEN_HONOURS - {Feature.WINDOW, Feature.STRIDED_LSE} | {Feature.STRIDED_QUERY},
    limits=_trtllm_gen_mla,
)


TRTLLM_GEN_RAGGED = Kernel(
    "trtllm-gen ragged",
    calls=(AttentionCall.RAGGED_CONTEXT,),
    gpus=(SM100,),
    dtypes=Dtypes(
        HALVES | triples((E4M3,), (E4M3,), HALF_DTYPES),
        GEN_QUERIES,
        kv="takes K/V in the query's dtype, not {kv}",
        out="writes the query's dtype, fp16 or bf16 for e4m3, not {out}",
    ),
    sizes=(RAGGED_SIZES,),
    honours=GEN_HONOURS | {Feature.NON_CAUSAL},
    says={Feature.STRIDED_QUERY: STRIDED_QUERY},  # the launcher hands on K's and V's strides alone
    limits=unaligned_tensors,
)
