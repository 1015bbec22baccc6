"""The test fixtures for CUDA graphs of each backend: subclasses of `ReplayFixture`."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import KVLayout, PagedKVCache, PagedLatentCache
from lab.metadata.engine.lengths import uncounted_tokens
from lab.metadata.mha.backend import AttentionLayer
from lab.metadata.mha.block_sparse import NUM_PAGES
from lab.metadata.mla.backend import MLALayer
from lab.metadata.mla.dsv4 import DSV4Cache, DSV4Layer
from lab.metadata.mla.metadata import QueryLayout
from lab.references.errors import Truth
from lab.references.forward_metadata import dsa_forward_metadata, dsv4_forward_metadata
from lab.workloads.graph_case import GraphCase, MLAGraphCase, ReplayCase
from lab.workloads.inputs.expected_metadata import (
    wrong_block_sparse_metadata,
    wrong_dsa_metadata,
    wrong_dsv4_metadata,
    wrong_metadata,
    wrong_mla_metadata,
)
from lab.workloads.inputs.forward_pass import block_sparse_truth, mha_truth
from lab.workloads.inputs.mla_pass import draw_groups, draw_positions, mla_truth, new_mla_layer
from lab.workloads.inputs.replay_fixture import DTYPE, HUGE, SIZES, Cells, ReplayedPass, ReplayFixture, RunnerFactory
from lab.workloads.inputs.selection import draw_pages
from lab.workloads.requests import History


class MHAReplayFixture(ReplayFixture):
    case: GraphCase
    layer: AttentionLayer
    cache: PagedKVCache
    tables: tuple[str, ...] = ("page_table", "swa_page_table", "encoder_page_table")

    def _layer(self) -> AttentionLayer:
        model = self.case.model
        return AttentionLayer(
            softmax_scale=model.softmax_scale,
            window_left=model.window_left if self.case.sliding_window else -1,
            reads_swa_pool=self.case.sliding_window,
            sinks=self._randn(model.num_qo_heads).float() if model.has_sinks else None,
            encoder_only=self.case.encoder_only,
        )

    def _new_cache(self) -> PagedKVCache:
        (heads, head_dim), _ = self.case.token_shapes
        return self.pool.new_cache(heads, head_dim, DTYPE, KVLayout.NHD, sliding_window=self.case.sliding_window)

    @property
    def rewritten(self) -> tuple[str, ...]:
        lengths = ("cache_seqlens_int32", "swa_out_cache_loc", "encoder_cache_seqlens", "cu_seqlens_k")
        return (*lengths, "cu_seqlens_q") if self.case.mode.in_extend_seq_lens else lengths

    def _wrong_metadata(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        return wrong_metadata(batch, self.pool, result.metadata)

    def _padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        count, rows = batch.batch_size, batch.num_tokens
        uniform: Cells = {
            "cache_seqlens": (metadata.cache_seqlens_int32[count:], length),
            "steps of cu_seqlens_k": (metadata.cu_seqlens_k[count:].diff(), length),
            "steps of cu_seqlens_q": (metadata.cu_seqlens_q[count:].diff(), self.width),
            "page_table": (metadata.page_table[count:, :pages], 0),
        }
        if metadata.swa_page_table is not None and metadata.swa_out_cache_loc is not None:
            uniform["swa_page_table"] = (metadata.swa_page_table[count:, :pages], 0)
            uniform["swa_out_cache_loc"] = (metadata.swa_out_cache_loc[rows:], 0)
        if metadata.encoder_cache_seqlens is not None and metadata.encoder_page_table is not None:
            uniform["encoder_cache_seqlens"] = (metadata.encoder_cache_seqlens[rows:], length)
            uniform["encoder_page_table"] = (metadata.encoder_page_table[rows:, :pages], 0)
        return uniform

    def _truth(self, query: Tensor, seen: list[History], q_lens: list[int]) -> Truth:
        return mha_truth(query, seen, q_lens, self.layer, kv_dtype=DTYPE, out_dtype=DTYPE)


class MLAReplayFixture(ReplayFixture):
    case: MLAGraphCase
    layer: MLALayer
    cache: PagedLatentCache
    padded_query: Tensor | None = None  # the query of padded rows, which all captured sizes share
    selected: Tensor | None = None  # positions or groups that the rows of the last pass select, without padding rows
    tables: tuple[str, ...] = ("block_kv_indices",)

    def _layer(self) -> MLALayer:
        return new_mla_layer(self.case, self.generator)

    def _new_cache(self) -> PagedLatentCache:
        return self.pool.new_latent_cache(self.case.head_dim, DTYPE)

    def _uncounted(self) -> int:
        return uncounted_tokens(self.runner.inputs.view(1), self.case.attention)

    @property
    def _is_padded(self) -> bool:
        return bool(self.runner.metadata.buffers.query_layout is QueryLayout.PADDED)

    @property
    def rewritten(self) -> tuple[str, ...]:
        return ("seq_lens_k", "cu_seqlens_q", "seq_lens_q") if self._is_padded else ("seq_lens_k",)

    def poison(self, value: float) -> None:
        # Lengths of a padded draft extend count the padding, so entries of the sink are keys with weight zero for requests'
        # rows. Zero times NaN is NaN, also in the reference. So the sink stays finite, as in an engine.
        super().poison(HUGE if self._is_padded else value)
        if self.padded_query is not None:
            self.padded_query.fill_(value)

    def _wrong_metadata(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        block = None if result.view is None else self.width
        return wrong_mla_metadata(batch, self.pool, result.metadata, self.case.attention, block)

    def _padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        count, offsets = batch.batch_size, metadata.cu_seqlens_q
        return {
            "seq_lens_k": (metadata.seq_lens_k[count:], length),
            "block_kv_indices": (metadata.block_kv_indices[count:, :pages], 0),
            "steps of cu_seqlens_q": (None if offsets is None else offsets[count:].diff(), self.width),
        }

    def _buffers(self, rows: int) -> dict[str, Tensor]:
        if self.padded_query is None:
            self.padded_query = self.query.new_zeros(max(SIZES), self.width, *self.query.shape[1:])
        return {"padded_query": self.padded_query}

    def _truth(self, query: Tensor, seen: list[History], q_lens: list[int]) -> Truth:
        return mla_truth(query, query.dtype, seen, q_lens, self.layer, self.selected)


class SelectingFixture(ReplayFixture):
    """Runs graph replays in which each query row selects pages, positions or groups of tokens. Padding rows select none."""

    selected: Tensor  # the selections of the last pass, [rows, ...], without padding rows

    @functools.cached_property
    def topk_indices(self) -> Tensor:
        return torch.full((max(SIZES) * self.width, *self._columns()), -1, dtype=torch.int32, device=self.device)

    def _columns(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _select(self, batch: ForwardBatch) -> None:
        raise NotImplementedError

    def _of_indexer(self, selected: Tensor) -> Tensor:
        """Convert a selection, [rows, ...], to the shape of the backend's argument `topk_indices`."""
        return selected

    def replay(self, batch: ForwardBatch, padding: float = 0.0) -> ReplayedPass:
        self._select(batch)
        self.topk_indices.fill_(-1)
        self.topk_indices[: len(self.selected)].copy_(self.selected)
        return super().replay(batch, padding)

    def eager(self, batch: ForwardBatch) -> ReplayedPass:
        self._select(batch)
        return super().eager(batch)

    def _prepare(
        self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor, **buffers: Tensor
    ) -> Callable[[], Tensor]:
        topk_indices = self._of_indexer(buffers["topk_indices"] if buffers else self.selected)
        return super()._prepare(batch, metadata, query, out, topk_indices=topk_indices)

    def _buffers(self, rows: int) -> dict[str, Tensor]:
        return {"topk_indices": self.topk_indices[:rows]}

    def _padded_lens(self, batch: ForwardBatch, metadata: Any, length: int, least: int = 0) -> Cells:
        rows, width = batch.num_tokens, self.width
        return {
            f"seq_lens of row {j}": (metadata.seq_lens[..., rows + j :: width], max(length - width + 1 + j, least))
            for j in range(width)
        }


class BlockSparseReplayFixture(SelectingFixture, MHAReplayFixture):
    tables = ("page_table",)
    rewritten = ("query_seq_lens", "seq_lens")

    def _columns(self) -> tuple[int, ...]:
        return self.case.model.num_kv_heads, NUM_PAGES

    def _layer(self) -> AttentionLayer:
        return replace(super()._layer(), sinks=None)

    def _select(self, batch: ForwardBatch) -> None:
        seen = self.runner.eager(batch).query_seq_lens.tolist()
        self.selected = draw_pages(seen, self.case.model.num_kv_heads, self.generator).transpose(0, 1)

    def _of_indexer(self, selected: Tensor) -> Tensor:
        return selected.transpose(0, 1)

    def _wrong_metadata(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        return wrong_block_sparse_metadata(batch, self.pool, result.metadata, self._of_indexer(self.selected))

    def _padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        tables: Cells = {"page_table": (metadata.page_table[batch.num_tokens :, :pages], 0)}
        return self._padded_lens(batch, metadata, length, least=1) | tables

    def _truth(self, query: Tensor, seen: list[History], q_lens: list[int]) -> Truth:
        return block_sparse_truth(query, seen, q_lens, self._of_indexer(self.selected), self.layer)


class DSAReplayFixture(SelectingFixture, MLAReplayFixture):
    selected: Tensor
    tables: tuple[str, ...] = ("page_table_1",)
    rewritten = ("seq_lens",)
    _is_padded = False

    def _columns(self) -> tuple[int, ...]:
        return (self.case.index_topk or 0,)

    def _select(self, batch: ForwardBatch) -> None:
        none, every = self.topk_indices[:0], self.case.max_context_len
        seen, _ = dsa_forward_metadata(batch, self.pool, none, index_topk=every)
        self.selected = draw_positions(seen, self.topk_indices.shape[1], self.generator)

    def _wrong_metadata(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        return wrong_dsa_metadata(batch, self.pool, result.metadata, self.selected)

    def _padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        lens = self._padded_lens(batch, metadata, length)
        return lens | {"page_table_1": (metadata.page_table_1[batch.num_tokens :, :length], 0)}


class DSV4ReplayFixture(DSAReplayFixture):
    layer: DSV4Layer
    cache: Any
    tables: tuple[str, ...] = ("window", "page_table")

    def _columns(self) -> tuple[int, ...]:
        return (draw_groups((self.case.max_context_len,), self.case, self.generator).shape[1],)

    def _new_cache(self) -> Any:
        return DSV4Cache.over(self.pool, self.case.head_dim, DTYPE, self.case.compress_ratio or 0)

    def _select(self, batch: ForwardBatch) -> None:
        seen = dsv4_forward_metadata(batch, self.pool, compress_ratio=0).seq_lens
        drawn, columns = draw_groups(seen, self.case, self.generator), self.topk_indices.shape[1]
        self.selected = torch.nn.functional.pad(drawn, (0, columns - drawn.shape[1]), value=-1)

    def _wrong_metadata(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        chosen = self.selected if self.case.index_topk else None
        return wrong_dsv4_metadata(batch, self.pool, result.metadata, self.layer.compress_ratio, chosen)

    def _padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        if batch.forward_mode.query_rows.are_bounded:
            return {}  # rows of padding follow the requests' own, whatever request they are of
        rows = batch.num_tokens
        tables: Cells = {
            "window": (metadata.window[rows:, :1], 0),
            "page_table": (metadata.page_table[rows:, :pages], 0),
        }
        return self._padded_lens(batch, metadata, length, least=1) | tables


def new_fixture(case: ReplayCase, implementation: Any, device: torch.device, make: RunnerFactory) -> ReplayFixture:
    if isinstance(case, GraphCase):
        of_mha = BlockSparseReplayFixture if case.block_sparse else MHAReplayFixture
        return of_mha(case, implementation, device, make)
    assert isinstance(case, MLAGraphCase)
    if case.compress_ratio is not None:
        return DSV4ReplayFixture(case, implementation, device, make)
    fixture = MLAReplayFixture if case.index_topk is None else DSAReplayFixture
    return fixture(case, implementation, device, make)
