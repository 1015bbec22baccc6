"""What FlashInfer 0.7.2's FA2 and FA3 and kernels of other packages support, in the releases that comments name."""

from functools import partial

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import FAMILIES, SM90, SM100, Capability, family_of
from lab.kernels.support.common import (
    ANY_ROWS,
    BF16,
    CONTIGUOUS_LSE,
    HALF_DTYPES_ALONE,
    HALVES,
    HALVES_OVER_E4M3,
    NO_MASK,
    NO_V_SCALE,
    ONE_TABLE,
    OUT_IN_QUERY_DTYPE,
    RAGGED_SIZES,
    TAKEN_PAGES,
    V_WITH_K_STRIDES,
    misaligned,
    misaligned_paged,
    positive_bmm1_scale,
)
from lab.kernels.support.kernel import Dtypes, Implementation, Kernel, dims, head_dims, mla_dims, sizes, triples
from lab.kernels.support.stored_cache import no_token_list

DEEPSEEK_MLA_DIMS = (512, 64)
WRAPPERS_HONOUR = ANY_ROWS | {Feature.LSE}
PLANNED = CONTIGUOUS_LSE | {Feature.TENSOR_SCALES: "plans with its scales as numbers, not as tensors"}
SAYS = PLANNED | {Feature.SINKS: "takes no sinks"}
E4M3_CACHE = "reads an e4m3 cache on SM90, for bf16 queries and (kv_lora_rank, qk_rope_head_dim) (512, 64) alone"
MLA_QUERIES = "takes fp16 or bf16 queries over a cache of their dtype or e4m3, not {q} and {kv}"
MLA_DTYPES = Dtypes(HALVES | {(BF16, E4M3, BF16)}, MLA_QUERIES, {E4M3: E4M3_CACHE}, OUT_IN_QUERY_DTYPE)


def _fa_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Source: `_validate_generated_fa_plan`.
    quantised = problem.k_cache.dtype == E4M3
    if quantised and (family_of(capability) is not SM90 or mla_dims(problem) != DEEPSEEK_MLA_DIMS):
        return E4M3_CACHE
    rank, rope = mla_dims(problem)
    if rank % 128 or rope % 64:
        return f"is built for a kv_lora_rank of whole 128 and a qk_rope_head_dim of whole 64, not {rank} and {rope}"
    if not quantised and problem.bmm2_scale != 1:
        return f"has no scale of a {problem.k_cache.dtype} cache: bmm2_scale must be 1, not {problem.bmm2_scale}"
    if quantised and not problem.bmm2_scale > 0:
        return f"takes a positive scale of an e4m3 cache, not bmm2_scale {problem.bmm2_scale}"
    return positive_bmm1_scale(problem)


MLA = partial(
    Kernel,
    calls=(AttentionCall.MLA_DECODE,),
    dtypes=MLA_DTYPES,
    honours=WRAPPERS_HONOUR | {Feature.V_SCALE},
    says=SAYS,
    limits=_fa_mla,
)
FA2_MLA = MLA("BatchMLAPagedAttentionWrapper with FA2", gpus=FAMILIES)
RANKS = sizes("is built for a kv_lora_rank of", lambda problem: problem.v_head_dim, 128, 256, 512)
FA3_MLA = MLA("BatchMLAPagedAttentionWrapper with FA3", gpus=(SM90,), sizes=(RANKS,))


def _fa_ragged(capability: Capability | None, problem: RaggedAttention) -> str | None:
    # Source: `BatchPrefillWithRaggedKVCacheWrapper`.
    inputs = (("query", problem.query), ("key", problem.key), ("value", problem.value))
    return positive_bmm1_scale(problem) or misaligned(*inputs)


RAGGED = partial(
    Kernel,
    calls=(AttentionCall.RAGGED_CONTEXT,),
    dtypes=HALF_DTYPES_ALONE,
    sizes=(RAGGED_SIZES,),
    honours=WRAPPERS_HONOUR | {Feature.NON_CAUSAL, Feature.WINDOW},
    says=SAYS | NO_V_SCALE,
    limits=_fa_ragged,
)
FA2_RAGGED = RAGGED("BatchPrefillWithRaggedKVCacheWrapper with FA2", gpus=FAMILIES)
FA3_RAGGED = RAGGED("BatchPrefillWithRaggedKVCacheWrapper with FA3", gpus=(SM90,))


def _fa_paged(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: the wrappers, `AttentionSink`, the kernels.
    if problem.sinks is not None and problem.mask is not None:  # the `LogitsMask` of `AttentionSink` ignores the mask
        return "reads no mask where it has sinks"
    if problem.sinks is not None and problem.query.dtype == E4M3:
        return "has sinks for fp16 and bf16 queries alone"
    return positive_bmm1_scale(problem) or misaligned_paged(problem)


PAGED_CALLS = (AttentionCall.DECODE, AttentionCall.CONTEXT)
PAGED = partial(Kernel, calls=PAGED_CALLS, sizes=(head_dims(64, 128, 256),), limits=_fa_paged)
PAGED_HONOURS = WRAPPERS_HONOUR | {Feature.NON_CAUSAL, Feature.WINDOW, Feature.SINKS, Feature.V_SCALE}
PAGED_SAYS = PLANNED | {
    Feature.SEPARATE_TABLES: "reads one list of pages for K and V: uses_shared_paged_kv_idx must be True"
}
FA2_PAGED = PAGED(
    "FlashInfer's FA2",
    gpus=FAMILIES,
    dtypes=HALVES_OVER_E4M3,
    honours=PAGED_HONOURS | {Feature.OTHER_V_STRIDES, Feature.MASK},
    says=PAGED_SAYS,
)
FA3_PAGED = PAGED(
    "FlashInfer's FA3",
    gpus=(SM90,),
    dtypes=Dtypes(
        HALVES | triples((E4M3,), (E4M3,), HALF_DTYPES),
        queries="takes fp16, bf16 or e4m3 queries, not {q}",
        kv="takes K/V in the query's dtype, not {kv} with {q}",
        out=dict.fromkeys(HALF_DTYPES, OUT_IN_QUERY_DTYPE) | {E4M3: "writes fp16 or bf16 for e4m3 queries, not {out}"},
    ),
    honours=PAGED_HONOURS,
    says=PAGED_SAYS
    | NO_MASK
    | V_WITH_K_STRIDES,  # batch_prefill_sm90.cu: "K and V must have same page stride", and no `MaskMode::kCustom`
)
# By module of `lab.kernels.peers`, then by FlashInfer's name of the backend.
BY_MODULE = {
    "flashinfer_paged": {"fa2": FA2_PAGED, "fa3": FA3_PAGED},
    "flashinfer_mla": {"fa2": FA2_MLA, "fa3": FA3_MLA},
    "flashinfer_ragged": {"fa2": FA2_RAGGED, "fa3": FA3_RAGGED},
}
BY_BACKEND = {call: by_backend for by_backend in BY_MODULE.values() for call in by_backend["fa2"].calls}


def fa_backend(capability: Capability) -> str:
    family = family_of(capability)
    return "fa2" if family is None else family.fa_backend


PACKAGES_HONOUR = ANY_ROWS | {Feature.OTHER_V_STRIDES, Feature.NON_CAUSAL, Feature.WINDOW}
LSES = frozenset({Feature.LSE, Feature.STRIDED_LSE})
NUMBERS = {Feature.TENSOR_SCALES: "takes its scales as numbers, not as tensors"}
HEAD_DIMS = head_dims(16, 32, 64, 128, 256)
paged_kernel = partial(Kernel, calls=(AttentionCall.DECODE, AttentionCall.CONTEXT), gpus=FAMILIES)


def _flash_attention_4(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: `_flash_attn_fwd`, the documentation of `flash_attn_varlen_func`.
    if problem.k_block_tables.shape[1] == 0:
        return "takes the most keys from the page table's width, and block_tables has no column"
    if problem.page_size == _keys_of_a_tile(capability, problem):
        return (
            f"reads a page of {problem.page_size} tokens whole here, with those after a request's last key, which "
            "must not be NaN then: use another page size"
        )
    return positive_bmm1_scale(problem) or misaligned_paged(problem)  # the package would copy all pages to align them


def _keys_of_a_tile(capability: Capability | None, problem: PagedAttention) -> int:
    # Sources: `_get_fwd_config`, `_tile_size_fwd_sm90`. Pages of this size are loaded by TMA.
    if problem.head_dim <= 128 or family_of(capability) is SM100:
        return 128
    return 64 if problem.window_left >= 0 else 80


# `flash-attn-4` 4.0.0b36, `flash_attn/cute/interface.py`.
FLASH_ATTENTION_4 = paged_kernel(
    "FlashAttention-4",
    gpus=(SM90, SM100),
    dtypes=HALF_DTYPES_ALONE,
    sizes=(head_dims(64, 128, 256),),
    honours=PACKAGES_HONOUR | LSES | {Feature.SINKS},
    says=ONE_TABLE | NUMBERS | NO_V_SCALE | {Feature.MASK: "takes no packed mask: its masks are functions in CuTe DSL"},
    limits=_flash_attention_4,
)


def _flex_attention(capability: Capability | None, problem: PagedAttention) -> str | None:
    # On a GPU torch numbers elements in 32 bits (pytorch/pytorch#185264).
    for name, pool in (("K", problem.k_cache), ("V", problem.v_cache)):
        span = sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
        if capability is not None and span >= 2**31:
            return f"counts the elements of {name} in 32 bits: its pool must span fewer than 2**31, not {span:,}"
    return no_token_list(problem)


# torch 2.13, `torch/nn/attention/flex_attention.py`.
FLEX_ATTENTION = paged_kernel(
    "torch's flex_attention",
    on_cpu=True,
    dtypes=Dtypes(
        HALVES,
        queries="is taken for fp16 or bf16 queries, not {q}",
        kv="takes K/V in the query's dtype, not {kv}",
        out=OUT_IN_QUERY_DTYPE,
    ),
    sizes=(HEAD_DIMS, TAKEN_PAGES),
    honours=PACKAGES_HONOUR | LSES | {Feature.MASK},
    says=NO_V_SCALE
    | {
        Feature.SINKS: "has no sinks",
        Feature.SEPARATE_TABLES: "has one list of blocks for K and V: uses_shared_paged_kv_idx must be True",
        Feature.TENSOR_SCALES: "takes its scale as a number, not as a tensor",
    },
    limits=_flex_attention,
)


def _sglang_triton(_capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: `decode_attention.py`, `extend_attention.py`.
    if problem.bmm1_scale == 0:
        return "takes a bmm1_scale of 0 for none given"  # `sm_scale or 1.0 / (Lq**0.5)`
    if problem.window_left == 0:
        return "takes a window of no key to the left for no window"  # `SLIDING_WINDOW_SIZE > 0`
    if problem.kv_dtype == E4M3 and problem.head_dim < 32:
        return f"multiplies 32 elements of e4m3 at least, not a head_dim of {problem.head_dim}"
    return no_token_list(problem)


# SGLang 0.5.23, `sglang/kernels/ops/attention/decode_attention.py` and `extend_attention.py`.
SGLANG_TRITON = paged_kernel(
    "SGLang's Triton attention",
    uses_triton=True,
    on_cpu=True,
    dtypes=HALVES_OVER_E4M3,
    sizes=(HEAD_DIMS,),
    honours=PACKAGES_HONOUR | {Feature.SINKS, Feature.MASK, Feature.V_SCALE},
    says=NUMBERS
    | dict.fromkeys(LSES, "hands no LSE of all keys out")
    | {Feature.SEPARATE_TABLES: "reads one list of tokens for K and V: uses_shared_paged_kv_idx must be True"},
    limits=_sglang_triton,
)


def _vllm_triton(_capability: Capability | None, problem: PagedAttention) -> str | None:
    if problem.kv_dtype != E4M3 and problem.bmm2_scale != 1:
        return f"has no scale of a {problem.kv_dtype} cache: bmm2_scale must be 1, not {problem.bmm2_scale}"
    return None


# vLLM 0.33.0, `vllm/v1/attention/ops/triton_unified_attention.py`.
VLLM_TRITON = paged_kernel(
    "vLLM's Triton attention",
    uses_triton=True,  # vLLM imports Triton only if there is a GPU
    dtypes=HALVES_OVER_E4M3,
    sizes=(HEAD_DIMS,),
    honours=PACKAGES_HONOUR | {Feature.SINKS, Feature.V_SCALE},
    says=ONE_TABLE
    | NUMBERS
    | dict.fromkeys(LSES, "hands no LSE out")
    | {Feature.MASK: "has one bias of draft tokens for all requests, and no mask of each"},  # `qq_bias`
    limits=_vllm_triton,
)


def _flash_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: `sparse_prefill.cpp`, sm90/prefill/sparse/phase1.cuh.
    if problem.selected is None:
        return "reads entries chosen for each row: sparse_mla_top_k must not be 0"
    inputs = (("query", problem.query), ("K", problem.k_cache))
    return positive_bmm1_scale(problem) or no_token_list(problem) or misaligned(*inputs)


# `sgl-flash-mla` 1.0.0, the fork of FlashMLA that SGLang 0.5.23 uses; sources are of github.com/sgl-project/FlashMLA.
FLASH_MLA = Kernel(
    "FlashMLA's sparse prefill kernel",
    calls=(AttentionCall.MLA_DECODE,),
    gpus=(SM90,),
    dtypes=Dtypes(
        frozenset({(BF16, BF16, BF16)}),
        queries="takes bf16 queries, not {q}",
        kv="reads a bf16 cache, not {kv}",
        out="writes bf16, not {out}",
    ),
    sizes=(
        sizes("is built for query heads of", lambda problem: problem.num_qo_heads, 64, 128),
        dims("(kv_lora_rank, qk_rope_head_dim)", mla_dims, (512, 64), (512, 0)),
    ),
    honours=frozenset({Feature.SEVERAL_ROWS, Feature.STRIDED_QUERY, Feature.OUT, Feature.SINKS, Feature.LSE})
    | {Feature.TOP_K, Feature.TOP_K_LENS, Feature.STRIDED_TOP_K},
    says=NUMBERS
    | NO_V_SCALE
    | CONTIGUOUS_LSE
    | {Feature.RAGGED_ROWS: "is taken for equally many rows of each request, as SGLang calls it: no cum_seq_lens_q"},
    limits=_flash_mla,
)

# To add a kernel, write a module in `lab.kernels.peers`, and here a `Kernel` and an `Implementation`.
IMPLEMENTATIONS = (
    *(
        Implementation(f"lab.kernels.peers.{module}:{backend}", "flashinfer", "flashinfer-python", (kernel,))
        for module, by_backend in BY_MODULE.items()
        for backend, kernel in by_backend.items()
    ),
    Implementation("lab.kernels.peers.flash_attention_4", "flash_attn", "flash-attn-4", (FLASH_ATTENTION_4,)),
    Implementation("lab.kernels.peers.flash_mla", "flash_mla", "sgl-flash-mla", (FLASH_MLA,)),
    Implementation("lab.kernels.peers.flex_attention", "torch", "torch", (FLEX_ATTENTION,)),
    Implementation("lab.kernels.peers.sglang_triton", "sglang", "sglang", (SGLANG_TRITON,)),
    Implementation("lab.kernels.peers.vllm_triton", "vllm", "vllm", (VLLM_TRITON,)),
)
