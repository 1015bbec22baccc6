"""One prefill of MLA before absorption as data: new tokens attend to each other, and to a cached prefix in chunks."""

from dataclasses import dataclass

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.workloads.attention_case import Contents, short_repr
from lab.workloads.pass_case import check_contents, check_dtype
from lab.workloads.requests import PassLens


@dataclass(frozen=True, repr=False)
class RaggedCase(PassLens):
    """One prefill of latent attention (MLA) by `trtllm_ragged_attention_deepseek`, as data."""

    prefix_lens: tuple[int, ...]  #: number of cached tokens of each request; negative: fewer keys than query rows
    q_lens: tuple[int, ...]  #: number of new tokens of each request; may be 0
    chunk: int = 64  #: largest number of cached tokens of a request in one call
    num_heads: int = 2  #: number of K/V heads
    group: int = 1  #: query heads per K/V head
    head_dim: int = 192  #: of queries and keys; 192 in DeepSeek-V3
    v_head_dim: int = 128  #: of values and outputs; 128 in DeepSeek-V3
    dtype: torch.dtype = torch.bfloat16  #: of all tensors: float16, bfloat16 or float8_e4m3fn
    window_left: int = -1  #: number of keys before its own position that a row sees; -1 for all
    contents: Contents = Contents.RANDOM  #: one of `PASS_CONTENTS`
    seed: int = 0  #: seed of all random numbers

    interface = AttentionCall.RAGGED_CONTEXT

    def __post_init__(self) -> None:
        if not self.q_lens or len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(
                f"prefix_lens {self.prefix_lens} and q_lens {self.q_lens}: one each per request, at least one"
            )
        if min(map(sum, zip(self.prefix_lens, self.q_lens, strict=True))) < 0 or min(self.q_lens) < 0 or self.chunk < 1:
            raise ValueError(
                f"q_lens {self.q_lens}, also with prefix_lens {self.prefix_lens}, must be >= 0, chunk {self.chunk} >= 1"
            )
        check_contents(self.contents)
        if self.dtype != E4M3:
            check_dtype(self.dtype)

    __repr__ = short_repr

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)
