"""What XQA and XQA MLA of FlashInfer 0.7.2 support. Comments name the sources. The lab has not run XQA MLA."""

import torch

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionCall, PagedAttention
from lab.gpus import SM90, SM100, SM120, Capability, GpuFamily, family_of, sm_name
from lab.kernels.support.common import (
    MLA_DTYPES,
    NO_LSE,
    ONE_TABLE,
    STRIDED_QUERY,
    USUAL,
    V_WITH_K_STRIDES,
    misplaced_paged,
)
from lab.kernels.support.kernel import Dtypes, Kernel, Sizes, dims, mla_dims, page_sizes, triples

# Numbers of query heads per K/V head for which XQA compiles at q_len_per_req 1, by head_dim padded to 64, 128, 256 or 512: 1 to
# the first number, the second to the third, and so on. `lab.dry_run.compiled` has them from nvcc
# (results/blackwell-dry-run/compiled.md). mha.cu pads a group to 16, 32 or 64 rows in at most 16 KiB (`persistentQ`): 48 rows
# fail (utils.cuh, `assertIsPowerOf2`), and more than 64 (line 1648).
Groups = dict[int, tuple[int, ...]]
UP_TO_32: Groups = {64: (32,), 128: (32,), 256: (32,), 512: (16,)}
NOT_48: Groups = {64: (32, 49, 64), 128: (32, 49, 64)}
OVER_E4M3: Groups = UP_TO_32 | {64: NOT_48[64]}
# By GPU, and whether K/V have 16 bits. On SM90 FlashInfer also compiles mha_sm90.cu for head_dims up to 256, even for K/V of 16
# bits, with which it is never run. In it a group is one tile of 8 heads or an even number of tiles (line 1975), and over e4m3
# K/V its output must fit in the shared memory of V and the softmax's weights (line 178). SM120 has 99 KiB of shared memory.
GROUPS: dict[tuple[GpuFamily, bool], Groups] = {
    (SM90, True): UP_TO_32 | Groups.fromkeys((64, 128), (16, 25, 32, 57, 64)) | {256: (16, 25, 32)},
    (SM90, False): OVER_E4M3,
    (SM100, True): UP_TO_32 | NOT_48,
    (SM100, False): UP_TO_32 | NOT_48,
    (SM120, True): UP_TO_32,
    (SM120, False): OVER_E4M3,
}


def _xqa(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: `xqa`, `gen_xqa_module`, xqa_wrapper.cu, mha.cu.
    kv = problem.k_cache.dtype
    if kv == NVFP4 and capability is not None and family_of(capability) is not SM120:
        return f"reads NVFP4 K/V on SM120 and SM121 only, not on {sm_name(capability)}"
    # mhaUtils.cuh, `nbValidGrains`: it rounds down, so that the last scale factors are not loaded
    if kv == NVFP4 and problem.head_dim % 64:
        return f"loads the scale factors of NVFP4 K/V four at a time: head_dim must be a multiple of 64, not {problem.head_dim}"
    # mha.cu applies its K/V scale only to K/V of 8 and 4 bits, but always divides the query's scale by it.
    if kv in HALF_DTYPES and (isinstance(problem.bmm2_scale, torch.Tensor) or problem.bmm2_scale != 1):
        return "applies no bmm2_scale to fp16 and bf16 K/V: it must be the number 1.0; fold it into the output"
    if not isinstance(problem.bmm2_scale, torch.Tensor) and problem.bmm2_scale == 0:
        return "divides by bmm2_scale: it must not be 0"
    if problem.mask is not None and problem.max_q_len == 1:
        return "ignores a mask at q_len_per_req 1"
    if problem.k_block_tables.shape[1] == 0:
        return "takes the most keys from the page table's width, and block_tables has no column"
    return _xqa_heads(capability, problem) or _xqa_strides(problem) or misplaced_paged(problem)


def _xqa_heads(capability: Capability | None, problem: PagedAttention) -> str | None:
    group, head_dim = problem.group, problem.head_dim
    family, halves = family_of(capability), problem.kv_dtype in HALF_DTYPES
    assert capability is not None  # `why_not` checks the GPU first
    assert family is not None
    if problem.max_q_len > 1:
        if head_dim > 256:  # `gen_xqa_module`
            return f"with head_dim {head_dim} > 256 needs q_len_per_req 1"
        # mha_sm90.cu: a CTA has 64 rows, which hold all heads of a token.
        if family is SM90 and not halves and group > 64:
            return (
                f"on SM90 over e4m3 K/V with q_len_per_req > 1 takes at most 64 query heads per K/V head, not {group}"
            )
        return None
    padded_head_dim = next(size for size in (64, 128, 256, 512) if size >= head_dim)
    edges = (1, *GROUPS[family, halves][padded_head_dim])
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    if any(least <= group <= most for least, most in ranges):
        return None
    taken = " or ".join(f"{least} to {most}" for least, most in ranges)
    return (
        f"with head_dim {head_dim}, {problem.kv_dtype} K/V and q_len_per_req 1 compiles on {sm_name(capability)} for "
        f"{taken} query heads per K/V head, not for {group}"
    )


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
    # FlashInfer does not pass the factor of skip-softmax to XQA (decode.py 4184), which then skips no key.
    honours=USUAL
    | {*(Feature.NVFP4, Feature.PLAIN_FACTORS, Feature.MASK, Feature.TENSOR_SCALES, Feature.SKIP_SOFTMAX)},
    says=ONE_TABLE
    | NO_LSE
    | V_WITH_K_STRIDES
    | {
        Feature.BLOCK_SPARSE: "has one page table for all K/V heads: FlashInfer has block-sparse attention in trtllm-gen alone",
        Feature.RAGGED_ROWS: "takes no cum_seq_lens_q through the decode call: every request needs q_len_per_req rows",
        Feature.STRIDED_QUERY: STRIDED_QUERY,
    },
    limits=_xqa,
)


def _xqa_mla(_capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: `xqa_batch_decode_with_kv_cache_mla`, mla_sm120.cu.
    columns = problem.k_block_tables.shape[1]
    if columns * problem.page_size % 128:
        return f"needs block_tables of whole 128 tokens: {columns} columns of {problem.page_size} are not"
    if problem.bmm2_scale == 0:
        return "multiplies the logits by bmm2_scale, which must not be 0"
    if not problem.k_cache.is_contiguous():
        return "is called with a contiguous query and cache"
    return misplaced_paged(problem)


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
    says=NO_LSE
    | dict.fromkeys((Feature.SEVERAL_ROWS, Feature.RAGGED_ROWS), "takes one query row per request")
    | {
        Feature.SINKS: "takes no sinks",
        Feature.SKIP_SOFTMAX: "leaves out no part of the softmax: skip_softmax_threshold_scale_factor must be None",
        # mla/_core.py 4219: FlashInfer runs another kernel, whose cache `_check_sm120_sparse_v32_kv_cache` describes.
        Feature.TOP_K: "selects no entries: FlashInfer's kernel for that on SM120 and SM121 reads a packed cache of 656 or "
        "528 bytes per token, which the lab does not model",
        # The kernel multiplies the logits by both scales, so the adapter divides bmm1_scale by bmm2_scale on the host.
        Feature.TENSOR_SCALES: "is called with its scales as numbers, not as tensors",
        Feature.STRIDED_QUERY: "is called with a contiguous query and cache",
    },
    limits=_xqa_mla,
)
