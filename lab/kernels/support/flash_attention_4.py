"""Row of FlashAttention-4 (`flash-attn-4`). Limits are those of 4.0.0b36, `flash_attn/cute/interface.py`."""

from lab.calls.problem import AttentionCall, Feature, PagedAttention
from lab.gpus import SM90, SM100, Capability, family_of
from lab.kernels.support.common import HALVES, misaligned_paged, positive_bmm1_scale
from lab.kernels.support.kernel import Dtypes, Kernel, sizes


def _limits(capability: Capability | None, problem: PagedAttention) -> str | None:
    """Return the limit that a problem passes, by `_flash_attn_fwd` and the documentation of `flash_attn_varlen_func`."""
    if problem.k_block_tables.shape[1] == 0:
        return "takes the most keys from the page table's width, and block_tables has no column"
    if problem.page_size == _keys_of_a_tile(capability, problem):
        return (
            f"reads a page of {problem.page_size} tokens whole here, with those after a request's last key, which "
            "must not be NaN then: use another page size"
        )
    return positive_bmm1_scale(problem) or misaligned_paged(problem)  # it would copy all pages to align them


def _keys_of_a_tile(capability: Capability | None, problem: PagedAttention) -> int:
    """Return the keys of one tile, by `_get_fwd_config` and `_tile_size_fwd_sm90`: TMA loads pages of that size."""
    if problem.head_dim <= 128 or family_of(capability) is SM100:
        return 128
    return 64 if problem.window_left >= 0 else 80


FLASH_ATTENTION_4 = Kernel(
    "FlashAttention-4",
    calls=(AttentionCall.DECODE, AttentionCall.CONTEXT),
    gpus=(SM90, SM100),
    dtypes=Dtypes(
        HALVES,
        queries="takes fp16 or bf16 queries, not {q}",
        kv="takes K/V in the query's dtype, not {kv}",
        out="writes the query's dtype {q}, not {out}",
    ),
    sizes=(sizes("is taken for head_dim", lambda problem: problem.head_dim, 64, 128, 256),),
    honours=frozenset(
        {
            Feature.SEVERAL_ROWS,
            Feature.RAGGED_ROWS,
            Feature.STRIDED_QUERY,
            Feature.OTHER_V_STRIDES,
            Feature.NON_CAUSAL,
            Feature.WINDOW,
            Feature.SINKS,
            Feature.OUT,
            Feature.LSE,
            Feature.STRIDED_LSE,
        }
    ),
    says={
        Feature.SEPARATE_TABLES: "reads one page table for K and V: uses_shared_paged_kv_idx must be True",
        Feature.TENSOR_SCALES: "takes its scales as numbers, not as tensors",
        Feature.V_SCALE: "has no scale of its values: bmm2_scale must be 1",
        Feature.MASK: "takes no packed mask: its masks are functions in CuTe DSL",
    },
    limits=_limits,
)
KERNELS = (FLASH_ATTENTION_4,)
