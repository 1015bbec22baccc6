"""One forward pass of latent attention (MLA) as data: which mode, how long the requests are, what the tensors hold."""

from dataclasses import dataclass

import torch

from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.lengths import DraftAttention
from lab.workloads.attention_case import short_repr
from lab.workloads.forward_case import DTYPES, Inputs


@dataclass(frozen=True, repr=False)
class MLACase:
    """One pass on the MLA decode kernel; its `repr` is an expression that makes it again, defaults left out.

    Attributes:
        mode: DECODE, TARGET_VERIFY, DRAFT_EXTEND or DRAFT_EXTEND_V2.
        prefix_lens: tokens of each request before this pass's; at least one request.
        q_lens: query rows of each request: its new tokens. 1 throughout in DECODE.
        draft_step: for a draft decode step, its number s from 0: the query is the last of s + 1 draft tokens. Else None.
        attention: which keys a draft step counts, as SGLang's backend (MLA) or with the drafted ones (MLA_WITH_OFFSET).
        page_size: tokens per page, 32 or 64.
        num_qo_heads, kv_lora_rank, qk_rope_head_dim: of one layer on one GPU; DeepSeek-V3 has 128 heads, 512 and 64.
        dtype, kv_dtype: of query and output (float16 or bfloat16), and of the cache (the same or float8_e4m3fn).
        inputs: what the tensors hold.
        seed: of everything drawn.

    Raises:
        TypeError: a dtype that the judge has no bound for.
        ValueError: a number out of range, or an argument that means nothing in the mode.
    """

    mode: ForwardMode
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    attention: DraftAttention = DraftAttention.MLA
    page_size: int = 64
    num_qo_heads: int = 16
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    inputs: Inputs = Inputs.RANDOM
    seed: int = 0

    def __post_init__(self) -> None:
        mode = self.mode
        decodes = mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend(include_v2=True)
        if not decodes:
            raise ValueError(f"{mode!r} does not run on the MLA decode kernel")
        if not self.q_lens or len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(
                f"prefix_lens {self.prefix_lens} and q_lens {self.q_lens}: one each per request, at least one"
            )
        if min(self.prefix_lens) < 0 or min(self.q_lens) < 1:
            raise ValueError(f"prefix_lens {self.prefix_lens} must be >= 0 and q_lens {self.q_lens} >= 1")
        if mode.is_decode() and set(self.q_lens) != {1}:
            raise ValueError(f"DECODE has one row for every request, not {self.q_lens}")
        if len(set(self.q_lens)) > 1 and not mode.is_draft_extend():
            raise ValueError(f"{mode!r} has equally many rows for every request, not {self.q_lens}")
        if self.draft_step is not None and (not mode.is_decode() or self.draft_step < 0):
            raise ValueError(
                f"draft_step={self.draft_step} belongs to DECODE and must be 0 or more; else leave it None"
            )
        if self.dtype not in DTYPES or self.kv_dtype not in (self.dtype, torch.float8_e4m3fn):
            raise TypeError(f"dtype={self.dtype} must be one of {DTYPES}, kv_dtype={self.kv_dtype} the same or e4m3")

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def head_dim(self) -> int:
        """Of queries and of cache entries."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Of the head before absorption, whose part without position is a quarter of the latent vector, as DeepSeek-V3's."""
        return float((self.kv_lora_rank // 4 + self.qk_rope_head_dim) ** -0.5)

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens that this pass adds to each request; a draft step stands behind those of the steps before it."""
        return self.q_lens if self.draft_step is None else tuple(self.draft_step + 1 for _ in self.q_lens)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens of each request with this pass's."""
        return tuple(prefix + new for prefix, new in zip(self.prefix_lens, self.new_tokens, strict=True))

    @property
    def seen_lens(self) -> tuple[int, ...]:
        """Keys that the last row of each request sees: a draft step of SGLang's sees none that was drafted, its own neither."""
        leaves_out_draft = self.draft_step is not None and self.attention is DraftAttention.MLA
        return self.prefix_lens if leaves_out_draft else self.kv_lens

    @property
    def visible_pairs(self) -> int:
        """(query row, key) pairs that are visible, over all requests."""
        return sum(
            seen - q_len + row + 1
            for seen, q_len in zip(self.seen_lens, self.q_lens, strict=True)
            for row in range(q_len)
        )

    @property
    def operations(self) -> int:
        """Floating-point operations of the two products: per pair and query head, 2 · head_dim and 2 · kv_lora_rank."""
        return 2 * self.num_qo_heads * self.visible_pairs * (self.head_dim + self.kv_lora_rank)

    @property
    def bytes_moved(self) -> int:
        """Bytes that must move at least once: each visible entry, key and value in one, and queries read, outputs written."""
        rows = sum(self.q_lens) * self.num_qo_heads * (self.head_dim + self.kv_lora_rank) * self.dtype.itemsize
        return sum(self.seen_lens) * self.head_dim * self.kv_dtype.itemsize + rows

    @property
    def max_context_len(self) -> int:
        """The engine's bound: past every request."""
        return max(self.kv_lens) + 2 * self.page_size + 1
