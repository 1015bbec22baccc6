"""What trtllm-gen's kernel of DeepSeek-V4's sparse MLA call supports, on SM100 and SM103. The lab has not run the kernel,
because it had no such GPU.

The source is FlashInfer 0.7.2.post1: the checks of mla/_core.py and trtllm_fmha_kernel_launcher.cu. `lab.dry_run.sweep_dsv4`
compares this module with the launcher, with the kernel table of flashinfer-cubin 0.6.13.
"""

from lab.calls.dsv4_decode import TwoPools
from lab.calls.features import Feature
from lab.calls.problem import AttentionCall
from lab.gpus import SM100, Capability
from lab.kernels.support.common import ANY_ROWS, MLA_DTYPES, first_misaligned, misplaced
from lab.kernels.support.kernel import Kernel, Sizes, sizes


def _limits(_capability: Capability | None, problem: TwoPools) -> str | None:
    selected = problem.selected
    for name, pool in (("swa_kv_cache", problem.window_cache), ("compressed_kv_cache", problem.k_cache)):
        # trtllm_fmha_kernel_launcher.cu 78-90
        if len(pool) == 0:
            return f"needs at least one page of {name}"
        if pool.stride(2) != pool.shape[3] or pool.stride(0) % pool.shape[3]:
            return f"reads {name} at multiples of {pool.shape[3]} elements: its strides are {pool.stride()}"
        if (words := misplaced(name, pool)) is not None:
            return words
    if selected.is_contiguous() and (words := misplaced("sparse_indices", selected)) is not None:
        return words  # kernelParams.h 916; FlashInfer copies a tensor that is not contiguous
    tensors = [("query", problem.query)] + ([] if problem.out is None else [("out", problem.out)])
    return first_misaligned(tensors)


TRTLLM_GEN_DSV4 = Kernel(
    "trtllm-gen DSV4",
    calls=(AttentionCall.DSV4_DECODE,),
    gpus=(SM100,),
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
    limits=_limits,
)
