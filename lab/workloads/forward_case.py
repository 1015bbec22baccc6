"""Forward passes over paged K and V as data: mode, model, lengths of requests, and contents of tensors; their base class."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lab.calls.arguments import check_bool, check_int
from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, NVFP4_BLOCK, AttentionCall
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows, UncountedTokens
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.mha.backend import CallDtypes, CallSettings, TRTLLMMHABackend, splits_mixed_tail
from lab.metadata.mha.block_sparse import PAGE_SIZE, BlockSparseBackend, num_seen
from lab.metadata.mha.context_parallel import SHARDED_MODES
from lab.metadata.mha.vllm import Engine, VLLMBackend
from lab.workloads.attention_case import Contents, short_repr
from lab.workloads.geometries import Geometry, geometry
from lab.workloads.requests import PassLens

PASS_CONTENTS = (Contents.RANDOM, Contents.NEEDLES)  # contents that a pass can have; only single calls can have others
# Modes that compute attention. IDLE has no request, and PREBUILT finds its K/V in the cache.
ATTENDING_MODES = tuple(mode for mode in ForwardMode if mode not in (ForwardMode.IDLE, ForwardMode.PREBUILT))


class PassCase(PassLens):
    """A forward pass of one or more requests, as data. Its subclasses are frozen dataclasses."""

    mode: ForwardMode
    page_size: int  #: tokens per page
    dtype: torch.dtype  #: of query and output, float16 or bfloat16
    kv_dtype: torch.dtype  #: of the cache: the same or float8_e4m3fn
    #: the pool has virtual pages, which its `v2p` maps to pages of the cache, as in SGLang's unified pool
    virtual_slots: bool
    contents: Contents  #: one of `PASS_CONTENTS`
    seed: int  #: seed of all random numbers
    # A subclass that supports one of these declares the field.
    num_padding_rows: int = 0  #: number of query rows after the requests' rows, which belong to no request
    num_padding_requests: int = 0  #: number of padding requests, which have no rows and no keys and follow the requests
    encoder_only: bool = False  #: rows see all keys of their request

    __repr__ = short_repr

    @property
    def window_left(self) -> int:
        """Return the number of keys before a row's own key that the row sees; -1 for all."""
        return -1

    @property
    def seen_lens(self) -> tuple[int, ...]:
        """Return the number of keys that the last row of each request would see without a sliding window."""
        return self.kv_lens

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Return for each query row the number of tokens of its request up to and including the row's own token."""
        ends = zip(self.seen_lens, self.q_lens, strict=True)
        return tuple(position + 1 for seen, q_len in ends for position in range(seen - q_len, seen))

    @cached_property
    def max_context_len(self) -> int:
        """Return the engine's largest request length. It exceeds all `kv_lens`, so that page tables have unused columns."""
        return max(self.kv_lens) + 2 * self.page_size + 1

    @property
    def visible_pairs(self) -> int:
        if self.encoder_only:
            return sum(seen * q_len for seen, q_len in zip(self.seen_lens, self.q_lens, strict=True))
        return sum(row_len if self.window_left < 0 else min(row_len, self.window_left + 1) for row_len in self.row_lens)

    @property
    def visible_keys(self) -> int:
        """Return the number of keys that at least one row sees. A key that several rows or branches see counts once."""
        return sum(
            seen if self.window_left < 0 else min(seen, q_len + self.window_left)
            for seen, q_len in zip(self.seen_lens[:: self.topk], self.q_lens[:: self.topk], strict=True)
        )

    def check_requests(self) -> None:
        if self.mode not in ATTENDING_MODES:
            raise ValueError(f"{self.mode!r} computes no attention; there is nothing to judge")
        if len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(f"{len(self.prefix_lens)} prefix_lens for {len(self.q_lens)} q_lens: one each per request")
        if not self.q_lens:
            raise ValueError("q_lens=() is an empty batch; there is nothing to judge: give at least one request")
        if min(self.prefix_lens) < 0 or min(self.q_lens) < 1:
            raise ValueError(f"prefix_lens {self.prefix_lens} must be >= 0 and q_lens {self.q_lens} >= 1")
        rows = self.mode.query_rows
        if rows is QueryRows.ONE and set(self.q_lens) != {1}:
            raise ValueError(f"{self.mode.name} has one row for every request, not {self.q_lens}")
        if rows.are_uniform and len(set(self.q_lens)) > 1:
            raise ValueError(f"{self.mode!r} has equally many rows for every request, not {self.q_lens}")
        is_draft_step = self.mode.uncounted is UncountedTokens.DRAFT_STEP
        self.refuse_ignored(
            draft_step=(is_draft_step, "only ForwardMode.DECODE has draft steps"),
            num_draft_tokens=(rows.are_bounded, "only ForwardMode.RAGGED_VERIFY has most rows of a request"),
        )
        if self.draft_step is not None:
            remedy = f"the first draft step is 0, a frozen-KV draft {FROZEN_KV_STEP}, and a pass outside drafting None"
            check_int("draft_step", self.draft_step, FROZEN_KV_STEP, remedy)
        if self.draft_step == FROZEN_KV_STEP and min(self.prefix_lens) < 1:
            raise ValueError(
                f"prefix_lens={self.prefix_lens}: a row of a frozen-KV draft is at its request's last token, so each has one"
            )

    def refuse_ignored(self, **uses: tuple[bool, str]) -> None:
        """Raise ValueError if an unused field differs from its default. `uses`: field=(is it used?, text for the message)."""
        for name, (is_used, who_uses) in uses.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and not is_used:
                raise ValueError(
                    f"{name}={value!r} would be ignored in {self.mode!r}: {who_uses}; leave it {default!r}"
                )

    def check_tensors(self, quantised: Sequence[torch.dtype] = (E4M3,)) -> None:
        check_contents(self.contents)
        check_dtype(self.dtype)
        if self.kv_dtype not in (self.dtype, *quantised):
            others = " or ".join(map(str, quantised))
            raise TypeError(f"kv_dtype={self.kv_dtype} must be dtype, {self.dtype}, or {others}")


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in HALF_DTYPES:
        raise TypeError(f"dtype={dtype} must be torch.float16 or torch.bfloat16, the query's and the output's")


def check_contents(contents: Contents) -> None:
    if contents not in PASS_CONTENTS:
        raise ValueError(f"contents={contents!r} are of single calls: a pass has one of {PASS_CONTENTS}")


class GroupedLayer:
    """The sizes of a layer of grouped-query attention on one tensor-parallel rank. A base class of dataclasses."""

    geometry: str
    tensor_parallel: int = 1

    @cached_property
    def model(self) -> Geometry:
        return geometry(self.geometry).tensor_parallel(self.tensor_parallel)

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.model.num_qo_heads, self.model.head_dim

    out_shape = query_shape

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.model.num_kv_heads, self.model.head_dim),) * 2


@dataclass(frozen=True, repr=False)
class ForwardCase(GroupedLayer, PassCase):
    """One forward pass with grouped queries over paged K and V, as data. The base class `PassCase` describes the fields that
    have no comment here.

    Raises:
        TypeError: an argument has a wrong type, or the judge has no error bound for a dtype.
        ValueError: a number is out of range, or an argument has no meaning in the mode and would be ignored.
    """

    mode: ForwardMode  #: one of `ATTENDING_MODES`
    geometry: str  #: a name of `lab.workloads.GEOMETRIES`
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    #: number of branches of each request in a frozen-KV draft; 1 in other modes. prefix_lens and q_lens have one entry per
    #: branch. The branches of a request are consecutive and have equal lengths
    topk: int = 1
    page_size: int = 64  #: tokens per page, a power of two
    layout: KVLayout = KVLayout.NHD  #: of the pool
    tensor_parallel: int = 1  #: number of ranks; the layer is one rank's slice of the geometry
    sliding_window: bool = False  #: the layer has a sliding window and reads the sliding-window pool
    #: the attention call that a draft extend makes, decode or context; None: the engine's choice, or another mode
    draft_extend: AttentionCall | None = None
    #: the trailing requests with one new token each are computed by a decode call. Only in extends without speculation in which
    #: the query, after its cast, and the cache have the same dtype (`lab.metadata.mha.backend.splits_mixed_tail`)
    split_mixed_tail: bool = False
    #: K/V heads of each row see at most 16 pages, as in MiniMax-M3's decode and target verify; the layer has no sinks
    block_sparse: bool = False
    #: number of padding rows after the requests' query rows, in extends and ragged verifications
    num_padding_rows: int = 0
    #: each row sees all keys of its request, as in the draft of a block. Only in extends and TARGET_VERIFY, without a window
    encoder_only: bool = False
    decode_splits: int = 1  #: calls into which the engine divides a decode call, with requests sorted by length
    context_parallel: int = 1  #: ranks among which the new tokens are divided in zigzag order, in EXTEND and MIXED
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16  #: as in `PassCase`, or uint8, which is NVFP4
    #: e4m3 if the engine casts the query to e4m3 over a quantised cache, as SGLang does for trtllm-gen and fmha_v2; else None.
    #: Over an NVFP4 cache the output is then e4m3 too, before it is converted
    query_dtype: torch.dtype | None = None
    engine: Engine = Engine.SGLANG  #: the engine that makes the calls. All passes of vLLM have the mode EXTEND
    decode_threshold: int = 1  #: in vLLM, the largest number of rows of a request that the decode call computes
    #: in vLLM, number of padding requests, which have no rows and no keys and follow the requests, as in a CUDA graph. Only in
    #: passes of the decode call alone. `num_padding_rows` are their rows in the graph
    num_padding_requests: int = 0
    #: as in `AttentionCase`; None: the query's dtype after its cast. XQA on SM90 rounds the operands to e4m3 for an e4m3 cache
    #: and one query token
    arithmetic: torch.dtype | None = None
    virtual_slots: bool = False
    contents: Contents = Contents.RANDOM
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("topk", self.topk, 1, "it is the number of branches per request")
        check_int("decode_splits", self.decode_splits, 1, "1 leaves a decode call whole")
        check_int("num_padding_rows", self.num_padding_rows, 0, "it is the number of rows after the requests'")
        check_int("context_parallel", self.context_parallel, 1, "it is the number of ranks")
        check_int(
            "decode_threshold", self.decode_threshold, 1, "it is the most rows of a request in vLLM's decode call"
        )
        check_int("num_padding_requests", self.num_padding_requests, 0, "it is the number of requests after these")
        check_bool("encoder_only", self.encoder_only)
        check_bool("block_sparse", self.block_sparse)
        if self.draft_extend not in (None, AttentionCall.DECODE, AttentionCall.CONTEXT):
            raise TypeError(f"draft_extend={self.draft_extend!r} must be an AttentionCall, DECODE or CONTEXT")
        self.check_requests()
        self.check_tensors((E4M3, NVFP4))
        self._check_ignored()
        self._check_combinations()

    def _check_ignored(self) -> None:
        mode, topk, is_vllm = self.mode, self.topk, self.engine is not Engine.SGLANG
        takes_padding = self.interface is AttentionCall.CONTEXT or mode.query_rows.are_bounded
        is_whole = not self.split_mixed_tail and self.context_parallel == 1
        is_divisible = mode.query_rows.are_uniform and self.interface is AttentionCall.DECODE
        uses = {
            "draft_extend": (mode.extends_draft, "only DRAFT_EXTEND and DRAFT_EXTEND_V2 have a choice of the call"),
            "topk": (self.draft_step == FROZEN_KV_STEP, "only a frozen-KV draft has branches"),
            "decode_splits": (
                is_divisible or self.split_mixed_tail,
                "only decode calls with as many rows for every request are divided",
            ),
            "split_mixed_tail": (
                mode.is_prefill,
                "only extends without speculation, such as ForwardMode.MIXED, have a tail to split off",
            ),
            "num_padding_rows": (
                (takes_padding and is_whole) or is_vllm,
                "only a pass that makes the context call and no other, or a ragged verification, passes padding rows",
            ),
            "block_sparse": (
                mode is ForwardMode.TARGET_VERIFY or (mode is ForwardMode.DECODE and self.draft_step is None),
                "only plain decodes and target verifications are block-sparse",
            ),
            "encoder_only": (
                mode.is_prefill or mode is ForwardMode.TARGET_VERIFY,
                "SGLang's calls let rows see those after them in extends and in TARGET_VERIFY alone",
            ),
            **dict.fromkeys(("decode_threshold", "num_padding_requests"), (is_vllm, "it is vLLM's")),
        }
        if is_vllm:
            of_sglang = "block_sparse encoder_only split_mixed_tail decode_splits context_parallel virtual_slots"
            uses |= dict.fromkeys(of_sglang.split(), (False, "it is SGLang's"))
        self.refuse_ignored(**uses)
        if self.prefix_lens != tuple(prefix for prefix in self.prefix_lens[::topk] for _ in range(topk)):
            raise ValueError(
                f"prefix_lens={self.prefix_lens} with topk={topk}: give every request's length {topk} times in a row"
            )
        if self.encoder_only and (self.sliding_window or self.split_mixed_tail or self.context_parallel > 1):
            raise ValueError(
                "encoder_only=True goes with no sliding_window, split_mixed_tail or context_parallel: SGLang has no table of "
                "its rows in that pool, splits no tail off, and a rank's rows see no later rank's; leave them out"
            )
        others = (self.sliding_window, self.encoder_only, self.virtual_slots, self.decode_splits > 1)
        if self.block_sparse and (any(others) or self.page_size != PAGE_SIZE or self.kv_dtype != self.dtype):
            raise ValueError(
                f"block_sparse=True with page_size={self.page_size}: it has pages of {PAGE_SIZE} tokens and a cache of the "
                "query's dtype, and goes with no sliding_window, encoder_only, virtual_slots or decode_splits"
            )

    def _check_combinations(self) -> None:
        is_padded = self.num_padding_requests or self.num_padding_rows
        if self.engine is not Engine.SGLANG and self.mode is not ForwardMode.EXTEND:
            raise ValueError(f"mode={self.mode!r} is SGLang's: each pass of {self.engine.value} has ForwardMode.EXTEND")
        if self.engine is not Engine.SGLANG and is_padded and max(self.q_lens) > self.decode_threshold:
            raise ValueError(
                f"num_padding_requests={self.num_padding_requests} and num_padding_rows={self.num_padding_rows} with "
                f"q_lens={self.q_lens}: vLLM's graphs with padding have requests of at most decode_threshold rows, "
                f"{self.decode_threshold}"
            )
        if self.query_dtype not in (None, E4M3):
            raise TypeError(
                f"query_dtype={self.query_dtype} must be torch.float8_e4m3fn, or None for dtype, {self.dtype}"
            )
        if self.query_dtype is not None and self.kv_dtype == self.dtype:
            raise ValueError(
                f"query_dtype={self.query_dtype}: an engine casts no query over a cache of {self.kv_dtype}"
            )
        if self.query_dtype is None and self.kv_dtype == NVFP4 and self.interface is AttentionCall.CONTEXT:
            raise ValueError(
                "a context call over an NVFP4 cache is trtllm-gen's, which takes e4m3 queries: pass "
                "query_dtype=torch.float8_e4m3fn"
            )
        if self.split_mixed_tail and not splits_mixed_tail(self.dtypes.query, self.kv_dtype):
            raise ValueError(
                f"split_mixed_tail={self.split_mixed_tail} would be ignored with a query of {self.dtypes.query} and a cache of "
                f"{self.kv_dtype}: SGLang splits where both have one dtype; leave it False"
            )
        ranks = self.context_parallel
        if ranks > 1 and (self.mode not in SHARDED_MODES or min(self.q_lens) < 2 * ranks):
            raise ValueError(
                f"context_parallel={ranks} in {self.mode!r} with q_lens={self.q_lens} deals nothing to ranks: it takes EXTEND "
                f"or MIXED, and {2 * ranks} new tokens of each request"
            )
        if ranks > 1 and (self.split_mixed_tail or self.kv_dtype == NVFP4):
            raise ValueError(
                f"context_parallel={ranks}: SGLang splits off no mixed tail with it, and refuses NVFP4; leave "
                "split_mixed_tail False and take another kv_dtype"
            )
        check_int("page_size", self.page_size, 1, "it is the number of tokens per page, a power of two such as 64")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size} must be a power of two, 1 or more: kernels divide by shifts")
        if self.sliding_window and geometry(self.geometry).sliding_window is None:
            raise ValueError(f"{self.geometry} has no sliding-window layers: leave sliding_window False")

    @cached_property
    def interface(self) -> AttentionCall:
        """Return the function that the pass calls. If it calls both `AttentionCall.CONTEXT` and DECODE, return CONTEXT."""
        if self.engine is not Engine.SGLANG and max(self.q_lens) <= self.decode_threshold:
            return AttentionCall.DECODE
        return self.draft_extend or self.mode.mha_call or AttentionCall.DECODE

    def backend(self, implementation: Any = None) -> Any:
        """Return the engine's attention backend, which calls `implementation`; None is enough to build only metadata."""
        if self.block_sparse:
            return BlockSparseBackend(implementation, self.model.num_kv_heads)
        if self.engine is not Engine.SGLANG:
            return VLLMBackend(implementation, self.decode_threshold, uses_xqa=self.engine is Engine.VLLM_XQA)
        return TRTLLMMHABackend(
            implementation,
            self.draft_extend,
            dtypes=self.dtypes,
            settings=CallSettings(decode_splits=self.decode_splits),
            expand_encoder_only_verify=self.encoder_only,
            split_mixed_tail=self.split_mixed_tail,
            with_padding_rows=self.num_padding_rows > 0,
        )

    @cached_property
    def dtypes(self) -> CallDtypes:
        """Return the dtypes of the query and output that the attention calls get, after the engine's casts."""
        query = self.query_dtype or self.dtype
        return CallDtypes(query, E4M3 if query == E4M3 and self.kv_dtype == NVFP4 else self.dtype)

    @cached_property
    def window_left(self) -> int:
        return self.model.window_left if self.sliding_window else -1

    @property
    def visible_pairs(self) -> int:
        return sum(map(num_seen, self.row_lens)) if self.block_sparse else super().visible_pairs

    @property
    def visible_keys(self) -> int:
        """Return the least number of keys that a kernel reads: the rows of a block-sparse request may select the same pages."""
        return sum(map(num_seen, self.seen_lens)) if self.block_sparse else super().visible_keys

    @property
    def operations(self) -> int:
        return 4 * self.model.head_dim * self.model.num_qo_heads * self.visible_pairs

    @property
    def bytes_moved(self) -> int:
        model = self.model
        kv_bytes = 2 * self.visible_keys * model.num_kv_heads * model.head_dim * self.kv_dtype.itemsize
        if self.kv_dtype == NVFP4:
            kv_bytes = kv_bytes // 2 + kv_bytes // NVFP4_BLOCK
        return kv_bytes + 2 * sum(self.q_lens) * model.num_qo_heads * model.head_dim * self.dtype.itemsize
