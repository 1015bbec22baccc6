"""Attention problems: a call's checked arguments, with the same field names for all of FlashInfer's functions. References
and kernels compute a problem. `lab.calls.features` lists what a kernel must support to compute it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from lab.calls.features import Feature, features_of_fields
from lab.calls.selection import check_selection, columns_in_use
from lab.names import LATENT_CALLS as LATENT_CALLS
from lab.names import AttentionCall

NVFP4_BLOCK = 16  # elements of head_dim under one e4m3 scale factor (FlashInfer 0.7.2, kv_cache_sf)
INTERLEAVED_TOKENS = 4  # tokens whose V scale factors trtllm-gen stores together (nvfp4_quantize_paged_kv_cache)
MASK_BITS_PER_WORD = 16  # XQA's draft mask is uint16 words, two per 32 draft tokens

HALF_DTYPES = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
NVFP4 = torch.uint8  # two e2m1 values per byte, with e4m3 scale factors in a separate tensor

Scale = float | torch.Tensor
AnyProblem = TypeVar("AnyProblem", bound="AttentionProblem")


@dataclass(frozen=True, eq=False, kw_only=True)
class Softmax:
    """The scales of Q·K^T and of P·V, and the sinks. The class is a base of the classes that need these three fields."""

    bmm1_scale: Scale = 1.0  #: factor of Q·K^T
    bmm2_scale: Scale = 1.0  #: factor of P·V
    #: float32 [num_qo_heads], one logit per head, whose exponential is added to the softmax's denominator; or None
    sinks: torch.Tensor | None = None

    def terms(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(Softmax)}


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionProblem(Softmax):
    """The checked arguments of one attention call. Calls of all types have the same field names. Subclasses add K and V."""

    call: AttentionCall  #: the call that defined the problem
    query: torch.Tensor  #: [num_rows, num_qo_heads, head_dim]
    #: int32 or uint32 [batch_size], number of keys of each request, including the keys of its query tokens
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None  #: int32 [batch_size + 1], or None when every request has `max_q_len` query rows
    #: int32 [batch_size + 1], running sum of the requests' keys, or in a paged call of their pages; None in a decode call
    cu_seqlens_kv: torch.Tensor | None
    max_q_len: int  #: the caller's upper bound of the query rows of one request
    max_kv_len: int  #: the caller's upper bound of the keys of one request
    #: True: row i of a request with q rows and L keys is at position L - q + i and sees the keys up to this position. False:
    #: every row sees all keys of its request.
    causal: bool = True
    window_left: int = -1  #: a row at position p sees keys p - window_left … p; -1 sees all
    #: the call's tensors or dtype for the results, and whether it returns the LSE
    out: torch.Tensor | None
    out_dtype: torch.dtype
    lse: torch.Tensor | None = None
    return_lse: bool = False
    #: a kernel may skip the keys of a row whose exp(logit - largest logit of the row) is below skip_softmax / L, where L is the
    #: number of keys of the request and logits exclude sinks. The references skip none. 0: no key may be skipped. The threshold
    #: is FlashInfer 0.7.2's (decode.py 3865), whose kernels skip whole tiles (prefill.py 8384, arxiv.org/abs/2512.12087).
    skip_softmax: float = 0.0

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[-1]

    def kv_lens(self) -> list[int]:
        """Return the number of keys of each request (block-sparse: the largest number over its K/V heads). Synchronises."""
        lengths = self.seq_lens.cpu().to(torch.int64)
        return (lengths.amax(dim=0) if lengths.dim() == 2 else lengths).tolist()

    @property
    def num_rows(self) -> int:
        return self.query.shape[0]

    @property
    def has_no_rows(self) -> bool:
        """Return True if no request has a query row. The query may still have padding rows."""
        return min(self.num_rows, self.batch_size, self.max_q_len) == 0

    @property
    def num_qo_heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (K, V), each [num_pages, num_kv_heads, page_size, dim], or [num_tokens, num_kv_heads, dim] without pages."""
        raise NotImplementedError

    @property
    def num_kv_heads(self) -> int:
        return self.kv[0].shape[1]

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def v_head_dim(self) -> int:
        return self.kv[1].shape[-1] * (2 if self.kv_dtype == NVFP4 else 1)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.kv[0].dtype

    def row_offsets(self) -> list[int]:
        """Return the first query row of each request, followed by the end of the last request's rows. Synchronises."""
        if self.cu_seqlens_q is None:
            return list(range(0, self.num_rows + 1, self.max_q_len))
        return self.cu_seqlens_q.tolist()

    def q_lens(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.row_offsets())]

    @property
    def scales(self) -> tuple[Scale, Scale]:
        return self.bmm1_scale, self.bmm2_scale

    def features(self) -> frozenset[Feature]:
        """Return the features that a kernel must support to compute the problem. No tensor's contents are read."""
        return features_of_fields(self)

    def check_values(self) -> None:
        """Check lengths, offsets and page ids, which are contents of tensors.

        The method `problem` of a call makes these checks if the tensors are on a CPU. On a GPU the checks would synchronise, so
        the caller makes them: `DecodeCall(...).problem().check_values()`.

        Raises:
            ValueError: a length is negative or exceeds `max_kv_len` or the page table; offsets do not start at 0, decrease or
                exceed the number of rows or keys; or a page id is outside the pool.
        """
        raise NotImplementedError

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (out, LSE) to write: the caller's tensors, or new ones. LSE is None if the call does not return an LSE."""
        out, lse = self.out, self.lse
        if out is None:
            shape = (*self.query.shape[:2], self.v_head_dim)
            out = torch.empty(shape, dtype=self.out_dtype, device=self.query.device)
        if lse is None and self.return_lse:
            lse = torch.empty(self.query.shape[:2], dtype=torch.float32, device=self.query.device)
        return out, lse

    def returned(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        return (out, lse) if self.return_lse else out


@dataclass(frozen=True, eq=False)
class PagedAttention(AttentionProblem):
    """The checked arguments of one attention call over a paged K/V cache."""

    #: views [num_pages, num_kv_heads, page_size, head_dim] (head_dim // 2 bytes for NVFP4), for any layout of the call. V's
    #: last dimension is smaller if V is a part of K (MLA).
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    #: int32 [batch_size, max_num_pages_per_seq]; the same tensor if K and V share page ids. In a block-sparse call
    #: [num_kv_heads, batch_size, max_num_pages_per_seq], and `seq_lens` is [num_kv_heads, batch_size]. With `selected` they
    #: have no columns.
    k_block_tables: torch.Tensor
    v_block_tables: torch.Tensor
    #: e4m3 views [num_pages, num_kv_heads, page_size, head_dim // 16], NVFP4 only
    k_scale_factors: torch.Tensor | None = None
    v_scale_factors: torch.Tensor | None = None
    v_scale_factors_interleaved: bool = False  #: True: in TRT-LLM's order, interleaved over 4 tokens
    mask: torch.Tensor | None = None  #: packed draft mask, uint16 [batch_size, q_len, 2 * ceil(q_len / 32)]; or None
    #: int32 [num_rows, num_columns] or None: the only entries that each row sees, as indices page * page_size + offset in the
    #: page. `lab.calls.selection` defines which cells are entries. With `selected`, `causal` and `window_left` have no effect.
    selected: torch.Tensor | None = None
    #: int32 [num_rows] or None: each row uses this number of first columns of `selected`
    selected_lens: torch.Tensor | None = None
    #: int32 [num_rows] or None: each row sees this number of first keys of its request, instead of the keys up to its position
    #: (`lab.calls.context_parallel`)
    num_visible: torch.Tensor | None = None

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_cache, self.v_cache

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[2]

    @property
    def is_block_sparse(self) -> bool:
        return self.k_block_tables.dim() == 3

    def of_kv_heads(self) -> "list[PagedAttention]":
        """Return one problem per K/V head of a block-sparse problem, with the head's pages, lengths and query heads. All
        tensors, also `out` and `lse`, are views of this problem's tensors. A problem that is not block-sparse returns [self].
        """
        if not self.is_block_sparse:
            return [self]
        found = []
        for head, table in enumerate(self.k_block_tables):
            of_rows, of_cache = (slice(head * count, (head + 1) * count) for count in (self.group, 1))
            parts = {
                **dict.fromkeys(("query", "out", "lse"), (slice(None), of_rows)),
                **dict.fromkeys(("k_cache", "v_cache", "k_scale_factors", "v_scale_factors"), (slice(None), of_cache)),
                "sinks": of_rows,
                "seq_lens": head,
            }
            views = {name: side[part] for name, part in parts.items() if (side := getattr(self, name)) is not None}
            found.append(replace(self, k_block_tables=table, v_block_tables=table, **views))
        return found

    def of_rows(self) -> "PagedAttention":
        """Return a problem in which each query row is a request, with the first `num_visible[row]` keys of its old request."""
        assert self.num_visible is not None
        offsets = torch.tensor(self.row_offsets(), device=self.seq_lens.device)
        end = int(offsets[-1])
        k_tables, v_tables = (
            table.repeat_interleave(offsets.diff(), dim=0) for table in (self.k_block_tables, self.v_block_tables)
        )
        return replace(
            self,
            num_visible=None,
            seq_lens=self.num_visible[:end],
            k_block_tables=k_tables,
            v_block_tables=v_tables,
            cu_seqlens_q=torch.arange(end + 1, dtype=torch.int32, device=offsets.device),
            max_q_len=1,
        )

    def columns_in_use(self) -> torch.Tensor:
        """Return bool [num_rows, num_columns]: True for each column of `selected` that a row uses, even if it has -1 there."""
        assert self.selected is not None
        return columns_in_use(self.selected, self.selected_lens, self.seq_lens, self.row_offsets())

    def of_one_pool(self) -> "PagedAttention":
        """Return a problem with the same result, whose entries are in one pool (a DeepSeek-V4 call has two pools)."""
        return self

    def check_values(self) -> None:
        if self.is_block_sparse:
            for head, problem in enumerate(self.of_kv_heads()):
                try:
                    problem.check_values()
                except ValueError as error:
                    raise ValueError(f"K/V head {head} of a block-sparse call: {error}") from error
            return
        lengths, columns = self.seq_lens.tolist(), self.k_block_tables.shape[1]
        if self.selected is not None:
            check_lengths(self, lengths, "max_seq_len")
            lens = None if self.selected_lens is None else self.selected_lens[: self.row_offsets()[-1]]
            cells = self.columns_in_use() & (self.selected >= 0)
            self._check_selection(lens, cells)
            return
        capacity = columns * self.page_size
        for request, length in enumerate(lengths):
            if length > capacity:
                raise ValueError(
                    f"seq_lens[{request}] = {length} needs {-(-length // self.page_size)} pages of {self.page_size}, "
                    f"but block_tables has {columns} columns ({capacity} tokens): widen the table"
                )
        check_lengths(self, lengths, "max_seq_len/max_kv_len")
        live_pages = torch.tensor([-(-length // self.page_size) for length in lengths], device="cpu")
        live = torch.arange(columns, device="cpu").unsqueeze(0) < live_pages.unsqueeze(1)
        self._check_page_ids("K", self.k_block_tables, live)
        if self.v_block_tables is not self.k_block_tables:
            self._check_page_ids("V", self.v_block_tables, live)

    def _check_selection(self, lens: torch.Tensor | None, cells: torch.Tensor) -> None:
        assert self.selected is not None
        check_selection(self.selected, lens, cells, self.k_cache.shape[0] * self.page_size)

    def _check_page_ids(self, kind: str, table: torch.Tensor, live: torch.Tensor) -> None:
        ids, num_pages = table.cpu(), self.k_cache.shape[0]
        wrong = (live & ((ids < 0) | (ids >= num_pages))).nonzero()
        if len(wrong):
            request, column = wrong[0].tolist()
            raise ValueError(
                f"block_tables: {kind} page id {ids[request, column].item()} of request {request}, column {column} is "
                f"outside the pool of {num_pages} pages, and seq_lens says it is live: correct the table or the length"
            )


def check_lengths(problem: AttentionProblem, lengths: Sequence[int], bound: str) -> None:
    """Raise ValueError if `lengths` (keys per request) or the offsets of the query rows are invalid. `bound` is the name of the
    argument that the error calls the upper limit of a length, such as "max_seq_len".
    """
    for request, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"seq_lens[{request}] = {length} is negative; a request without keys has length 0")
        if length > problem.max_kv_len:
            raise ValueError(f"seq_lens[{request}] = {length} exceeds {bound} = {problem.max_kv_len}: raise the bound")
    if problem.cu_seqlens_q is not None:
        offsets = problem.cu_seqlens_q.tolist()
        if offsets[0] != 0 or offsets[-1] > problem.num_rows:
            raise ValueError(
                f"cum_seq_lens_q must start at 0 and stay within the {problem.num_rows} query rows (rows after its end are "
                f"padding), got {offsets[0]} … {offsets[-1]}"
            )
        widths = [after - before for before, after in itertools.pairwise(offsets)]
        if any(width < 0 for width in widths):
            raise ValueError(f"cum_seq_lens_q = {offsets} decreases; it must be a running sum")
        if max(widths, default=0) > problem.max_q_len:
            raise ValueError(
                f"cum_seq_lens_q has a request of {max(widths)} rows, more than max_q_len = {problem.max_q_len}: raise "
                "max_q_len"
            )
    if problem.cu_seqlens_kv is not None:
        offsets, expected = problem.cu_seqlens_kv.tolist(), list(itertools.accumulate(lengths, initial=0))
        size = getattr(problem, "page_size", 1)
        pages = list(itertools.accumulate((-(-length // size) for length in lengths), initial=0))
        if offsets not in (expected, pages):
            raise ValueError(f"cum_seq_lens_kv = {offsets} is not the running sum of seq_lens: expected {expected}")


def mask_words(q_len: int) -> int:
    """Return the number of uint16 words in a row of XQA's draft mask: two for each group of up to 32 draft tokens."""
    return 2 * -(-q_len // 32)


def shown_draft_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Unpack a draft mask, given as int32 [batch, q_len, words], to bool [batch, row, token]: True if the row sees it."""
    bits = (mask.unsqueeze(-1) >> torch.arange(MASK_BITS_PER_WORD, device=mask.device, dtype=torch.int32)) & 1
    return bits.flatten(2)[:, :, : mask.shape[1]].bool()


def checked(problem: AnyProblem) -> AnyProblem:
    """Return the problem. If its tensors are on a CPU, first check its lengths, offsets, page ids, scales and sinks."""
    if problem.query.device.type == "cpu":
        problem.check_values()
        refuse_nan(problem, in_query=False)
    return problem


def refuse_nan(problem: AttentionProblem, in_query: bool = True) -> None:
    """Raise ValueError if a scale is not finite, a sink is NaN or plus infinity, or a query row that has keys contains NaN.

    If `in_query` is False, do not check the query: a serving engine fills the padding rows of a CUDA graph with any values, and
    the arguments of a call do not say which rows are padding.
    """
    for name, term in zip(("bmm1_scale", "bmm2_scale"), (problem.bmm1_scale, problem.bmm2_scale), strict=True):
        if isinstance(term, torch.Tensor) and not bool(term.isfinite().all()):
            raise ValueError(f"{name} must be finite, got {float(term)}")
    if problem.sinks is not None:
        name = "sinks" if isinstance(problem, PagedAttention) else "attention_sinks"
        unfit = problem.sinks.isnan() | (problem.sinks == math.inf)
        if bool(unfit.any()):
            head = int(unfit.nonzero()[0])
            value = float(problem.sinks[head])
            raise ValueError(f"{name}[{head}] is {value}: a sink is finite, or minus infinity for a head without one")
    if not in_query or problem.has_no_rows:
        return
    query = problem.query.to(torch.float32)  # a GPU has no isnan of e4m3
    rows = query.isnan().flatten(1).any(dim=1).tolist()
    offsets = problem.row_offsets()
    for request, kv_len in enumerate(problem.kv_lens()):
        for row in range(*offsets[request : request + 2]) if kv_len else ():
            if rows[row]:
                raise ValueError(f"query holds NaN in row {row}, of request {request}, which would make its output NaN")
