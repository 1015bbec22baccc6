"""Which implementation of the MLA backend's two calls takes what: rules of `lab.kernels.support.why_not`.

Latent attention first, then the ragged call before absorption. Each rule is a function of (capability, problem), and
returns the reason as a sentence, or None.
"""

import torch

from lab.calls.problem import HALF_DTYPES, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import Capability
from lab.kernels.support.common import E4M3, Kernel, is_one, listed, portable_dtypes, wrong_gpu

# What the portable MLA kernel is built for: DeepSeek-V3's 512 and 64, and smaller ones.
MLA_RANKS = (16, 32, 64, 128, 256, 512)
MLA_ROPES = (16, 32, 64)
# (kv_lora_rank, qk_rope_head_dim) of trtllm-gen's dense MLA kernels (FlashInfer 0.7.2, `_check_trtllm_gen_mla_shape`).
TRTLLM_GEN_MLA_DIMS = ((512, 64), (256, 64))
DEEPSEEK_MLA_DIMS = (512, 64)
XQA_MLA_HEADS = 128  # query heads (FlashInfer 0.7.2, `xqa_mla`)
# What the portable ragged kernel is built for: v_head_dims, and head_dims that are one of these or a sum of two.
RAGGED_DIMS = (16, 32, 64, 128, 256)
# (head_dim, v_head_dim) that FlashInfer 0.7.2's `trtllm_ragged_attention_deepseek` takes: DeepSeek's first.
FLASHINFER_RAGGED_DIMS = ((192, 128), (128, 128), (256, 256))
LOAD_BYTES = 16  # of TMA and of FA2's copies


def portable_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    """Its two tiles of a cache entry are whole blocks of Triton: powers of two, 16 and more for a matrix unit."""
    name = Kernel.PORTABLE_MLA.value
    reason = portable_dtypes(name, capability, problem.query.dtype, problem.k_cache.dtype, problem.out_dtype)
    if reason is not None:
        return reason
    rank, rope = problem.v_head_dim, problem.head_dim - problem.v_head_dim
    if rank not in MLA_RANKS:
        return f"{name} is built for a kv_lora_rank of {listed(MLA_RANKS)}, not {rank}"
    if rope not in MLA_ROPES:
        return f"{name} is built for a qk_rope_head_dim of {listed(MLA_ROPES)}, not {rope}"
    return None


def trtllm_gen_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    """FlashInfer 0.7.2's checks of the dense path. Not run by the lab: no such GPU was at hand."""
    name = Kernel.TRTLLM_GEN_MLA.value
    if capability is None or capability[0] != 10:
        return wrong_gpu(name, "SM100 and SM103", capability)
    if _mla_dims(problem) not in TRTLLM_GEN_MLA_DIMS:
        return f"{name} has kernels for {_named_dims(TRTLLM_GEN_MLA_DIMS)}, not for {_mla_dims(problem)}"
    if 64 < problem.num_qo_heads < 128:
        return f"{name} takes at most 64 query heads, or 128 and more, not {problem.num_qo_heads}"
    if problem.page_size not in (32, 64):
        return f"{name} is built for page sizes 32 and 64, not {problem.page_size}"
    if problem.cu_seqlens_q is not None and problem.return_lse:
        return f"{name} gives no LSE with cum_seq_lens_q"
    return _mla_dtypes(name, problem)


def xqa_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    """FlashInfer 0.7.2: `xqa_batch_decode_with_kv_cache_mla`, `xqa_mla` and mla_sm120.cu. Not run by the lab."""
    name = Kernel.XQA_MLA.value
    if capability is None or capability[0] != 12:
        return wrong_gpu(name, "SM120 and SM121", capability)
    if _mla_dims(problem) != DEEPSEEK_MLA_DIMS or problem.num_qo_heads != XQA_MLA_HEADS:
        return (
            f"{name} has a kernel for {_named_dims((DEEPSEEK_MLA_DIMS,))} and {XQA_MLA_HEADS} query heads, not for "
            f"{_mla_dims(problem)} and {problem.num_qo_heads}"
        )
    if problem.cu_seqlens_q is not None or problem.max_q_len != 1:
        return f"{name} takes one query row per request, not {problem.max_q_len}"
    if problem.page_size not in (16, 32, 64, 128):
        return f"{name} is built for page sizes 16, 32, 64 and 128, not {problem.page_size}"
    columns = problem.k_block_tables.shape[1]
    if columns * problem.page_size % 128:
        return f"{name} needs block_tables of whole 128 tokens: {columns} columns of {problem.page_size} are not"
    if problem.sinks is not None:
        return f"{name} takes no sinks"
    if problem.return_lse or problem.lse is not None:
        return f"{name} computes no LSE"
    if any(isinstance(scale, torch.Tensor) for scale in (problem.bmm1_scale, problem.bmm2_scale)):
        # It multiplies the logits by both scales, so that one must be divided by the other first.
        return f"{name} is called with its scales as numbers, not as tensors"
    if problem.bmm2_scale == 0:
        return f"{name} multiplies the logits by bmm2_scale, which must not be 0"
    if not problem.query.is_contiguous() or not problem.k_cache.is_contiguous():
        return f"{name} is called with a contiguous query and cache"
    return _mla_dtypes(name, problem)


def _mla_dtypes(name: str, problem: PagedAttention) -> str | None:
    q, kv = problem.query.dtype, problem.k_cache.dtype
    if (q, kv) not in ((torch.bfloat16, torch.bfloat16), (E4M3, E4M3)):
        return f"{name} takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}"
    if problem.out_dtype != torch.bfloat16:
        return f"{name} writes bfloat16, not {problem.out_dtype}"
    return None


def fa2_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    name = Kernel.FA2_MLA.value
    if capability is None or capability < (8, 0):
        return wrong_gpu(name, "SM80 and later", capability)
    return _fa_mla(name, capability, problem)


def fa3_mla(capability: Capability | None, problem: PagedAttention) -> str | None:
    name = Kernel.FA3_MLA.value
    if capability is None or capability != (9, 0):
        return wrong_gpu(name, "SM90", capability)
    if problem.v_head_dim not in (128, 256, 512):
        return f"{name} is built for a kv_lora_rank of 128, 256 and 512, not {problem.v_head_dim}"
    return _fa_mla(name, capability, problem)


def _fa_mla(name: str, capability: Capability, problem: PagedAttention) -> str | None:
    """FlashInfer 0.7.2, `_validate_generated_fa_plan` and what the two backends' capabilities leave out."""
    q, kv = problem.query.dtype, problem.k_cache.dtype
    if problem.out_dtype != q:
        return f"{name} writes the query's dtype {q}, not {problem.out_dtype}"
    if (
        kv == E4M3
        and q != E4M3
        and (q != torch.bfloat16 or capability[0] != 9 or _mla_dims(problem) != DEEPSEEK_MLA_DIMS)
    ):
        return f"{name} reads an e4m3 cache on SM90, for bf16 queries and {_named_dims((DEEPSEEK_MLA_DIMS,))} alone"
    if q not in HALF_DTYPES or kv not in (q, E4M3):
        return f"{name} takes fp16 or bf16 queries over a cache of their dtype or e4m3, not {q} and {kv}"
    rank, rope = _mla_dims(problem)
    if rank % 128 or rope % 64:
        return (
            f"{name} is built for a kv_lora_rank of whole 128 and a qk_rope_head_dim of whole 64, not {rank} and {rope}"
        )
    if problem.sinks is not None:
        return f"{name} takes no sinks"
    if any(isinstance(scale, torch.Tensor) for scale in (problem.bmm1_scale, problem.bmm2_scale)):
        return f"{name} plans with its scales as numbers, not as tensors"
    if not problem.bmm1_scale > 0:  # a row's maximum is taken before the scale; 0 would be 0 * -inf where it masks
        return f"{name} takes a positive bmm1_scale, not {problem.bmm1_scale}"
    if kv != E4M3 and problem.bmm2_scale != 1:
        return f"{name} has no scale of a {kv} cache: bmm2_scale must be 1, not {problem.bmm2_scale}"
    if kv == E4M3 and not problem.bmm2_scale > 0:
        return f"{name} takes a positive scale of an e4m3 cache, not bmm2_scale {problem.bmm2_scale}"
    return None


def _mla_dims(problem: PagedAttention) -> tuple[int, int]:
    """(kv_lora_rank, qk_rope_head_dim)."""
    return problem.v_head_dim, problem.head_dim - problem.v_head_dim


def _named_dims(dims: tuple[tuple[int, int], ...]) -> str:
    return f"(kv_lora_rank, qk_rope_head_dim) {' or '.join(map(str, dims))}"


def portable_ragged(capability: Capability | None, problem: RaggedAttention) -> str | None:
    """Its tiles of Q, K and V are whole blocks of Triton: powers of two, 16 and more for a matrix unit."""
    name = Kernel.PORTABLE_RAGGED.value
    reason = portable_dtypes(name, capability, problem.query.dtype, problem.key.dtype, problem.out_dtype)
    if reason is not None:
        return reason
    first, rest = split_head_dim(problem.head_dim)
    if first not in RAGGED_DIMS or rest not in (0, *RAGGED_DIMS) or problem.head_dim > RAGGED_DIMS[-1]:
        return (
            f"{name} is built for a head_dim of {listed(RAGGED_DIMS)}, or a sum of two of them below {RAGGED_DIMS[-1]}, "
            f"not {problem.head_dim}"
        )
    if problem.v_head_dim not in RAGGED_DIMS:
        return f"{name} is built for a v_head_dim of {listed(RAGGED_DIMS)}, not {problem.v_head_dim}"
    return None


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """The largest power of two in it, and the rest: 192 is 128 + 64."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


def trtllm_gen_ragged(capability: Capability | None, problem: RaggedAttention) -> str | None:
    """FlashInfer 0.7.2's checks of the call and of its launcher. Not run by the lab: no such GPU was at hand."""
    name = Kernel.TRTLLM_GEN_RAGGED.value
    if capability is None or capability[0] != 10:
        return wrong_gpu(name, "SM100 and SM103", capability)
    q = problem.query.dtype
    if q not in (*HALF_DTYPES, E4M3):
        return f"{name} takes fp16, bf16 or e4m3 queries, not {q}"
    if problem.out_dtype not in (HALF_DTYPES if q == E4M3 else (q,)):
        return f"{name} writes the query's dtype, fp16 or bf16 for e4m3, not {problem.out_dtype}"
    if not problem.query.is_contiguous():  # the launcher hands on K's and V's strides alone
        return f"{name} needs a contiguous query"
    return _flashinfer_ragged_tensors(name, problem)


def fa2_ragged(capability: Capability | None, problem: RaggedAttention) -> str | None:
    name = Kernel.FA2_RAGGED.value
    if capability is None or capability < (8, 0):
        return wrong_gpu(name, "SM80 and later", capability)
    return _fa_ragged(name, problem)


def fa3_ragged(capability: Capability | None, problem: RaggedAttention) -> str | None:
    name = Kernel.FA3_RAGGED.value
    if capability is None or capability != (9, 0):
        return wrong_gpu(name, "SM90", capability)
    return _fa_ragged(name, problem)


def _fa_ragged(name: str, problem: RaggedAttention) -> str | None:
    """FlashInfer 0.7.2, `BatchPrefillWithRaggedKVCacheWrapper` and what its two backends leave out."""
    q = problem.query.dtype
    if q not in HALF_DTYPES:
        return f"{name} takes fp16 or bf16 queries, not {q}"
    if problem.out_dtype != q:
        return f"{name} writes the query's dtype {q}, not {problem.out_dtype}"
    if problem.sinks is not None:
        return f"{name} takes no sinks"
    if any(isinstance(scale, torch.Tensor) for scale in (problem.bmm1_scale, problem.bmm2_scale)):
        return f"{name} plans with its scales as numbers, not as tensors"
    if not problem.bmm1_scale > 0:  # its kernels mask by -inf before they scale
        return f"{name} takes a positive bmm1_scale, not {problem.bmm1_scale}"
    if not is_one(problem.bmm2_scale):
        return f"{name} has no scale of {q} values: bmm2_scale must be 1, not {problem.bmm2_scale}"
    if problem.lse is not None and not problem.lse.is_contiguous():
        return f"{name} writes a contiguous lse only"
    return _flashinfer_ragged_tensors(name, problem)


def _flashinfer_ragged_tensors(name: str, problem: RaggedAttention) -> str | None:
    dims = (problem.head_dim, problem.v_head_dim)
    if dims not in FLASHINFER_RAGGED_DIMS:
        known = " or ".join(map(str, FLASHINFER_RAGGED_DIMS))
        return f"{name} has kernels for (head_dim, v_head_dim) {known}, not {dims}"
    for side, tensor in (("query", problem.query), ("key", problem.key), ("value", problem.value)):
        steps = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:2]))
        if any(step % LOAD_BYTES for step in steps):
            return f"{name} loads {LOAD_BYTES} bytes at a time: {side}'s start, rows and heads must lie that far apart"
    return None
