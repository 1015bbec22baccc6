"""What FlashInfer 0.7.2's own FA2 and FA3 kernels support, which its wrappers call."""

from functools import partial

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import FAMILIES, SM90, Capability, family_of
from lab.kernels.support.common import (
    ANY_ROWS,
    BF16,
    CONTIGUOUS_LSE,
    HALF_DTYPES_ALONE,
    HALVES,
    HALVES_OVER_E4M3,
    NO_MASK,
    NO_V_SCALE,
    OUT_IN_QUERY_DTYPE,
    RAGGED_SIZES,
    V_WITH_K_STRIDES,
    first_misaligned,
    misaligned_paged,
    positive_bmm1_scale,
)
from lab.kernels.support.kernel import Dtypes, Kernel, head_dims, mla_dims, sizes, triples

DEEPSEEK_MLA_DIMS = (512, 64)
HONOURED_BY_ALL = ANY_ROWS | {Feature.LSE}
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
    honours=HONOURED_BY_ALL | {Feature.V_SCALE},
    says=SAYS,
    limits=_fa_mla,
)
FA2_MLA = MLA("BatchMLAPagedAttentionWrapper with FA2", gpus=FAMILIES)
RANKS = sizes("is built for a kv_lora_rank of", lambda problem: problem.v_head_dim, 128, 256, 512)
FA3_MLA = MLA("BatchMLAPagedAttentionWrapper with FA3", gpus=(SM90,), sizes=(RANKS,))


def _fa_ragged(capability: Capability | None, problem: RaggedAttention) -> str | None:
    # Source: `BatchPrefillWithRaggedKVCacheWrapper`.
    sides = (("query", problem.query), ("key", problem.key), ("value", problem.value))
    return positive_bmm1_scale(problem) or first_misaligned(sides)


RAGGED = partial(
    Kernel,
    calls=(AttentionCall.RAGGED_CONTEXT,),
    dtypes=HALF_DTYPES_ALONE,
    sizes=(RAGGED_SIZES,),
    honours=HONOURED_BY_ALL | {Feature.NON_CAUSAL, Feature.WINDOW},
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
PAGED_HONOURS = HONOURED_BY_ALL | {Feature.NON_CAUSAL, Feature.WINDOW, Feature.SINKS, Feature.V_SCALE}
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
KERNELS = tuple(kernel for by_backend in BY_MODULE.values() for kernel in by_backend.values())
BY_BACKEND = {call: by_backend for by_backend in BY_MODULE.values() for call in by_backend["fa2"].calls}


def fa_backend(capability: Capability) -> str:
    family = family_of(capability)
    return "fa2" if family is None else family.fa_backend
