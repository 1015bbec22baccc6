"""What the lab's portable Triton kernels support. The sizes of their tiles are powers of two, and at least 16."""

from dataclasses import replace
from functools import partial

import torch

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall
from lab.gpus import FAMILIES
from lab.kernels.support.common import ANY_ROWS, CONTIGUOUS_LSE
from lab.kernels.support.kernel import Dtypes, Kernel, Sizes, head_dims, mla_dims, page_sizes, sizes, triples

OUT_DTYPES = (*HALF_DTYPES, E4M3, torch.float32)
DTYPES = Dtypes(
    frozenset().union(*(triples((q,), (q, E4M3), OUT_DTYPES) for q in (*HALF_DTYPES, E4M3))),
    queries="takes fp16, bf16 or e4m3 queries, not {q}",
    kv="takes K/V in the query's dtype or e4m3, not {kv}",
    out="writes fp16, bf16, e4m3 or float32, not {out}",
)
# The feature SKIP_SOFTMAX permits a kernel to skip keys. These kernels skip none.
HONOURED_BY_ALL = ANY_ROWS | {
    *(Feature.SINKS, Feature.TENSOR_SCALES, Feature.V_SCALE, Feature.LSE, Feature.SKIP_SOFTMAX)
}
triton_kernel = partial(Kernel, gpus=FAMILIES, uses_triton=True, on_cpu=True, dtypes=DTYPES)
RAGGED_DIMS = (16, 32, 64, 128, 256)  # v_head_dims; head_dims are one of these or a sum of two


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Return the largest power of two that is at most head_dim, and the remainder: (128, 64) for 192."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


PORTABLE = triton_kernel(
    "the portable Triton kernel",
    calls=(AttentionCall.DECODE, AttentionCall.CONTEXT),
    sizes=(head_dims(64, 128, 256, words="is built for head_dim"), page_sizes(16, 32, 64, 128)),
    honours=HONOURED_BY_ALL
    | {Feature.SEPARATE_TABLES, Feature.OTHER_V_STRIDES, Feature.NON_CAUSAL, Feature.WINDOW, Feature.MASK}
    | {Feature.BLOCK_SPARSE},
    says=CONTIGUOUS_LSE,
)
PORTABLE_MLA = triton_kernel(
    "the portable Triton MLA kernel",
    calls=(AttentionCall.MLA_DECODE,),
    sizes=(
        sizes("is built for a kv_lora_rank of", lambda problem: mla_dims(problem)[0], 16, 32, 64, 128, 256, 512),
        sizes("is built for a qk_rope_head_dim of", lambda problem: mla_dims(problem)[1], 0, 16, 32, 64),
    ),
    honours=HONOURED_BY_ALL | {Feature.TOP_K, Feature.TOP_K_LENS, Feature.STRIDED_TOP_K},
    says=CONTIGUOUS_LSE,
)
PORTABLE_DSV4 = replace(
    PORTABLE_MLA,
    name="the portable Triton kernel of DSV4",
    calls=(AttentionCall.DSV4_DECODE,),
    honours=PORTABLE_MLA.honours | {Feature.TWO_POOLS},
)
PORTABLE_RAGGED = triton_kernel(
    "the portable Triton ragged kernel",
    calls=(AttentionCall.RAGGED_CONTEXT,),
    sizes=(
        Sizes(
            f"is built for a head_dim of {', '.join(map(str, RAGGED_DIMS[:-1]))} and {RAGGED_DIMS[-1]}, or a sum of two of "
            f"them below {RAGGED_DIMS[-1]}",
            lambda problem: problem.head_dim,
            {*RAGGED_DIMS} | {high + low for high in RAGGED_DIMS[:-1] for low in RAGGED_DIMS if low < high},
        ),
        sizes("is built for a v_head_dim of", lambda problem: problem.v_head_dim, *RAGGED_DIMS),
    ),
    honours=HONOURED_BY_ALL | {Feature.NON_CAUSAL, Feature.WINDOW, Feature.STRIDED_LSE},
)
KERNELS = (PORTABLE, PORTABLE_MLA, PORTABLE_DSV4, PORTABLE_RAGGED)
