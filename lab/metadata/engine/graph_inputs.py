"""The forward mode of a set of CUDA graphs, and the input buffers that they read. A *captured size* is the batch size of a
graph.
"""

from dataclasses import dataclass

import torch

from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.lengths import PADDED_SEQ_LEN, max_query_rows
from lab.named_enum import NamedEnum


class MetadataPlace(NamedEnum):
    """When the metadata of a CUDA graph is written again: before each replay, or in each replay by the graph's own kernels."""

    BEFORE_REPLAY = "before the replay"  # SGLang 0.5.11 to 0.5.14
    IN_GRAPH = "in the graph"  # SGLang 0.5.23: each replay reads the current lengths, rows and slots


@dataclass(frozen=True)
class GraphMode:
    """The forward mode and the number of query rows per request of a set of CUDA graphs. The graphs differ in batch size."""

    forward_mode: ForwardMode  #: one with `in_graph`
    num_tokens_per_req: int = 1  #: largest number of query rows of a request
    #: the number of the draft step, from 0; None outside of draft steps. `FROZEN_KV_STEP` if the draft writes no K/V: the batch
    #: size is then the number of requests times ``topk``
    draft_step: int | None = None

    @classmethod
    def draft_decode(cls, step: int) -> "GraphMode":
        return cls(ForwardMode.DECODE, draft_step=step)

    @classmethod
    def draft_extend_v2(cls, spec_info: SpecInfo) -> "GraphMode":
        """Return a mode with ``spec_info.num_tokens_per_req`` query rows per request. If this number is not positive (SGLang
        0.5.13 at capture), use the largest element of ``num_accept_tokens``. Raises ValueError if both numbers are missing.
        """
        width = spec_info.num_tokens_per_req
        if width <= 0 and spec_info.num_accept_tokens is not None and spec_info.num_accept_tokens.numel():
            width = int(spec_info.num_accept_tokens.max())
        if width <= 0:
            raise ValueError(
                "draft extend V2 needs a width: SpecInfo.num_tokens_per_req, or num_accept_tokens at capture"
            )
        return cls(ForwardMode.DRAFT_EXTEND_V2, width)

    @property
    def in_extend_seq_lens(self) -> bool:
        return self.forward_mode.query_rows.in_extend_seq_lens

    @property
    def slots_per_req(self) -> int:
        """Return the number of tokens per request whose K and V a replay writes: 0 in a draft that writes no K/V."""
        return 0 if self.draft_step == FROZEN_KV_STEP else self.num_tokens_per_req

    def __post_init__(self) -> None:
        mode = self.forward_mode
        if not mode.in_graph:
            raise ValueError(
                f"{mode!r} is not run in CUDA graphs: use {', '.join(each.name for each in ForwardMode if each.in_graph)}"
            )
        if self.num_tokens_per_req < 1 or (mode.query_rows is QueryRows.ONE and self.num_tokens_per_req != 1):
            rows = "exactly 1 row" if mode.query_rows is QueryRows.ONE else "1 row or more"
            raise ValueError(f"num_tokens_per_req={self.num_tokens_per_req}: {mode!r} has {rows} per request")


class StaticInputs:
    """The input buffers that all CUDA graphs of one mode read. A graph of a smaller batch size reads slices of them."""

    def __init__(
        self, mode: GraphMode, max_batch_size: int, device: torch.device, padded_seq_len: int = PADDED_SEQ_LEN
    ) -> None:
        self.mode = mode
        self.max_batch_size = max_batch_size
        self.padded_seq_len = padded_seq_len
        width = mode.num_tokens_per_req
        self.seq_lens = torch.full((max_batch_size,), padded_seq_len, dtype=torch.int64, device=device)
        self.req_pool_indices = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.out_cache_loc = torch.zeros(max_batch_size * mode.slots_per_req, dtype=torch.int64, device=device)
        self.extend_seq_lens = torch.full((max_batch_size,), width, dtype=torch.int32, device=device)

    def view(self, batch_size: int) -> ForwardBatch:
        """Return the batch that the graph of size `batch_size` reads. Its host lists are the same in every replay."""
        mode, width = self.mode, self.mode.num_tokens_per_req
        lens = self.extend_seq_lens[:batch_size]
        return ForwardBatch(
            forward_mode=mode.forward_mode,
            req_pool_indices=self.req_pool_indices[:batch_size],
            seq_lens=self.seq_lens[:batch_size],
            out_cache_loc=self.out_cache_loc[: batch_size * mode.slots_per_req],
            num_tokens=batch_size * width,
            extend_seq_lens=lens if mode.in_extend_seq_lens else None,
            extend_seq_lens_cpu=[width] * batch_size if mode.in_extend_seq_lens else None,
            spec_info=SpecInfo.of(mode.forward_mode, width, draft_step=mode.draft_step, num_accept_tokens=lens),
        )

    def load(self, batch: ForwardBatch, batch_size: int) -> None:
        """Copy a batch into the buffers, padded to `batch_size` requests, without reading the device on the host.

        Padding requests have row 0 of the request table, 1 token (`padded_seq_len`), and slot 0 for new tokens. Slot 0 is in
        the page that is reserved for padding. Raises ValueError if the graphs have no room for the batch, or if the batch
        does not say how many query rows its requests have.
        """
        self._check(batch, batch_size)
        captured_slots = batch_size * self.mode.slots_per_req
        locations = batch.out_cache_loc[:captured_slots]  # in a ragged verification they may end with padding
        raw, slots = batch.batch_size, len(locations)
        if raw < batch_size or slots < captured_slots:
            self.seq_lens[:batch_size].fill_(self.padded_seq_len)
            self.req_pool_indices[:batch_size].zero_()
            self.out_cache_loc[:captured_slots].zero_()
            self.extend_seq_lens[:batch_size].fill_(self.mode.num_tokens_per_req)
        self.seq_lens[:raw].copy_(batch.seq_lens)
        self.req_pool_indices[:raw].copy_(batch.req_pool_indices)
        self.out_cache_loc[:slots].copy_(locations)
        if batch.extend_seq_lens is not None:
            self.extend_seq_lens[:raw].copy_(batch.extend_seq_lens)

    def _check(self, batch: ForwardBatch, batch_size: int) -> None:
        mode, width = self.mode, self.mode.num_tokens_per_req
        if batch.forward_mode is not mode.forward_mode:
            raise ValueError(f"these graphs run {mode.forward_mode!r}, not {batch.forward_mode!r}")
        step = None if batch.spec_info is None else batch.spec_info.speculative_step_id
        if mode.forward_mode.query_rows is QueryRows.ONE and step != mode.draft_step:
            raise ValueError(f"these graphs run draft step {mode.draft_step}, and the batch is of step {step}")
        if not batch.batch_size <= batch_size <= self.max_batch_size:
            raise ValueError(
                f"{batch.batch_size} requests do not fit into size {batch_size} of buffers for {self.max_batch_size}"
            )
        if mode.forward_mode.query_rows.are_uniform and batch.num_tokens != batch.batch_size * width:
            raise ValueError(
                f"the batch has {batch.num_tokens} rows for {batch.batch_size} requests, but these graphs were captured with "
                f"{width} rows for each: run it eagerly"
            )
        if mode.forward_mode.query_rows.are_unequal_drafts:
            places = {"extend_seq_lens": "the device (extend_seq_lens)"}
            if not mode.forward_mode.query_rows.are_bounded:  # else as in SGLang's `from_verify_lens_device`
                places["extend_seq_lens_cpu"] = "on the host (extend_seq_lens_cpu)"
            for name in places:
                if getattr(batch, name) is None:
                    raise ValueError(
                        f"{name} is None: {batch.forward_mode!r} needs the rows of each of the {batch.batch_size} "
                        f"requests, on {' and '.join(places.values())}"
                    )
        name, rows = "extend_seq_lens_cpu", list(batch.extend_seq_lens_cpu or ())
        if mode.forward_mode.query_rows.are_bounded and batch.extend_seq_lens_cpu is None:
            name, rows = "SpecInfo.num_draft_tokens", [max_query_rows(batch)]
        if max(rows, default=0) > width:
            raise ValueError(f"{name}={rows} has more than the {width} rows of a request")
