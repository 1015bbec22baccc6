"""One forward pass of a serving engine: its requests, their lengths, and the slots of the new tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lab.metadata.engine.forward_mode import ForwardMode, QueryRows

INDEX_DTYPES = (torch.int32, torch.int64)
# The `speculative_step_id` of every step of a frozen-KV draft, whose draft model reads the target model's K/V and writes none
# (SGLang 0.5.23, `frozen_kv_mtp_worker_v2.py`). Step s of another draft on MHA has s + 1 keys after ``seq_lens``; these have 0.
FROZEN_KV_STEP = -1


@dataclass(frozen=True, eq=False)
class SpecInfo:
    """The fields that speculative decoding adds to a batch, as in SGLang. A ``DECODE`` batch with a SpecInfo is a step of the
    draft model.

    Attributes:
        num_draft_tokens: number of query rows of each request in ``TARGET_VERIFY`` (read only if the batch is empty, else it is
            ``num_tokens // batch_size``); an upper bound of this number in ``RAGGED_VERIFY``; None in other modes.
        num_tokens_per_req: number of query rows of each request in ``DRAFT_EXTEND_V2``, or -1 if the number varies; ignored in
            other modes.
        num_accept_tokens: number of query rows of each request, its accepted tokens, in a ``DRAFT_EXTEND`` in a CUDA graph:
            int32 or int64, at least ``batch_size`` elements; else None.
        speculative_step_id: number of the draft step, from 0; `FROZEN_KV_STEP` in all steps of a draft that writes no K/V; None
            outside of draft steps. In SGLang each step's backend object has this number.
    """

    num_draft_tokens: int | None = None
    num_tokens_per_req: int = -1
    num_accept_tokens: Tensor | None = None
    speculative_step_id: int | None = None

    @classmethod
    def of(
        cls, mode: ForwardMode, num_rows: int, *, draft_step: int | None = None, num_accept_tokens: Tensor | None = None
    ) -> "SpecInfo | None":
        """Return the `SpecInfo` of a verification, draft extend or draft step; None for another pass, such as a prefill.
        `num_rows`: query rows per request; in a ragged verification an upper bound. `draft_step`: None if it is no draft step.
        """
        if mode.query_rows is QueryRows.DRAFT_TOKENS or mode.query_rows.are_bounded:
            return cls(num_draft_tokens=num_rows)
        if mode.query_rows is QueryRows.FIXED:
            return cls(num_tokens_per_req=num_rows)
        if mode.query_rows is QueryRows.ACCEPTED:
            return cls(num_accept_tokens=num_accept_tokens)
        return None if draft_step is None else cls(speculative_step_id=draft_step)

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} must be at least 1, or None outside verification"
            )
        if self.num_tokens_per_req != -1 and self.num_tokens_per_req < 1:
            raise ValueError(f"num_tokens_per_req={self.num_tokens_per_req} must be at least 1, or -1 when not fixed")
        if self.speculative_step_id is not None and self.speculative_step_id < FROZEN_KV_STEP:
            raise ValueError(
                f"speculative_step_id={self.speculative_step_id} must be 0 or more, {FROZEN_KV_STEP} in a frozen-KV draft, or "
                "None outside drafting"
            )
        if self.num_accept_tokens is not None:
            check_vector("num_accept_tokens", self.num_accept_tokens, INDEX_DTYPES)


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """The fields of SGLang's ForwardBatch from which attention metadata is built.

    A new batch is checked (TypeError, ValueError). The checks read shapes, dtypes and host lists, and no device tensor, so
    ``meta`` tensors are allowed.

    Attributes:
        req_pool_indices: ``[batch_size]`` int32 or int64, the row of each request in ``KVPool.req_to_token``; 0 is the reserved
            row that padding uses. A request may occur twice.
        seq_lens: ``[batch_size]`` int32 or int64, tokens of each request as the engine counts them in this mode: without the
            draft tokens in a draft step and in verification, with the new tokens everywhere else.
        out_cache_loc: at most ``[num_tokens]`` int64, the slots (page * page_size + offset) to which K and V of the query rows
            are written, in row order and without padding. The extend modes have one slot per token of
            ``extend_seq_lens_cpu``. A frozen-KV draft, which writes no K/V, has no slots.
        num_tokens: query rows, padding included. In verification a request's rows are its draft tokens in order: row j is at
            position ``seq_lens + j``.
        extend_seq_lens, extend_prefix_lens: ``[batch_size]`` int32 or int64, new and cached tokens of each request in the
            extend modes, or None. In a ragged verification ``extend_seq_lens`` is SGLang's ``verify_lens``.
        extend_seq_lens_cpu, extend_prefix_lens_cpu, seq_lens_cpu: the same numbers on the host, or None. An engine's scheduler
            knows the first two. ``seq_lens_cpu`` needs a copy from the device, so no mode requires it. In a prefill on MHA
            ``extend_prefix_lens_cpu=None`` says that no request has a cached prefix, as in SGLang. MLA needs the list.
    """

    forward_mode: ForwardMode
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    num_tokens: int
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    extend_seq_lens_cpu: Sequence[int] | None = None
    extend_prefix_lens_cpu: Sequence[int] | None = None
    seq_lens_cpu: Sequence[int] | None = None
    spec_info: SpecInfo | None = None

    @cached_property
    def writes_no_kv(self) -> bool:
        return self.spec_info is not None and self.spec_info.speculative_step_id == FROZEN_KV_STEP

    @cached_property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]

    def __post_init__(self) -> None:
        if not isinstance(self.forward_mode, ForwardMode):
            raise TypeError(f"forward_mode={self.forward_mode!r} must be a ForwardMode, such as ForwardMode.DECODE")
        self._check_tensors()
        self._check_host_lists()
        self._check_num_tokens()
        self._check_extend_rows()

    def _check_tensors(self) -> None:
        check_vector("seq_lens", self.seq_lens, INDEX_DTYPES)
        check_vector("out_cache_loc", self.out_cache_loc, (torch.int64,))
        of_requests = {
            name: getattr(self, name) for name in ("req_pool_indices", "extend_seq_lens", "extend_prefix_lens")
        }
        for name, tensor in of_requests.items():
            if tensor is not None or name == "req_pool_indices":
                check_vector(name, tensor, INDEX_DTYPES)
                _check_length(name, tensor.shape[0], self.batch_size)
        accepted = self.spec_info.num_accept_tokens if self.spec_info is not None else None
        if accepted is not None and accepted.shape[0] < self.batch_size:
            raise ValueError(
                f"num_accept_tokens has {accepted.shape[0]} entries, fewer than {self.batch_size} requests"
            )
        others = {"out_cache_loc": self.out_cache_loc, "num_accept_tokens": accepted}
        for name, tensor in (of_requests | others).items():
            if tensor is not None and tensor.device != self.seq_lens.device:
                raise ValueError(
                    f"{name} is on {tensor.device} but seq_lens on {self.seq_lens.device}: put the batch on one device"
                )

    def _check_host_lists(self) -> None:
        for name in ("seq_lens_cpu", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
            lengths = getattr(self, name)
            if lengths is None:
                continue
            if not isinstance(lengths, (list, tuple)) or not all(isinstance(length, int) for length in lengths):
                raise TypeError(
                    f"{name} must be a list or tuple of int, not {type(lengths).__name__}: "
                    "it exists so that nobody reads the device (a host tensor can be passed as tensor.tolist())"
                )
            _check_length(name, len(lengths), self.batch_size)
            if name != "seq_lens_cpu" and any(length < 0 for length in lengths):
                raise ValueError(f"{name}={list(lengths)} must not be negative")
        new, cached, total = self.extend_seq_lens_cpu, self.extend_prefix_lens_cpu, self.seq_lens_cpu
        if new is None or total is None or not self.forward_mode.is_prefill:
            return
        cached = [0] * len(new) if cached is None else cached
        for i, (prefix_len, extend_len, seq_len) in enumerate(zip(cached, new, total, strict=True)):
            if prefix_len + extend_len != seq_len:
                raise ValueError(
                    f"request {i}: extend_prefix_lens_cpu + extend_seq_lens_cpu = {prefix_len} + {extend_len}, but "
                    f"seq_lens_cpu = {seq_len}: in {self.forward_mode!r} seq_lens counts the new tokens"
                )

    def _check_num_tokens(self) -> None:
        bs, mode = self.batch_size, self.forward_mode
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 0:
            raise ValueError(f"num_tokens={self.num_tokens!r} must be an int of 0 or more")
        if self.out_cache_loc.shape[0] > self.num_tokens:
            raise ValueError(
                f"out_cache_loc names {self.out_cache_loc.shape[0]} slots for num_tokens={self.num_tokens} query rows: "
                "count the padding into num_tokens, not into out_cache_loc"
            )
        if self.writes_no_kv and self.out_cache_loc.shape[0] > 0:
            raise ValueError(
                f"out_cache_loc names {self.out_cache_loc.shape[0]} slots, but a frozen-KV draft writes no K and V: pass an "
                "empty tensor"
            )
        if mode is ForwardMode.DECODE and self.num_tokens != bs:
            raise ValueError(
                f"num_tokens={self.num_tokens} but DECODE has one query row per request, {bs}: pad requests, not rows"
            )
        drafts = mode.query_rows is QueryRows.DRAFT_TOKENS
        if drafts and bs > 0 and (self.num_tokens < bs or self.num_tokens % bs != 0):
            raise ValueError(
                f"num_tokens={self.num_tokens} is no positive multiple of the {bs} requests: "
                f"{mode.name} has the same number of query rows for each, so pad the requests with the rows"
            )

    def _check_extend_rows(self) -> None:
        mode, lengths = self.forward_mode, self.extend_seq_lens_cpu
        most = None if self.spec_info is None else self.spec_info.num_draft_tokens
        if mode.query_rows.are_bounded and most is None:
            raise ValueError(f"{mode!r} needs SpecInfo.num_draft_tokens, the most rows that a request may have")
        if lengths is None or not mode.query_rows.in_extend_seq_lens:
            return
        if mode.query_rows.are_bounded and most is not None and max(lengths, default=0) > most:
            raise ValueError(
                f"extend_seq_lens_cpu={list(lengths)} has a request of more rows than SpecInfo.num_draft_tokens={most}: "
                "a request verifies its draft tokens and no more"
            )
        rows, slots = sum(lengths), self.out_cache_loc.shape[0]
        if rows > self.num_tokens:
            raise ValueError(
                f"extend_seq_lens_cpu adds up to {rows} query rows, more than num_tokens={self.num_tokens}"
            )
        if slots != rows:
            raise ValueError(
                f"out_cache_loc names {slots} slots, but extend_seq_lens_cpu adds up to {rows} new tokens: "
                "pass one slot for each of them and none for padding rows"
            )
        width = self.spec_info.num_tokens_per_req if self.spec_info is not None else -1
        if mode.query_rows is QueryRows.FIXED and width > 0 and set(lengths) - {width}:
            raise ValueError(
                f"extend_seq_lens_cpu={list(lengths)}, but SpecInfo.num_tokens_per_req={width} fixes the rows of every "
                "request: pad to that width, or pass num_tokens_per_req=-1"
            )


def check_vector(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    allowed = " or ".join(str(dtype) for dtype in dtypes)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a {allowed} tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {allowed}: convert it with .to({dtypes[-1]})")
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected one dimension")


def _check_length(name: str, length: int, batch_size: int) -> None:
    if length != batch_size:
        raise ValueError(f"{name} has {length} entries for the {batch_size} requests of seq_lens")
