"""What fmha_v2 (`trtllm_fmha_v2_prefill`) of FlashInfer 0.7.2 supports. Comments name the source of each limit."""

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall, PagedAttention
from lab.gpus import SM90, SM120, Capability, family_of, sm_name
from lab.kernels.support.common import HALVES, OUT_IN_QUERY_DTYPE, STRIDED_QUERY, TAKEN_PAGES, USUAL, misplaced_paged
from lab.kernels.support.kernel import Dtypes, Kernel, head_dims, triples
from lab.kernels.support.stored_cache import stored_cache


def _fmha_v2(capability: Capability | None, problem: PagedAttention) -> str | None:
    # Sources: `trtllm_fmha_v2_prefill`, fmha_v2_run.cu, epilogues.
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
    """Return an error sentence unless K and V lie in memory as fmha_v2 assumes. It computes strides from shapes, and counts all
    pages from K's first page (`_check_paged_kv_non_interleaved`, fmha_v2_run.cu).
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
