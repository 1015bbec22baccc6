"""Rows of FlashInfer's TRT-LLM kernels: trtllm-gen, XQA and fmha_v2. Limits are FlashInfer 0.7.2's, and each names its source.

trtllm-gen and XQA MLA were not run by the lab: no such GPU was at hand.
"""

import torch

from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall, Feature, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import SM90, SM100, SM120, Capability, family_of, sm_name
from lab.kernels.support.kernel import Dtypes, Kernel, Sizes, dims, mla_dims, page_sizes, sizes, triples
from lab.kernels.support.stored_cache import stored_cache

BF16, NVFP4 = torch.bfloat16, torch.uint8
HALVES = frozenset((q, q, q) for q in HALF_DTYPES)
# Query elements that XQA keeps in shared memory at q_len_per_req 1 (mha.cu, `persistentQ`: 16 KiB).
XQA_QUERY_TILE_ELEMENTS = 8192
LOAD_BYTES = 16  # of TMA and of FA2's copies
RAGGED_DIMS = ((192, 128), (128, 128), (256, 256))  # (head_dim, v_head_dim) of `trtllm_ragged_attention_deepseek`
TAKEN_PAGES = page_sizes(16, 32, 64, 128, words="is taken for page sizes")  # SGLang 0.5.23's
NO_LSE = "computes no LSE"
USUAL = frozenset({Feature.SEVERAL_ROWS, Feature.WINDOW, Feature.SINKS, Feature.V_SCALE, Feature.OUT})
GEN_HONOURS = USUAL | {Feature.RAGGED_ROWS, Feature.TENSOR_SCALES, Feature.LSE, Feature.STRIDED_LSE}
STRIDED_QUERY = "needs a contiguous query"


def kernel_for(call: AttentionCall, capability: Capability, backend: str = "auto") -> Kernel:
    """Return the kernel that FlashInfer runs for a call on a GPU; `why_not` tells if it takes the call there.

    Args:
        call: one of the four. The context call comes to fmha_v2 where there is no trtllm-gen, as in SGLang 0.5.23.
        capability: (major, minor).
        backend: the call's: "auto", "trtllm-gen" or "xqa". CuTe DSL is left aside.
    """
    if backend == "auto":
        family = family_of(capability)
        backend = "xqa" if family is None or family.trtllm_backend is None else family.trtllm_backend
    return BY_CALL[call][0 if backend == "trtllm-gen" else 1]


def _xqa(capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes, by FlashInfer's `xqa`, `gen_xqa_module`, xqa_wrapper.cu and mha.cu."""
    kv = problem.k_cache.dtype
    if kv == NVFP4 and capability is not None and family_of(capability) is not SM120:
        return f"reads NVFP4 K/V on SM120 and SM121 only, not on {sm_name(capability)}"
    # mha.cu applies its K/V scale to 8 and 4 bit K/V alone, but always divides the query's scale by it.
    if kv in HALF_DTYPES and (isinstance(problem.bmm2_scale, torch.Tensor) or problem.bmm2_scale != 1):
        return "applies no bmm2_scale to fp16 and bf16 K/V: it must be the number 1.0; fold it into the output"
    if not isinstance(problem.bmm2_scale, torch.Tensor) and problem.bmm2_scale == 0:
        return "divides by bmm2_scale: it must not be 0"
    if problem.mask is not None and problem.max_q_len == 1:
        return "ignores a mask at q_len_per_req 1"
    return _xqa_heads(problem) or _xqa_strides(problem)


def _xqa_heads(problem: PagedAttention) -> str | None:
    group, head_dim = problem.num_qo_heads // problem.num_kv_heads, problem.head_dim
    if head_dim > 256 and (problem.max_q_len > 1 or group > 16):
        return f"with head_dim {head_dim} > 256 needs q_len_per_req 1 and at most 16 query heads per K/V head"
    padded_head_dim = next(size for size in (64, 128, 256, 512) if size >= head_dim)
    most_heads = XQA_QUERY_TILE_ELEMENTS // padded_head_dim
    if problem.max_q_len == 1 and group > most_heads:
        return f"with head_dim {head_dim} and q_len_per_req 1 takes at most {most_heads} query heads per K/V head, not {group}"
    if problem.k_block_tables.shape[1] == 0:
        return "takes the most keys from the page table's width, and block_tables has no column"
    return None


def _xqa_strides(problem: PagedAttention) -> str | None:
    k_factors, v_factors = problem.k_scale_factors, problem.v_scale_factors
    if k_factors is not None and v_factors is not None and k_factors.stride() != v_factors.stride():
        return "reads V's scale factors with the strides of K's, and they differ"
    for entries in (problem.k_cache, k_factors):
        if entries is not None and any(stride % entries.shape[3] for stride in entries.stride()[:3]):
            return f"counts K/V strides in whole heads of {entries.shape[3]}, and they are {entries.stride()}"
    return None


XQA = Kernel(
    "XQA",
    calls=(AttentionCall.DECODE,),
    gpus=(SM90, SM100, SM120),
    dtypes=Dtypes(
        frozenset().union(*(triples((q,), (q, E4M3, NVFP4), (q,)) for q in HALF_DTYPES))
        | triples(HALF_DTYPES, (E4M3,), (E4M3,)),
        queries="takes fp16 or bf16 queries, not {q}",
        kv="takes K/V in the query's dtype, e4m3 or NVFP4, not {kv}",
        out="writes the query's dtype, or e4m3 with e4m3 K/V, not {out}",
    ),
    sizes=(
        page_sizes(16, 32, 64, 128),
        Sizes(
            "needs a head_dim that is a multiple of 16 from 16 to 512",
            lambda problem: problem.head_dim,
            range(16, 513, 16),
        ),
    ),
    honours=USUAL | {Feature.NVFP4, Feature.PLAIN_FACTORS, Feature.MASK, Feature.TENSOR_SCALES},
    says={
        Feature.RAGGED_ROWS: "takes no cum_seq_lens_q through the decode call: every request needs q_len_per_req rows",
        Feature.SEPARATE_TABLES: "reads one page table for K and V: uses_shared_paged_kv_idx must be True",
        Feature.LSE: NO_LSE,
        Feature.STRIDED_LSE: NO_LSE,
        Feature.OTHER_V_STRIDES: "reads V with K's strides, and they differ",
        Feature.STRIDED_QUERY: STRIDED_QUERY,
    },
    limits=_xqa,
)


def _fmha_v2(capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes, by `trtllm_fmha_v2_prefill`, fmha_v2_run.cu and its epilogues."""
    q = problem.query.dtype
    if q == E4M3 and capability is not None and family_of(capability) is not SM90:
        return f"takes fp16 and bf16 queries, and e4m3 on SM90 alone, not {q} on {sm_name(capability)}"
    if problem.cu_seqlens_q is None:
        return "needs cum_seq_lens_q"
    if problem.bmm1_scale == 0:
        return "takes bmm1_scale 0 for 1 / sqrt(head_dim)"
    if problem.bmm1_scale < 0:
        return f"takes a row's maximum before it scales: bmm1_scale {problem.bmm1_scale} overflows"
    if q in HALF_DTYPES and problem.bmm2_scale != 1:  # its 16 bit epilogues never read it
        return f"applies no bmm2_scale to {q}: it must be 1.0, not {problem.bmm2_scale}"
    return _fmha_v2_cache(problem)


def _fmha_v2_cache(problem: PagedAttention) -> str | None:
    """Return the reason where fmha_v2 cannot address the cache.

    It takes strides from shapes and counts all pages from K's first (`_check_paged_kv_non_interleaved`, fmha_v2_run.cu).
    """
    stored = stored_cache(problem)
    if problem.k_block_tables is not problem.v_block_tables:
        if stored.is_one_pool and len(stored.k) > 1:
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


FMHA_V2 = Kernel(
    "trtllm_fmha_v2_prefill",
    calls=(AttentionCall.CONTEXT,),
    gpus=(SM90, SM120),
    dtypes=Dtypes(
        HALVES | triples((E4M3,), (E4M3,), (E4M3, *HALF_DTYPES)),
        queries="takes fp16 and bf16 queries, and e4m3 on SM90 alone, not {q}",
        kv="takes K/V in the query's dtype, not {kv} with {q}",
        out=dict.fromkeys(HALF_DTYPES, "writes the query's dtype {q}, not {out}")
        | {E4M3: "writes the query's dtype {q}, fp16 or bf16, not {out}"},
    ),
    sizes=(TAKEN_PAGES, sizes("is taken for head_dim", lambda problem: problem.head_dim, 64, 128, 256)),
    honours=USUAL | {Feature.RAGGED_ROWS, Feature.SEPARATE_TABLES, Feature.OTHER_V_STRIDES, Feature.NON_CAUSAL},
    says={
        Feature.LSE: "returns softmax statistics, not the LSE of this call",
        Feature.STRIDED_LSE: "returns softmax statistics, not the LSE of this call",
        Feature.TENSOR_SCALES: "takes its scales as host numbers, not as tensors",
        Feature.STRIDED_QUERY: STRIDED_QUERY,
    },
    limits=_fmha_v2,
)


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

MLA_DTYPES = Dtypes(
    frozenset({(BF16, BF16, BF16), (E4M3, E4M3, BF16)}),
    queries="takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}",
    kv="takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}",
    out="writes bfloat16, not {out}",
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


def _xqa_mla(_capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes, by `xqa_batch_decode_with_kv_cache_mla`, `xqa_mla`, mla_sm120.cu."""
    columns = problem.k_block_tables.shape[1]
    if columns * problem.page_size % 128:
        return f"needs block_tables of whole 128 tokens: {columns} columns of {problem.page_size} are not"
    if problem.bmm2_scale == 0:
        return "multiplies the logits by bmm2_scale, which must not be 0"
    if not problem.k_cache.is_contiguous():
        return "is called with a contiguous query and cache"
    return None


XQA_MLA = Kernel(
    "XQA MLA",
    calls=(AttentionCall.MLA_DECODE,),
    gpus=(SM120,),
    dtypes=MLA_DTYPES,
    sizes=(
        dims("(kv_lora_rank, qk_rope_head_dim)", mla_dims, (512, 64)),
        Sizes("has a kernel for 128 query heads", lambda problem: problem.num_qo_heads, (128,)),  # `xqa_mla`
        page_sizes(16, 32, 64, 128),
    ),
    honours=frozenset({Feature.V_SCALE, Feature.OUT}),
    says={
        Feature.SEVERAL_ROWS: "takes one query row per request",
        Feature.RAGGED_ROWS: "takes one query row per request",
        Feature.SINKS: "takes no sinks",
        Feature.LSE: NO_LSE,
        # It multiplies the logits by both scales, so that one must be divided by the other first.
        Feature.TENSOR_SCALES: "is called with its scales as numbers, not as tensors",
        Feature.STRIDED_QUERY: "is called with a contiguous query and cache",
    },
    limits=_xqa_mla,
)


def unaligned_tensors(_capability: Capability | None, problem: RaggedAttention) -> str | None:
    """Return a ragged kernel's sentence about tensors that it cannot load 16 bytes at a time."""
    for side, tensor in (("query", problem.query), ("key", problem.key), ("value", problem.value)):
        steps = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:2]))
        if any(step % LOAD_BYTES for step in steps):
            return f"loads {LOAD_BYTES} bytes at a time: {side}'s start, rows and heads must lie that far apart"
    return None


RAGGED_SIZES = dims("(head_dim, v_head_dim)", lambda problem: (problem.head_dim, problem.v_head_dim), *RAGGED_DIMS)
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
# trtllm-gen's kernel, and what FlashInfer has elsewhere.
BY_CALL = {
    AttentionCall.DECODE: (TRTLLM_GEN_DECODE, XQA),
    AttentionCall.CONTEXT: (TRTLLM_GEN_CONTEXT, FMHA_V2),
    AttentionCall.MLA_DECODE: (TRTLLM_GEN_MLA, XQA_MLA),
    AttentionCall.RAGGED_CONTEXT: (TRTLLM_GEN_RAGGED, TRTLLM_GEN_RAGGED),
}
KERNELS = tuple(dict.fromkeys(kernel for pair in BY_CALL.values() for kernel in pair))
