"""What paged attention kernels of other packages support. A comment at each kernel names the release of its package."""

from functools import partial

from lab.calls.features import Feature
from lab.calls.problem import E4M3, AttentionCall, PagedAttention
from lab.gpus import FAMILIES, SM90, SM100, Capability, family_of
from lab.kernels.support.common import (
    ANY_ROWS,
    BF16,
    CONTIGUOUS_LSE,
    HALF_DTYPES_ALONE,
    HALVES,
    HALVES_OVER_E4M3,
    NO_V_SCALE,
    ONE_TABLE,
    OUT_IN_QUERY_DTYPE,
    TAKEN_PAGES,
    first_misaligned,
    misaligned_paged,
    positive_bmm1_scale,
)
from lab.kernels.support.kernel import Dtypes, Implementation, Kernel, dims, head_dims, mla_dims, sizes
from lab.kernels.support.stored_cache import no_token_list

HONOURED_BY_ALL = ANY_ROWS | {Feature.OTHER_V_STRIDES, Feature.NON_CAUSAL, Feature.WINDOW}
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
    """Return the number of keys in FlashAttention-4's tile (`_get_fwd_config`, `_tile_size_fwd_sm90`). The package loads pages
    of exactly this size by TMA.
    """
    if problem.head_dim <= 128 or family_of(capability) is SM100:
        return 128
    return 64 if problem.window_left >= 0 else 80


# `flash-attn-4` 4.0.0b36, `flash_attn/cute/interface.py`.
FLASH_ATTENTION_4 = paged_kernel(
    "FlashAttention-4",
    gpus=(SM90, SM100),
    dtypes=HALF_DTYPES_ALONE,
    sizes=(head_dims(64, 128, 256),),
    honours=HONOURED_BY_ALL | LSES | {Feature.SINKS},
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
    honours=HONOURED_BY_ALL | LSES | {Feature.MASK},
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
    honours=HONOURED_BY_ALL | {Feature.SINKS, Feature.MASK, Feature.V_SCALE},
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
    honours=HONOURED_BY_ALL | {Feature.SINKS, Feature.V_SCALE},
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
    sides = (("query", problem.query), ("K", problem.k_cache))
    return positive_bmm1_scale(problem) or no_token_list(problem) or first_misaligned(sides)


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
    Implementation("lab.kernels.peers.flash_attention_4", "flash_attn", "flash-attn-4", (FLASH_ATTENTION_4,)),
    Implementation("lab.kernels.peers.flash_mla", "flash_mla", "sgl-flash-mla", (FLASH_MLA,)),
    Implementation("lab.kernels.peers.flex_attention", "torch", "torch", (FLEX_ATTENTION,)),
    Implementation("lab.kernels.peers.sglang_triton", "sglang", "sglang", (SGLANG_TRITON,)),
    Implementation("lab.kernels.peers.vllm_triton", "vllm", "vllm", (VLLM_TRITON,)),
)
KERNELS = tuple(kernel for each in IMPLEMENTATIONS for kernel in each.kernels)
