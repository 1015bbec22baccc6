"""Build the arguments of TRT-LLM's MHA kernels for every forward mode, without reading the device on the host."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers
from lab.metadata.engine.backend import GraphMetadata, copy_tensors, prepare_passes, seq_len_offset
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import (
    check_attends,
    exclusive_cumsum,
    first_slots,
    host_lengths,
    key_lens,
    max_query_rows,
    query_rows,
    uniform_boundaries,
)
from lab.named_enum import NamedEnum


class MetadataBuilder(NamedEnum):
    """How the metadata for a CUDA graph is written: in one launch or in many. The written values are the same."""

    TORCH_OPERATIONS = "torch operations"  # many small launches, as in SGLang 0.5.13
    FUSED = "fused"  # one launch, as in 0.5.23


@dataclass(frozen=True, eq=False)
class TRTLLMMHAMetadata:
    """The metadata of one forward pass in SGLang's TRT-LLM MHA backend: lengths, offsets, and page tables.

    Attributes:
        encoder_cache_seqlens, encoder_page_table: ``[num_tokens]`` and ``[num_tokens, ceil(max_context_len / page_size)]``
            int32, the length and page table of each query row's request, for a verification on encoder-only layers. None
            without `expand_encoder_only_verify`.
    """

    #: ``[batch_size]`` int32, keys of each request, new tokens included (``seq_lens`` of FlashInfer's decode call)
    cache_seqlens_int32: Tensor
    #: largest number of query rows of a request (``q_len_per_req`` of a decode call, ``max_q_len`` of a context call)
    max_seq_len_q: int
    cu_seqlens_q: Tensor  #: ``[batch_size + 1]`` int32, first query row of each request
    cu_seqlens_k: Tensor  #: ``[batch_size + 1]`` int32, 0 followed by the running sum of ``cache_seqlens_int32``
    page_table: Tensor  #: contiguous ``[batch_size, ceil(max_context_len / page_size)]`` int32 (``block_tables``)
    #: like ``page_table``, with pages of the sliding-window pool; None without such a pool
    swa_page_table: Tensor | None = None
    #: ``[num_tokens]`` int64, the sliding-window slot that K and V of each query row are written to; None without such a pool
    swa_out_cache_loc: Tensor | None = None
    encoder_cache_seqlens: Tensor | None = None
    encoder_page_table: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        pool: KVPool,
        batch_size: int,
        max_seq_len_q: int,
        num_tokens: int,
        *,
        new: Callable[..., Tensor] = torch.zeros,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        expand_encoder_only_verify: bool = False,
    ) -> "TRTLLMMHAMetadata":
        """Allocate the metadata of a forward pass by `new`, a function such as torch.zeros. A given `page_table` or
        `cu_seqlens_q` is used in place of a new tensor. Sliding-window tensors exist only if the pool has such pages.
        """

        def int32(*shape: int) -> Tensor:
            return new(shape, dtype=torch.int32, device=pool.device)

        has_swa, width = pool.full_to_swa is not None, pool.block_table_width
        return cls(
            cache_seqlens_int32=int32(batch_size),
            max_seq_len_q=max_seq_len_q,
            cu_seqlens_q=int32(batch_size + 1) if cu_seqlens_q is None else cu_seqlens_q,
            cu_seqlens_k=int32(batch_size + 1),
            page_table=int32(batch_size, width) if page_table is None else page_table,
            swa_page_table=int32(batch_size, width) if has_swa else None,
            swa_out_cache_loc=new((num_tokens,), dtype=torch.int64, device=pool.device) if has_swa else None,
            encoder_cache_seqlens=int32(num_tokens) if expand_encoder_only_verify else None,
            encoder_page_table=int32(num_tokens, width) if expand_encoder_only_verify else None,
        )

    @property
    def seq_lens(self) -> Tensor:
        return self.cache_seqlens_int32

    @property
    def block_tables(self) -> Tensor:
        return self.page_table

    def leading(self, batch_size: int) -> "TRTLLMMHAMetadata":
        of_rows = ("swa_out_cache_loc", "encoder_cache_seqlens", "encoder_page_table")
        counts = dict.fromkeys(of_rows, batch_size * self.max_seq_len_q)
        counts |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), batch_size + 1)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        sliced: dict[str, Any] = {name: value[: counts.get(name, batch_size)] for name, value in tensors.items()}
        return replace(self, **sliced)

    def pass_buffers(
        self, seq_len_offset: int, query_rows: int | Tensor | None = None, out_cache_loc: Tensor | None = None
    ) -> PassBuffers:
        return PassBuffers(
            cache_seqlens=self.cache_seqlens_int32,
            cu_seqlens_k=self.cu_seqlens_k,
            cu_seqlens_q=self.cu_seqlens_q,
            page_table=self.page_table,
            swa_page_table=self.swa_page_table,
            out_cache_loc=None if self.swa_out_cache_loc is None else out_cache_loc,
            swa_out_cache_loc=self.swa_out_cache_loc,
            seq_len_offset=seq_len_offset,
            query_rows=query_rows,
        )


def build_mha_metadata(
    batch: ForwardBatch, pool: KVPool, *, expand_encoder_only_verify: bool = False
) -> TRTLLMMHAMetadata:
    """Build the metadata of one eager forward pass in new tensors (SGLang 0.5.23; ``DRAFT_EXTEND`` as in 0.5.13).

    ======================================  =======================  =======================  ====================
    mode                                    cache_seqlens            query rows per request   max_seq_len_q
    ======================================  =======================  =======================  ====================
    DECODE, IDLE                            seq_lens                 1                        1
    draft step s: DECODE with a SpecInfo    seq_lens + s + 1         1                        1
    TARGET_VERIFY, q = num_tokens // bs     seq_lens + q             q                        q
    RAGGED_VERIFY                           seq_lens                 extend_seq_lens          max(extend_seq_lens)
                                            + extend_seq_lens
    DRAFT_EXTEND, DRAFT_EXTEND_V2           seq_lens                 extend_seq_lens          max(extend_seq_lens)
    EXTEND, MIXED, SPLIT_PREFILL,           seq_lens                 extend_seq_lens          max(extend_seq_lens)
    DLLM_EXTEND
    ======================================  =======================  =======================  ====================

    ``seq_lens`` does not count draft tokens, hence the offsets: step s of a draft reads the s tokens of the earlier steps and
    its own. If no request of a prefill has a cached prefix, ``cu_seqlens_q`` and ``cu_seqlens_k`` are the same tensor. An eager
    pass takes its query rows from ``extend_seq_lens``, not from ``SpecInfo.num_accept_tokens`` and ``num_tokens_per_req``,
    which belong to graph replay.

    Column c of a page table has ``req_to_token[request, c * page_size] // page_size``, for the first ``ceil(cache_seqlens /
    page_size)`` columns, clamped to the table's width as in SGLang's fused kernel. Later cells are undefined in SGLang; here
    they hold page 0, the sink. A padded row, whose length is 0 or negative, has no pages; the
    running sum ``cu_seqlens_k`` adds its length unchanged.

    ``full_to_swa`` maps slots for the sliding-window table. If the map is wrong and has -1 for a slot of a request, the page is
    -1, as in the fused kernel (PR 29843). ``pool.v2p`` maps virtual pages for the full table. A virtual page that is not mapped
    becomes the sink (`build_kv_read_table`).

    `expand_encoder_only_verify` says that the model has encoder-only layers, whose rows also see later rows. A TARGET_VERIFY
    then has `encoder_cache_seqlens` and `encoder_page_table`. Other modes have none; SGLang refuses such a layer in a ragged
    verification. Raises ValueError in the mode PREBUILT, or if the batch lacks a number on the host that the mode needs.
    """
    check_attends(batch, pool)
    cache_seqlens, rows = key_lens(batch), query_rows(batch)
    cu_seqlens_q = cu_seqlens_k = exclusive_cumsum(cache_seqlens)
    if isinstance(rows, int):
        cu_seqlens_q = uniform_boundaries(batch.batch_size, rows, pool.device)
    elif rows is not None:
        cu_seqlens_q = exclusive_cumsum(rows)
    slots = first_slots(batch.req_pool_indices, cache_seqlens, pool)
    metadata = TRTLLMMHAMetadata(
        cache_seqlens_int32=cache_seqlens,
        max_seq_len_q=max_query_rows(batch),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        page_table=pool.pages(slots),
    )
    if pool.full_to_swa is not None:
        padding = (0, batch.num_tokens - len(batch.out_cache_loc))  # rows that are written to slot 0
        metadata = replace(
            metadata,
            swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32),
            swa_out_cache_loc=torch.nn.functional.pad(pool.swa_slots(batch.out_cache_loc), padding),
        )
    if not (expand_encoder_only_verify and batch.forward_mode.query_rows is QueryRows.DRAFT_TOKENS):
        return metadata
    return replace(
        metadata,
        encoder_cache_seqlens=cache_seqlens.repeat_interleave(metadata.max_seq_len_q),
        encoder_page_table=metadata.page_table.repeat_interleave(metadata.max_seq_len_q, dim=0),
    )


def mixed_tail_split(batch: ForwardBatch) -> int:
    """Return the number of requests that the context call computes, which are the first requests of the batch. The decode call
    computes the other requests, which have one new token each.

    SGLang 0.5.23 gives the decode call all requests at the end of the batch that have one new token. The scheduler puts the
    decoding requests of a MIXED batch there, but an EXTEND batch is split too, and the result may be 0. Raises ValueError for
    other modes.
    """
    if not batch.forward_mode.is_prefill or batch.spec_info is not None:
        raise ValueError(
            f"{batch.forward_mode!r} {'with' if batch.spec_info else 'without'} a SpecInfo has no tail of decoding "
            "requests to split off: only prefills without speculation do"
        )
    lengths = host_lengths(batch, "extend_seq_lens_cpu")
    return len(lengths) - len(list(takewhile(lambda length: length == 1, reversed(lengths))))


def allocate_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Allocate, uninitialised, the tensors that `build_mha_metadata` returns."""
    check_attends(batch, pool)
    metadata = TRTLLMMHAMetadata.allocate(
        pool, batch.batch_size, max_query_rows(batch), batch.num_tokens, new=torch.empty
    )
    return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k) if query_rows(batch) is None else metadata


def prepare_mha_metadata(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> Callable[[], None]:
    """Return a function that writes the values of `build_mha_metadata` to `metadata` in one Triton launch, as SGLang does since
    PR 29843. Each call reads the batch's tensors again. Cells of a page table after a request's last page are not written.
    """
    check_attends(batch, pool)
    written = metadata.pass_buffers(seq_len_offset(batch), query_rows(batch), batch.out_cache_loc)
    return prepare_passes([written], batch, pool)


class MHAGraphMetadata(GraphMetadata[TRTLLMMHAMetadata]):
    """The metadata buffers of one forward mode for the CUDA graphs of all batch sizes (SGLang's `init_cuda_graph_state`).

    Page tables and running sums are 0 at first. ``cu_seqlens_q`` of decode and verification is written only when the buffers
    are allocated.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        max_batch_size: int,
        builder: MetadataBuilder = MetadataBuilder.FUSED,
        expand_encoder_only_verify: bool = False,
    ) -> None:
        self.builder = builder
        width = mode.num_tokens_per_req
        preset = None if mode.in_extend_seq_lens else uniform_boundaries(max_batch_size, width, pool.device)
        buffers = TRTLLMMHAMetadata.allocate(
            pool,
            max_batch_size,
            width,
            max_batch_size * width,
            cu_seqlens_q=preset,
            expand_encoder_only_verify=expand_encoder_only_verify and mode.forward_mode is ForwardMode.TARGET_VERIFY,
        )
        super().__init__(mode, pool, buffers)

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        if self.builder is MetadataBuilder.TORCH_OPERATIONS:
            return partial(_copy_built, self.slices(view.batch_size), view, self.pool)
        rows: int | Tensor | None = None
        if self.mode.in_extend_seq_lens:
            uniform = self.mode.forward_mode.query_rows.are_uniform
            rows = self.mode.num_tokens_per_req if uniform else view.extend_seq_lens
        return self.prepare_launch(view, rows, None if self.buffers.encoder_page_table is None else _repeat_for_rows)


def _repeat_for_rows(metadata: TRTLLMMHAMetadata) -> None:
    lens, table, width = metadata.encoder_cache_seqlens, metadata.encoder_page_table, metadata.max_seq_len_q
    assert lens is not None
    assert table is not None
    lens.unflatten(0, (-1, width)).copy_(metadata.cache_seqlens_int32.unsqueeze(1))
    table.unflatten(0, (-1, width)).copy_(metadata.page_table.unsqueeze(1))


def _copy_built(metadata: TRTLLMMHAMetadata, view: ForwardBatch, pool: KVPool) -> None:
    built = build_mha_metadata(view, pool, expand_encoder_only_verify=metadata.encoder_page_table is not None)
    copy_tensors(built, metadata, () if view.forward_mode.query_rows.in_extend_seq_lens else ("cu_seqlens_q",))
