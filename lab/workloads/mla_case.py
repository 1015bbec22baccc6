"""One forward pass of latent attention (MLA) as data: its mode, lengths of requests, and contents of tensors."""

from dataclasses import dataclass
from typing import Any

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.calls.selection import WINDOW_COLUMNS
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.dsa import DSABackend, Indexer
from lab.metadata.mla.dsv4 import RATIOS, TOKENS_ALONE, WITHOUT_INDEXER, DSV4Backend
from lab.workloads.attention_case import Contents
from lab.workloads.forward_case import PassCase


class LatentLayer:
    """The sizes of a layer of latent attention (MLA) with absorbed projections. Base class of dataclasses."""

    num_qo_heads: int  #: sizes of one layer on one GPU: DeepSeek-V3 has 128 heads
    kv_lora_rank: int  #: DeepSeek-V3 and V4 have 512
    qk_rope_head_dim: int  #: DeepSeek-V3 has 64, DeepSeek-V4 0
    #: largest number of entries that an indexer selects for each row (DeepSeek sparse attention); None: no indexer
    index_topk: int | None
    #: number of tokens of a compressed entry of a DeepSeek-V4 layer; 0: a V4 layer without such entries; None: another layer
    compress_ratio: int | None
    attention: DraftAttention  #: decides whether lengths in a draft step count the drafted tokens
    dtype: torch.dtype = torch.bfloat16  #: of query and output
    query_dtype: torch.dtype | None = None  #: dtype to which the engine casts the query; None: `dtype`
    dcp_size: int = 1  #: number of GPUs that share each request (decode context parallelism)

    @property
    def interface(self) -> AttentionCall:
        return AttentionCall.MLA_DECODE if self.compress_ratio is None else AttentionCall.DSV4_DECODE

    def backend(self, implementation: Any = None) -> Any:
        query_dtype = self.query_dtype or self.dtype
        if self.compress_ratio is not None:
            return DSV4Backend(implementation, self.index_topk or 0, query_dtype=query_dtype)
        if self.index_topk is not None:
            return DSABackend(implementation, Indexer(self.index_topk), query_dtype, self.dcp_size)
        return TRTLLMMLABackend(implementation, self.attention, query_dtype=query_dtype)

    @property
    def head_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Return 1 / sqrt(kv_lora_rank // 4 + qk_rope_head_dim). DeepSeek-V3's head_dim before absorption is 512 // 4 + 64."""
        return float((self.kv_lora_rank // 4 + self.qk_rope_head_dim) ** -0.5)

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.num_qo_heads, self.head_dim

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.num_qo_heads, self.kv_lora_rank

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a token's cache entry and, with `compress_ratio`, of the compressed entry of several tokens."""
        return ((self.head_dim,),) * (1 if self.compress_ratio is None else 2)


@dataclass(frozen=True, repr=False)
class MLACase(LatentLayer, PassCase):
    """One forward pass of latent attention (MLA) over a paged cache. `PassCase` describes the fields that have no comment."""

    #: DECODE, TARGET_VERIFY, RAGGED_VERIFY, DRAFT_EXTEND or DRAFT_EXTEND_V2; if rows select entries, also a prefill
    mode: ForwardMode
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    num_draft_tokens: int | None = None
    #: DraftAttention.MLA, as SGLang's backend: the lengths in a draft step do not count the drafted tokens
    attention: DraftAttention = DraftAttention.MLA
    page_size: int = 64  #: tokens per page of one GPU, 32 or 64; with `compress_ratio` a multiple of 128
    index_topk: int | None = None
    compress_ratio: int | None = None
    dcp_size: int = 1  #: number of GPUs that share each request (decode context parallelism)
    num_padding_requests: int = 0  #: number of requests that data parallelism adds after the metadata was built
    num_padding_rows: int = 0  #: number of query rows after the requests' rows of a ragged verification
    num_qo_heads: int = 16
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    query_dtype: torch.dtype | None = None  #: e4m3 if the engine casts the query, as SGLang does over an e4m3 cache
    virtual_slots: bool = False
    contents: Contents = Contents.RANDOM
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_requests()
        if self.mode.mla_call is not AttentionCall.MLA_DECODE and not (self.is_sparse and self.mode.is_prefill):
            raise ValueError(f"{self.mode!r} computes no attention on the MLA decode kernel")
        if self.draft_step == FROZEN_KV_STEP:
            raise ValueError("draft_step=-1: a frozen-KV draft runs on MHA (SGLang 0.5.23); give a step from 0 on")
        rows = self.mode.query_rows
        if self.is_sparse:
            self._check_sparse()
        self.refuse_ignored(
            dcp_size=(
                rows is QueryRows.ONE or self.index_topk is not None,
                "without index_topk only ForwardMode.DECODE is sharded",
            ),
            num_padding_requests=(
                rows.are_uniform and self.dcp_size == 1,
                "only modes that have as many rows for every request, without dcp_size, are padded so",
            ),
            num_padding_rows=(rows.are_bounded, "only RAGGED_VERIFY has rows of padding"),
        )
        if self.query_dtype is not None and not self.query_dtype == self.kv_dtype == E4M3:
            raise ValueError(
                f"query_dtype={self.query_dtype}: an engine casts to e4m3, over an e4m3 cache; leave it None"
            )
        self.check_tensors()

    @property
    def is_sparse(self) -> bool:
        return self.index_topk is not None or self.compress_ratio is not None

    def _check_sparse(self) -> None:
        index_topk, ratio, rows, name = self.index_topk, self.compress_ratio, self.mode.query_rows, "DSA"
        if (index_topk is not None and index_topk < 1) or self.attention is not DraftAttention.MLA:
            raise ValueError(
                f"index_topk={index_topk} must be at least 1, and only {DraftAttention.MLA!r} goes with it: {self.attention!r}"
            )
        is_draft = self.mode.extends_draft or self.draft_step is not None
        if self.dcp_size > 1 and (ratio is not None or is_draft):
            raise ValueError(
                f"dcp_size={self.dcp_size}: SGLang 0.5.23 has no context parallelism in draft models of sparse attention or in "
                "DeepSeek-V4's: leave it 1"
            )
        is_refused = rows.are_unequal_drafts
        if ratio is not None:
            if ratio not in RATIOS or self.qk_rope_head_dim:
                raise ValueError(
                    f"compress_ratio={ratio} must be one of {RATIOS}, and qk_rope_head_dim 0: kv_lora_rank is the whole entry"
                )
            if bool(index_topk) != (ratio not in (TOKENS_ALONE, WITHOUT_INDEXER)):
                raise ValueError(
                    f"index_topk={index_topk} with compress_ratio={ratio}: those with 1, 2 and 4 have an indexer"
                )
            name, is_refused = "DSV4", self.mode.extends_draft and not rows.are_uniform
            if (ratio and is_draft) or self.virtual_slots:
                raise ValueError(f"compress_ratio={ratio}: a draft model has 0, and slots are not virtual with DSV4")
        if is_refused:
            raise ValueError(f"{self.mode!r} is no mode of {name}: leave index_topk and compress_ratio None")

    @property
    def seen_lens(self) -> tuple[int, ...]:
        leaves_out_draft = self.draft_step is not None and self.attention is DraftAttention.MLA
        return self.prefix_lens if leaves_out_draft else self.kv_lens

    @property
    def window_left(self) -> int:
        return -1 if self.compress_ratio is None else WINDOW_COLUMNS - 1

    def _num_selected(self, seen: int, rows: int = 1) -> int:
        """Return how many entries the last `rows` rows of a request of `seen` tokens read, if they select the same ones."""
        if self.compress_ratio is None:
            return min(seen, self.index_topk or seen)
        entries = seen // self.compress_ratio if self.compress_ratio else 0
        return min(seen, WINDOW_COLUMNS + rows - 1) + min(entries, self.index_topk or entries)

    @property
    def visible_pairs(self) -> int:
        return sum(map(self._num_selected, self.row_lens))

    @property
    def visible_keys(self) -> int:
        """Return the least number of cache entries that a kernel reads: all rows of a request may select the same entries."""
        return sum(map(self._num_selected, self.seen_lens, self.q_lens))

    @property
    def operations(self) -> int:
        return 2 * self.num_qo_heads * self.visible_pairs * (self.head_dim + self.kv_lora_rank)

    @property
    def bytes_moved(self) -> int:
        rows = sum(self.q_lens) * self.num_qo_heads * (self.head_dim + self.kv_lora_rank) * self.dtype.itemsize
        return self.visible_keys * self.head_dim * self.kv_dtype.itemsize + rows
