"""SGLang's DSA backend (DeepSeek sparse attention) on TRT-LLM: MLA decode calls whose query rows see only selected entries.

* indexer: the part of the model that selects positions of its request for each query row. Its output is an input here.
* place: the index of a cache entry, page * page_size + offset in the page.

In the call each query row is a request of its own. Its row of ``block_tables`` has places, not pages.

The sources in SGLang 0.5.23 are `dsa_backend.py` and the kernels in `sglang/kernels/ops/attention/dsa/`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import RebuildingBackend, cast_to, in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_cache import PagedLatentCache, ShardedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, check_attends, seen_by_rows, uncounted_tokens
from lab.metadata.mla.backend import MLALayer, layer_arguments, merge_ranks, mla_query_dtype
from lab.metadata.mla.context_parallel import DecodeContextParallel, page_size_of_rank
from lab.metadata.mla.metadata import check_mla, longest_request

NO_ENTRY = -1  # the value of columns that select no entry
TOP_K_MULTIPLE = 4  # `_pad_trtllm_sparse_page_table` rounds the number of columns up to it


@dataclass(frozen=True)
class Indexer:
    """The sizes of the model's indexer, which selects the positions that each query row attends to."""

    #: largest number of positions in whole groups that are selected for a row (``index_topk``)
    topk: int = 2048
    #: number of neighbouring positions that are selected together (``index_kpool``). The positions after the last whole group
    #: are selected in addition
    group: int = 1

    def selected_lens(self, seen: Tensor) -> Tensor:
        """Return how many positions are selected for each query row. `seen` has the numbers of tokens that the rows see."""
        grouped = seen // self.group * self.group
        return grouped.clamp(max=self.topk) + seen - grouped


@dataclass(frozen=True, eq=False)
class DSAMetadata:
    """The metadata of a pass with the sparse MLA decode call: lengths, and a page table for pages of one token."""

    #: ``[num_rows, max_context_len]`` int32, the cache index of each position of the row's request; -1 in padding rows
    page_table_1: Tensor
    #: ``[num_rows]`` int32, the call's ``seq_lens``: the tokens that a row sees in a decode, its selected tokens in other
    #: modes, 0 in padding rows
    seq_lens: Tensor
    max_seq_len: int  #: an upper bound of the tokens of one request, computed on the host

    def places(self, topk_indices: Tensor) -> Tensor:
        """Return the cache index, page * page_size + offset, of each selected position; -1 for none: int32 ``[num_rows,
        columns]``, where the columns are `top_k` rounded up to a multiple of 4.

        `topk_indices`, ``[at most num_rows, top_k]`` int32, has the positions that the model's indexer selected in the row's
        request, and -1 for none. For missing rows nothing is selected.
        """
        num_missing = len(self.seq_lens) - len(topk_indices)
        padding = (0, -topk_indices.shape[1] % TOP_K_MULTIPLE, 0, num_missing)
        selected = torch.nn.functional.pad(topk_indices, padding, value=NO_ENTRY)
        places = self.page_table_1.gather(1, selected.clamp(min=0).long())
        return places.masked_fill(selected < 0, NO_ENTRY)


def build_dsa_metadata(batch: ForwardBatch, pool: KVPool, indexer: Indexer, dcp_size: int = 1) -> DSAMetadata:
    """Build the metadata of one eager pass in new tensors (SGLang 0.5.23). With decode context parallelism on `dcp_size` GPUs,
    `pool` is the pool of the whole group, and all GPUs have the same metadata.

    ================================  ======================================================================
    mode                              metadata's seq_lens of row j of a request with q rows
    ================================  ======================================================================
    DECODE, IDLE, every draft step    batch.seq_lens, which the indexer does not limit
    TARGET_VERIFY                     indexer.selected_lens(batch.seq_lens + j + 1)
    DRAFT_EXTEND_V2, the prefills     indexer.selected_lens(max(batch.seq_lens - q + j + 1, 0))
    ================================  ======================================================================

    ``max_seq_len`` is the largest of ``seq_lens_cpu``, plus the rows of a verification. Without ``seq_lens_cpu`` it is the
    pool's ``max_context_len``, as in SGLang's graphs; SGLang's eager pass reads the device.
    """
    check_mla(pool, page_size=page_size_of_rank(pool, dcp_size))
    check_attends(batch, pool)
    mode = batch.forward_mode
    if mode.query_rows.are_unequal_drafts:
        raise ValueError(
            f"{mode!r} is no mode of DSA (SGLang 0.5.23), which verifies and extends drafts of equally many rows: use "
            "TARGET_VERIFY or DRAFT_EXTEND_V2"
        )
    request, seen, is_padding = seen_by_rows(batch)
    seq_lens = seen if mode.query_rows is QueryRows.ONE else indexer.selected_lens(seen)
    places = pool.physical_slots(pool.req_to_token[batch.req_pool_indices[request]])
    return DSAMetadata(
        page_table_1=places.masked_fill(is_padding[:, None], NO_ENTRY).to(torch.int32),
        seq_lens=seq_lens.masked_fill(is_padding, 0).to(torch.int32),
        max_seq_len=min(
            longest_request(batch, pool) + uncounted_tokens(batch, DraftAttention.MLA), pool.max_context_len
        ),
    )


@dataclass(frozen=True, eq=False)
class DSABackend(RebuildingBackend[DSAMetadata]):
    """Builds metadata and makes sparse MLA decode calls as SGLang's DSA backend does with ``trtllm`` for decode and prefill."""

    implementation: Any = None
    indexer: Indexer = field(default_factory=Indexer)
    query_dtype: torch.dtype | None = None
    #: number of GPUs of decode context parallelism. With more than 1, an attention is one call per GPU, and a merge by LSEs
    dcp_size: int = 1

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> DSAMetadata:
        return build_dsa_metadata(batch, pool, self.indexer, self.dcp_size)

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: DSAMetadata,
        layer: MLALayer,
        query: Tensor,
        cache: PagedLatentCache | ShardedLatentCache,
        *,
        max_context_len: int | None = None,
        out: Tensor,
        topk_indices: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Return a function that computes one layer's attention to selected tokens and writes `out`. Rows of `out` beyond the
        rows in `metadata` become 0.

        `topk_indices`, ``[rows, top_k]`` int32, has the positions that are selected in each row's request, -1 for none; each
        call reads it again. In a decode it may have as many rows as the query; rows beyond those in `metadata` are not read
        (`_trim_trtllm_decode_dp_padding`).
        """
        rows = len(metadata.seq_lens)
        most_rows = len(query) if batch.forward_mode.query_rows is QueryRows.ONE else rows
        if topk_indices is None or len(topk_indices) > most_rows or rows > len(query):
            given_rows = None if topk_indices is None else len(topk_indices)
            raise ValueError(
                f"topk_indices has {given_rows} rows, the metadata {rows} and the query {len(query)}: pass positions for at "
                "most the metadata's rows (in a decode: the query's), and a query for each of the metadata's rows"
            )
        if rows == 0:
            return out.zero_
        given, steps = cast_to(self.query_dtype or mla_query_dtype(query.dtype, cache.storage.dtype), query)
        select = partial(metadata.places, topk_indices[:rows])
        places = select()
        steps.append(lambda: places.copy_(select()))
        make = partial(self._prepare, metadata.max_seq_len, layer, given[:rows])
        if isinstance(cache, PagedLatentCache):
            steps += make(cache, places, metadata.seq_lens, {"out": out[:rows].unsqueeze(1)})
            return in_turn([*steps, out[rows:].zero_], out)
        calls, lens = [], []
        for rank in range(self.dcp_size):
            dcp = DecodeContextParallel(self.dcp_size, rank)
            own, own_lens = dcp.own_entries(places)
            steps.append(partial(_write_own_entries, dcp, places, own, own_lens))
            results = {"out": out.new_empty(rows, 1, *out.shape[1:]), "return_lse": True}
            *counts, call = make(cache.of_rank(rank), own, own_lens, results)
            steps += counts
            calls.append(call)
            lens.append(own_lens)
        return in_turn([*steps, partial(merge_ranks, calls, lens, out[:rows]), out[rows:].zero_], out)

    def _prepare(
        self,
        max_seq_len: int,
        layer: MLALayer,
        query: Tensor,
        cache: PagedLatentCache,
        places: Tensor,
        seq_lens: Tensor,
        results: dict[str, Any],
    ) -> list[Callable[[], Any]]:
        steps: list[Callable[[], Any]] = []
        arguments = layer_arguments(layer, query.unsqueeze(1), cache) | {
            "block_tables": places.unsqueeze(1),
            "seq_lens": seq_lens,
            "max_seq_len": max_seq_len,
            "sparse_mla_top_k": places.shape[1],
            "workspace_buffer": None,
            **results,
        }
        if layer.qk_rope_head_dim == 0:
            arguments["sparse_mla_top_k_lens"] = torch.ones_like(seq_lens)
            steps.append(partial(count_entries, places, arguments["sparse_mla_top_k_lens"]))
        return [*steps, prepare(self.implementation, AttentionCall.MLA_DECODE.value, **arguments)]


def _write_own_entries(dcp: DecodeContextParallel, places: Tensor, own: Tensor, own_lens: Tensor) -> None:
    for written, computed in zip((own, own_lens), dcp.own_entries(places), strict=True):
        written.copy_(computed)


def count_entries(places: Tensor, top_k_lens: Tensor) -> None:
    """Count the elements of each row of `places` that are not -1, and write the numbers to `top_k_lens`, the argument
    ``sparse_mla_top_k_lens``.

    SGLang passes this argument for models without a rotary part. In each row -1 may only follow the entries. In a row of
    only -1, the first element becomes 0, and the row's number becomes 1, to prevent NaN in the output
    (`prepare_trtllm_nope_sparse_metadata`).
    """
    top_k_lens.copy_((places >= 0).sum(dim=1))
    places[:, 0].masked_fill_(top_k_lens == 0, 0)
    top_k_lens.clamp_(min=1)
