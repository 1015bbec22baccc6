"""Dtypes, sizes and sentences that several families of kernels share."""

import torch

from lab.calls.problem import E4M3, HALF_DTYPES, Feature
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import Capability
from lab.kernels.support.kernel import Dtypes, dims, page_sizes

BF16, NVFP4 = torch.bfloat16, torch.uint8
HALVES = frozenset((q, q, q) for q in HALF_DTYPES)
LOAD_BYTES = 16  # of TMA and of FA2's copies
RAGGED_DIMS = ((192, 128), (128, 128), (256, 256))  # (head_dim, v_head_dim) of `trtllm_ragged_attention_deepseek`
TAKEN_PAGES = page_sizes(16, 32, 64, 128, words="is taken for page sizes")  # SGLang 0.5.23's
NO_LSE = "computes no LSE"
USUAL = frozenset({Feature.SEVERAL_ROWS, Feature.WINDOW, Feature.SINKS, Feature.V_SCALE, Feature.OUT})
STRIDED_QUERY = "needs a contiguous query"
MLA_DTYPES = Dtypes(
    frozenset({(BF16, BF16, BF16), (E4M3, E4M3, BF16)}),
    queries="takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}",
    kv="takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}",
    out="writes bfloat16, not {out}",
)
RAGGED_SIZES = dims("(head_dim, v_head_dim)", lambda problem: (problem.head_dim, problem.v_head_dim), *RAGGED_DIMS)


def unaligned_tensors(_capability: Capability | None, problem: RaggedAttention) -> str | None:
    """Return a ragged kernel's sentence about tensors that it cannot load 16 bytes at a time."""
    for side, tensor in (("query", problem.query), ("key", problem.key), ("value", problem.value)):
        steps = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:2]))
        if any(step % LOAD_BYTES for step in steps):
            return f"loads {LOAD_BYTES} bytes at a time: {side}'s start, rows and heads must lie that far apart"
    return None
