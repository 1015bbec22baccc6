"""What trtllm-gen's kernels support, on SM100 and SM103. The lab has not run them, because it had no such GPU.

There are two sources: the rules of FlashInfer 0.7.2.post1's launcher (fmhaKernels.cuh, kernelParams.h), and the table in which
the launcher looks a kernel up. The newest table on the package index is flashinfer-cubin 0.6.13's; error sentences that depend
on this table name it. Kernels for bf16 queries over e4m3 K/V, and for MLA with groups of 8, 16 or 32 heads, are supported too:
a later table is known to have them. `lab.dry_run.sweep` compares this module with the launcher.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lab.calls.dsv4_decode import TwoPools
from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionCall, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import SM100, Capability
from lab.kernels.support.common import (
    ANY_ROWS,
    HALVES,
    LOAD_BYTES,
    MLA_DTYPES,
    NO_MASK,
    RAGGED_SIZES,
    STRIDED_QUERY,
    USUAL,
    V_WITH_K_STRIDES,
    misaligned,
)
from lab.kernels.support.kernel import (
    Dtypes,
    Kernel,
    Problem,
    Sizes,
    Triples,
    dims,
    head_dims,
    mla_dims,
    page_sizes,
    sizes,
    triples,
)
from lab.named_enum import NamedEnum

FP16 = torch.float16
TABLE = "in trtllm-gen's table of FlashInfer 0.6.13"
HEADS = f"has kernels {TABLE} for head_dim"
OF_E4M3 = triples((E4M3,), (E4M3,), (E4M3, *HALF_DTYPES))
OF_NVFP4 = triples((E4M3,), (NVFP4,), (E4M3,))
INT8_QUERIES = triples((torch.int8,), (torch.int8,), (torch.bfloat16,))
# Only for decode. The table's kernels for bf16 convert K/V in a way that FlashInfer 0.7.2 no longer requests.
WIDER_QUERIES = frozenset((q, E4M3, q) for q in HALF_DTYPES)
SMALL_PAGES = (16, 32, 64)
# One kernel reads all from 128 (`useDynamicNumTokensPerPage`).
ANY_PAGES = (*SMALL_PAGES, *(2**power for power in range(7, 31)))


class MaskKind(NamedEnum):
    """The kinds of masks for which trtllm-gen has separate kernels. The value of a member is its name in error sentences."""

    CAUSAL = "causal rows"
    WINDOW = "a window"
    FULL = "causal=False"


@dataclass(frozen=True)
class Built:
    """Kernels of trtllm-gen: one for each combination of (query, K/V and output dtype), head_dims, page size and mask."""

    dtypes: Triples
    head_dims: tuple[tuple[int, int], ...]  # pairs of K's and V's
    page_sizes: tuple[int | None, ...] = ANY_PAGES  # (None,): K/V are not paged
    masks: tuple[MaskKind, ...] = tuple(MaskKind)


UP_TO_256 = ((64, 64), (128, 128), (256, 256))  # pairs of head_dims
DECODE_BUILT = (
    Built(HALVES | OF_E4M3 | OF_NVFP4 | WIDER_QUERIES, UP_TO_256),
    Built(HALVES | OF_E4M3 | WIDER_QUERIES, ((512, 512),), SMALL_PAGES),
)
CONTEXT_BUILT = (
    Built(HALVES | OF_E4M3 | OF_NVFP4, UP_TO_256),
    Built(HALVES | OF_E4M3, ((512, 512),), SMALL_PAGES, (MaskKind.CAUSAL, MaskKind.FULL)),
    Built(HALVES, ((80, 80),), SMALL_PAGES),
)
RAGGED_BUILT = (
    Built(MLA_DTYPES.triples, tuple(RAGGED_SIZES.among), (None,), (MaskKind.CAUSAL, MaskKind.FULL)),
    Built(frozenset({(FP16, FP16, FP16), (E4M3, E4M3, FP16)}), ((128, 128),), (None,), (MaskKind.FULL,)),
)
# With scales of blocks: of 1, 4 or 16 keys, and of single rows. Those of int8 queries are only for SM100.
SAGE_BUILT = (Built(triples((E4M3,), (E4M3,), HALF_DTYPES) | INT8_QUERIES, ((128, 128),), (None,), (MaskKind.FULL,)),)
# Largest number of query heads of a K/V head in one CTA (`selectGqGenerationKernel`). It is smaller in kernels that convert K/V
# to the query's dtype, except for bf16 over e4m3, which is converted separately (`supportsGqaGroupingTokensHeadsQ`).
HEADS_OF_A_CTA, HEADS_OF_A_CONVERTING_CTA = 128, 16
CONVERTED = {(FP16, E4M3), (E4M3, NVFP4)}
MLA_HEADS_OF_A_CTA = 64
# Largest number of query heads in one CTA, by (kv_lora_rank, qk_rope_head_dim). FlashInfer's list of dimensions and the table
# have 32 for (256, 64); the launcher finds other kernels only for short requests.
MLA_HEADS = {(512, 64): MLA_HEADS_OF_A_CTA, (256, 64): 32, (512, 0): MLA_HEADS_OF_A_CTA}
TOP_K_STEP = 4  # columns that a kernel of selected entries loads at a time (kernelParams.h 916)
COPY_BYTES = 16  # alignment of the first column of selected entries (kernelParams.h 916)
# (kv_lora_rank, qk_rope_head_dim) of the kernels of selected entries, and whether FlashInfer requires `sparse_mla_top_k_lens`;
# otherwise it refuses the argument (mla/_core.py 4032 and 4285).
SELECTED_DIMS = {(512, 64): False, (512, 0): True}
UNPACKED_LOAD_BYTES = 32  # alignment if TMA unpacks 4-bit values: decode over NVFP4 with a head_dim of 128 or more


def _mask(problem: Problem) -> MaskKind:
    """Return the kind of mask by which trtllm-gen chooses a kernel (`selectKernel`). A window that hides no key is ignored."""
    if not problem.causal:
        return MaskKind.FULL
    return MaskKind.WINDOW if 0 <= problem.window_left < problem.max_kv_len - 1 else MaskKind.CAUSAL


def _not_built(built: tuple[Built, ...], problem: Problem) -> str | None:
    """Return an error sentence if no kernel of `built` supports `problem`. It says what the most similar kernels support."""
    triple = (problem.query.dtype, problem.kv_dtype, problem.out_dtype)
    page_size = problem.page_size if isinstance(problem, PagedAttention) else None
    wanted = (triple, (problem.head_dim, problem.v_head_dim), page_size, _mask(problem))
    fits = [[value in values for value, values in zip(wanted, vars(each).values(), strict=True)] for each in built]
    if any(map(all, fits)):
        return None
    q, kv, out = (str(dtype).removeprefix("torch.") for dtype in triple)
    pages = f", pages of {page_size}" if page_size else ""
    # The most similar kernels have the same head dimensions, then the same dtypes.
    near = max(zip(fits, built, strict=True), key=lambda pair: (pair[0][1], pair[0][0], sum(pair[0])))
    return (
        f"has no kernel {TABLE} for {q} queries, {kv} K/V and {out} output with {wanted[3].value}, head_dim "
        f"{problem.head_dim}{pages}; it has them for {_words(*near)}"
    )


def _words(fits: list[bool], built: Built) -> str:
    """Return the text of those fields of `built` whose `fits` is False, such as "head_dim 80, and causal rows or a window"."""
    words = (
        " or ".join(
            ", ".join(str(each).removeprefix("torch.") for each in triple) for triple in sorted(built.dtypes, key=str)
        ),
        "head_dim " + " or ".join(str(k) if k == v else f"{k} and {v}" for k, v in built.head_dims),
        "pages of {}, {} or {}".format(*SMALL_PAGES),
        " or ".join(mask.value for mask in built.masks),
    )
    return ", and ".join(word for word, fit in zip(words, fits, strict=True) if not fit)


def _not_skipped(problem: Problem) -> str | None:
    # Source: `mSkipsSoftmaxWhenPossible`.
    if problem.skip_softmax and problem.query.dtype != problem.kv_dtype:
        return f"has no kernel {TABLE} that leaves out parts of the softmax for {problem.query.dtype} over {problem.kv_dtype}"
    return None


def _ragged_not_built(problem: RaggedAttention) -> str | None:
    scales = problem.block_scales
    if scales is not None and scales.q_block != 1:
        return f"has a scale for each row of a head {TABLE}: a block of sage_attn_sfs must have 1 row, not {scales.q_block}"
    return _not_built(RAGGED_BUILT if scales is None else SAGE_BUILT, problem)


def _too_many_heads(problem: PagedAttention) -> str | None:
    converts = (problem.query.dtype, problem.kv_dtype) in CONVERTED
    most = HEADS_OF_A_CONVERTING_CTA if converts else HEADS_OF_A_CTA
    if problem.group > most and problem.group % most:
        return (
            f"runs {most} query heads of a K/V head at a time: more must be a multiple of {most}, not {problem.group}"
        )
    return None


def _unread(problem: Problem) -> str | None:
    # Source: `buildNdTmaDescriptor`.
    query = problem.query
    if any(stride == 0 and size > 1 for size, stride in zip(query.shape[:2], query.stride()[:2], strict=True)):
        return "takes a stride of 0 for a contiguous query: it must not be expanded"
    if isinstance(problem, PagedAttention):
        unpacks = problem.kv_dtype == NVFP4 and problem.head_dim >= 128 and problem.call is AttentionCall.DECODE
        kv_bytes = UNPACKED_LOAD_BYTES if unpacks else LOAD_BYTES
        # Of a page's scale factors, only the strides of pages and heads are read, also the stride of a single head.
        pairs = (("K", problem.k_scale_factors), ("V", problem.v_scale_factors))
        factors = [(f"{name}'s scale factors", each[:, :, 0]) for name, each in pairs if each is not None]
        pools = (("K", problem.k_cache, kv_bytes), ("V", problem.v_cache, kv_bytes))
        words = misaligned(("query", query), *pools, *factors)
    else:
        words = misaligned(("query", query), strides=False)
        words = words or misaligned(("key", problem.key), ("value", problem.value))
    return words or misaligned(("out", problem.out), strides=False)


def _unread_factors(problem: PagedAttention) -> str | None:
    # Source: `makeTmaShapeStrideKvSf`.
    k_factors, v_factors = problem.k_scale_factors, problem.v_scale_factors
    if k_factors is None or v_factors is None:
        return None
    if any(factors.stride()[2:] != (factors.shape[3], 1) for factors in (k_factors, v_factors)):
        return "needs each head's scale factors contiguous in a page: lay them out as HND"
    if k_factors.stride() != v_factors.stride():
        return "reads V's scale factors with the strides of K's, and they differ"
    return None


def _mla_heads(problem: PagedAttention) -> str | None:
    # Sources: mla/_core.py, `selectMlaGenerationKernel`.
    heads, (rank, rope) = problem.num_qo_heads, mla_dims(problem)
    most = MLA_HEADS.get((rank, rope), MLA_HEADS_OF_A_CTA)
    if heads > most and most < MLA_HEADS_OF_A_CTA:
        return f"takes at most {most} query heads with kv_lora_rank {rank} ({TABLE}), not {heads}"
    if heads > most and heads % most:
        return f"takes at most {most} query heads, or a multiple of {most} from {2 * most}, not {heads}"
    return None


def _selected(problem: PagedAttention) -> str | None:
    dims, width = mla_dims(problem), problem.head_dim
    if problem.selected is None:
        needs = f"with kv_lora_rank {dims[0]} and qk_rope_head_dim {dims[1]} has kernels of selected entries alone"
        return f"{needs}: pass sparse_mla_top_k and its lens" if dims[1] == 0 else None
    if dims not in SELECTED_DIMS:
        return f"has no kernel {TABLE} of selected entries for (kv_lora_rank, qk_rope_head_dim) {dims}"
    if SELECTED_DIMS[dims] != (problem.selected_lens is not None):
        needs = "needs sparse_mla_top_k_lens" if SELECTED_DIMS[dims] else "takes no sparse_mla_top_k_lens"
        return f"{needs} with qk_rope_head_dim {dims[1]}"
    if problem.selected.shape[1] % TOP_K_STEP:
        return (
            f"loads {TOP_K_STEP} selected entries at a time: sparse_mla_top_k must be a multiple of them, not "
            f"{problem.selected.shape[1]}"
        )
    if problem.selected.is_contiguous() and problem.selected.data_ptr() % COPY_BYTES:
        return (
            f"copies {COPY_BYTES} bytes of selected entries at a time (kernelParams.h 916): align block_tables to them"
        )
    # kernelParams.h 756
    if problem.k_cache.stride()[2:] != (width, 1) or problem.k_cache.stride(0) != width * problem.page_size:
        return f"reads selected entries at multiples of {width} elements: the cache must be contiguous"
    return None


def division(problem: PagedAttention) -> str | None:
    """Return an error sentence if an MLA call would make FlashInfer's launcher divide by 0, which ends the process."""
    is_dense = problem.selected is None  # only then `useSwapsMmaAbMlaGenKernel` is called, which divides
    if is_dense and problem.max_kv_len == 0 and problem.num_qo_heads >= MLA_HEADS_OF_A_CTA:
        return (
            f"divides by max_seq_len with {MLA_HEADS_OF_A_CTA} query heads or more, and 0 would end the process: pass 1"
        )
    return None


def _ragged_lse(problem: PagedAttention) -> str | None:
    is_ragged = problem.cu_seqlens_q is not None
    return "gives no LSE with cum_seq_lens_q" if is_ragged and problem.return_lse else None


def _two_pools(problem: TwoPools) -> str | None:
    selected = problem.selected
    for name, pool in (("swa_kv_cache", problem.window_cache), ("compressed_kv_cache", problem.k_cache)):
        # trtllm_fmha_kernel_launcher.cu 78-90
        if len(pool) == 0:
            return f"needs at least one page of {name}"
        if pool.stride(2) != pool.shape[3] or pool.stride(0) % pool.shape[3]:
            return f"reads {name} at multiples of {pool.shape[3]} elements: its strides are {pool.stride()}"
        if (words := misaligned((name, pool), strides=False)) is not None:
            return words
    # kernelParams.h 916; FlashInfer copies a tensor that is not contiguous
    entries = misaligned(("sparse_indices", selected), strides=False) if selected.is_contiguous() else None
    return entries or misaligned(("query", problem.query), ("out", problem.out))


# The limits that other fields of `Kernel` do not express, in the launcher's order.
LIMITS: Mapping[AttentionCall, tuple[Callable[[Any], str | None], ...]] = {
    AttentionCall.DECODE: (partial(_not_built, DECODE_BUILT), _not_skipped, _too_many_heads, _unread_factors, _unread),
    AttentionCall.CONTEXT: (partial(_not_built, CONTEXT_BUILT), _not_skipped, _unread_factors, _unread),
    AttentionCall.MLA_DECODE: (_ragged_lse, _mla_heads, _selected, division, _unread),
    AttentionCall.RAGGED_CONTEXT: (_ragged_not_built, _unread),
    AttentionCall.DSV4_DECODE: (_two_pools,),
}


def _limits(capability: Capability | None, problem: Problem) -> str | None:
    if problem.query.dtype == torch.int8 and capability != SM100.capabilities[0]:
        return f"has kernels of int8 queries {TABLE} for SM100 alone, not for this GPU"
    return next((words for limit in LIMITS[problem.call] if (words := limit(problem)) is not None), None)


GEN_QUERIES = "takes fp16, bf16 or e4m3 queries, not {q}"
GEN_NVFP4 = "reads NVFP4 K/V for e4m3 queries only, not for {q}"
OF_A_HALF = f"writes the query's dtype {{q}}, not {{out}}: no other kernel is {TABLE}"
PAGED_OUT = dict.fromkeys(HALF_DTYPES, OF_A_HALF) | {
    E4M3: f"writes e4m3, fp16 or bf16, and of NVFP4 K/V e4m3 alone, not {{out}} of {{kv}}: no other kernel is {TABLE}"
}
HONOURS = USUAL | {
    *(Feature.RAGGED_ROWS, Feature.TENSOR_SCALES, Feature.LSE, Feature.STRIDED_LSE, Feature.SKIP_SOFTMAX)
}
PAGED_HONOURS = HONOURS | {Feature.STRIDED_QUERY, Feature.SEPARATE_TABLES, Feature.NVFP4, Feature.INTERLEAVED_FACTORS}
SAYS = V_WITH_K_STRIDES | NO_MASK
PAGES = Sizes(
    "is built for page sizes 16, 32, 64 and powers of two from 128", lambda problem: problem.page_size, ANY_PAGES
)
gen_kernel = partial(Kernel, gpus=(SM100,), limits=_limits)
TRTLLM_GEN_DECODE = gen_kernel(
    "trtllm-gen decode",
    calls=(AttentionCall.DECODE,),
    dtypes=Dtypes(
        HALVES | OF_E4M3 | OF_NVFP4 | WIDER_QUERIES,
        GEN_QUERIES,
        {E4M3: "reads e4m3 K/V for fp16, bf16 and e4m3 queries, not for {q}", NVFP4: GEN_NVFP4},
        PAGED_OUT,
    ),
    sizes=(PAGES, head_dims(64, 128, 256, 512, words=HEADS)),
    honours=PAGED_HONOURS | {Feature.BLOCK_SPARSE},
    says=SAYS,
)
TRTLLM_GEN_CONTEXT = gen_kernel(
    "trtllm-gen context",
    calls=(AttentionCall.CONTEXT,),
    dtypes=Dtypes(
        HALVES | OF_E4M3 | OF_NVFP4,
        GEN_QUERIES,
        {E4M3: f"reads e4m3 K/V for e4m3 queries, not for {{q}}: no such kernel is {TABLE}", NVFP4: GEN_NVFP4},
        PAGED_OUT,
    ),
    sizes=(PAGES, head_dims(64, 80, 128, 256, 512, words=HEADS)),
    honours=PAGED_HONOURS | {Feature.NON_CAUSAL},
    says=SAYS,
)
TRTLLM_GEN_MLA = gen_kernel(
    "trtllm-gen MLA",
    calls=(AttentionCall.MLA_DECODE,),
    dtypes=MLA_DTYPES,
    sizes=(dims("(kv_lora_rank, qk_rope_head_dim)", mla_dims, *MLA_HEADS), page_sizes(32, 64)),
    honours=HONOURS - {Feature.WINDOW, Feature.STRIDED_LSE}
    | {Feature.STRIDED_QUERY, Feature.TOP_K, Feature.TOP_K_LENS, Feature.STRIDED_TOP_K},
)
TRTLLM_GEN_RAGGED = gen_kernel(
    "trtllm-gen ragged",
    calls=(AttentionCall.RAGGED_CONTEXT,),
    dtypes=Dtypes(
        HALVES | triples((E4M3,), (E4M3,), HALF_DTYPES) | INT8_QUERIES,
        GEN_QUERIES,
        kv="takes K/V in the query's dtype, not {kv}",
        out={
            **dict.fromkeys(HALF_DTYPES, OF_A_HALF),
            E4M3: "writes fp16 or bf16 for e4m3 queries, not {out}",
            torch.int8: "writes bf16 for int8 queries, not {out}",
        },
    ),
    sizes=(RAGGED_SIZES,),
    honours=HONOURS | {Feature.NON_CAUSAL, Feature.BLOCK_SCALES},
    says={Feature.STRIDED_QUERY: STRIDED_QUERY},  # the launcher passes on the strides of K and V alone
)
TRTLLM_GEN_DSV4 = gen_kernel(
    "trtllm-gen DSV4",
    calls=(AttentionCall.DSV4_DECODE,),
    dtypes=MLA_DTYPES,
    sizes=(
        Sizes("has kernels (mla/_core.py 1098) for head_dim 512", lambda problem: problem.head_dim, (512,)),
        sizes(
            "has kernels (mla/_core.py 1100) for query heads", lambda problem: problem.num_qo_heads, 8, 16, 32, 64, 128
        ),
    ),
    honours=ANY_ROWS
    | {Feature.TOP_K, Feature.TOP_K_LENS, Feature.STRIDED_TOP_K, Feature.TWO_POOLS}
    | {Feature.SINKS, Feature.V_SCALE, Feature.TENSOR_SCALES},
)
TRTLLM_GEN_KERNELS = (TRTLLM_GEN_DECODE, TRTLLM_GEN_CONTEXT, TRTLLM_GEN_MLA, TRTLLM_GEN_RAGGED)
