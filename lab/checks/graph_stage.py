"""Stages of graph stories: one layer of an attention backend over a pool, for MHA and for MLA."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.checks.graph_case import GraphCase, MLAGraphCase
from lab.checks.metadata_truth import wrong_metadata, wrong_mla_metadata
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import uncounted_tokens
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.calls import AttentionLayer
from lab.metadata.mha.settings import CallSettings
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.calls import MLALayer
from lab.metadata.mla.metadata import QueryLayout
from lab.references.truth import Rules, Truth
from lab.workloads.geometries import geometry
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.mla_pass import mla_truth
from lab.workloads.requests import History

POISONED_LENGTH = 2**30  # beyond every table and pool
HUGE = 1e30  # finite in bf16, and so large that one poisoned value in a product shows

Cells = dict[str, tuple[Tensor | None, int]]  # tensors by name, and what each cell of them must be
Randn = Callable[..., Tensor]  # sizes to a bfloat16 tensor of N(0, 1)


class Stage(Protocol):
    """One layer of a backend over a pool: cache, metadata buffers, calls and truth.

    Attributes:
        heads: query heads, and elements of a query's and of an output's vector.
        cache: of the pool.
        backend: on the implementation that is judged.
    """

    heads: tuple[int, int, int]
    cache: Any
    backend: Any

    def __init__(self, case: Any, implementation: Any, pool: KVPool, randn: Randn) -> None: ...

    def draw_history(self) -> History:
        """Draw a request's tokens, as many as a request may have."""

    def uncounted(self, view: ForwardBatch) -> int:
        """Tokens of a request that its length does not count."""

    def poison(self, runner: GraphRunner[Any], value: float) -> None:
        """As `lab.checks.scene.Scene.poison`."""

    def metadata_owners(self, runner: GraphRunner[Any]) -> tuple[Any, ...]:
        """Objects whose tensors the graphs read their metadata from."""

    def wrong_metadata(self, batch: ForwardBatch, metadata: Any, view: ForwardBatch | None) -> str:
        """Say in a sentence what is wrong with the metadata of real rows; empty if nothing is."""

    def padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        """Metadata of padded requests of this length and so many pages, and what each cell of it must be."""

    def prepare(
        self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor, captured_rows: int = 0
    ) -> Callable[[], Tensor]:
        """The layer's attention, ready to be called; `captured_rows` of the largest captured size, 0 in an eager pass."""

    def truth(self, query: Tensor, histories: list[History], totals: list[int], q_lens: list[int]) -> Truth:
        """The truth of rows from the first `totals` tokens of each request's history alone."""


class MHAStage:
    """A layer of the MHA backend: grouped-query attention, with or without a sliding window."""

    def __init__(self, case: GraphCase, implementation: Any, pool: KVPool, randn: Randn) -> None:
        self.case, self.pool, self.randn = case, pool, randn
        settings = CallSettings(decode_splits=case.decode_splits)
        self.backend = TRTLLMMHABackend(implementation, settings=settings, expand_encoder_only_verify=case.encoder_only)
        self.model, window = geometry(case.geometry), case.sliding_window
        self.heads = (self.model.num_qo_heads, self.model.head_dim, self.model.head_dim)
        self.layer = AttentionLayer(
            softmax_scale=self.model.softmax_scale,
            window_left=self.model.window_left if window else -1,
            reads_swa_pool=window,
            sinks=randn(self.model.num_qo_heads).float() if self.model.has_sinks else None,
            encoder_only=case.encoder_only,
        )
        self.cache = pool.new_cache(
            self.model.num_kv_heads, self.model.head_dim, torch.bfloat16, KVLayout.NHD, sliding_window=window
        )

    def draw_history(self) -> History:
        shape = (self.case.max_context_len, self.model.num_kv_heads, self.model.head_dim)
        return self.randn(*shape), self.randn(*shape)

    def uncounted(self, view: ForwardBatch) -> int:
        return uncounted_tokens(view)

    def poison(self, runner: GraphRunner[Any], value: float) -> None:
        self.cache.storage[:, 0].fill_(value)
        buffers = runner.metadata.buffers
        buffers.page_table.zero_()
        buffers.cache_seqlens_int32.fill_(POISONED_LENGTH)
        buffers.cu_seqlens_k[1:].fill_(POISONED_LENGTH)
        if self.case.mode.in_extend_seq_lens:
            buffers.cu_seqlens_q[1:].fill_(POISONED_LENGTH)
        if buffers.swa_page_table is not None:
            buffers.swa_page_table.zero_()
        if buffers.swa_out_cache_loc is not None:
            buffers.swa_out_cache_loc.fill_(POISONED_LENGTH)
        if buffers.encoder_page_table is not None:
            buffers.encoder_page_table.zero_()
            buffers.encoder_cache_seqlens.fill_(POISONED_LENGTH)

    def metadata_owners(self, runner: GraphRunner[Any]) -> tuple[Any, ...]:
        return (runner.metadata.buffers,)

    def wrong_metadata(self, batch: ForwardBatch, metadata: Any, view: ForwardBatch | None) -> str:
        return wrong_metadata(batch, self.pool, metadata)

    def padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        count, rows, width = batch.batch_size, batch.num_tokens, self.case.mode.num_tokens_per_req
        uniform: Cells = {
            "cache_seqlens": (metadata.cache_seqlens_int32[count:], length),
            "steps of cu_seqlens_k": (metadata.cu_seqlens_k[count:].diff(), length),
            "steps of cu_seqlens_q": (metadata.cu_seqlens_q[count:].diff(), width),
            "page_table": (metadata.page_table[count:, :pages], 0),
        }
        if metadata.swa_page_table is not None and metadata.swa_out_cache_loc is not None:
            uniform["swa_page_table"] = (metadata.swa_page_table[count:, :pages], 0)
            uniform["swa_out_cache_loc"] = (metadata.swa_out_cache_loc[rows:], 0)
        if metadata.encoder_cache_seqlens is not None and metadata.encoder_page_table is not None:
            uniform["encoder_cache_seqlens"] = (metadata.encoder_cache_seqlens[rows:], length)
            uniform["encoder_page_table"] = (metadata.encoder_page_table[rows:, :pages], 0)
        return uniform

    def prepare(
        self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor, captured_rows: int = 0
    ) -> Callable[[], Tensor]:
        most = self.case.max_context_len
        return self.backend.prepare_attention(
            batch, metadata, self.layer, query, self.cache, max_context_len=most, out=out
        )

    def truth(self, query: Tensor, histories: list[History], totals: list[int], q_lens: list[int]) -> Truth:
        seen = [(keys[:total], values[:total]) for (keys, values), total in zip(histories, totals, strict=True)]
        rules = Rules(
            bmm1_scale=self.layer.softmax_scale,
            bmm2_scale=1.0,
            arithmetic=torch.bfloat16,
            out_dtype=torch.bfloat16,
            window_left=self.layer.window_left,
            sinks=self.layer.sinks,
            causal=not self.layer.encoder_only,
        )
        return truth_of_requests(query, seen, q_lens, rules)


class MLAStage:
    """A layer of the MLA backend: latent entries in place of K and V."""

    def __init__(self, case: MLAGraphCase, implementation: Any, pool: KVPool, randn: Randn) -> None:
        self.case, self.pool, self.randn = case, pool, randn
        self.backend = TRTLLMMLABackend(implementation, case.attention)
        rank, rope = case.kv_lora_rank, case.qk_rope_head_dim
        self.heads = (case.num_qo_heads, rank + rope, rank)
        self.layer = MLALayer((rank // 4 + rope) ** -0.5, 1.0, rank, rope, rank // 4)
        self.cache = pool.new_latent_cache(rank + rope, torch.bfloat16)
        self.padded_query: Tensor | None = None

    def draw_history(self) -> History:
        return (self.randn(self.case.max_context_len, self.heads[1]),)

    def uncounted(self, view: ForwardBatch) -> int:
        return uncounted_tokens(view, self.case.attention)

    def poison(self, runner: GraphRunner[Any], value: float) -> None:
        buffers = runner.metadata
        # Lengths of a padded draft extend count the padding, so that entries of the sink are keys, of a weight of zero for the
        # requests' own rows. Zero times NaN is NaN, in the reference too: there the sink stays finite, as an engine's is.
        self.cache.storage[0].fill_(HUGE if buffers.layout is QueryLayout.PADDED else value)
        buffers.block_kv_indices.zero_()
        for metadata in buffers.metadata.values():
            metadata.seq_lens_k.fill_(POISONED_LENGTH)
            if metadata.query_layout is QueryLayout.PADDED:
                metadata.cu_seqlens_q[1:].fill_(POISONED_LENGTH)
                metadata.seq_lens_q.fill_(POISONED_LENGTH)
        if self.padded_query is not None:
            self.padded_query.fill_(value)

    def metadata_owners(self, runner: GraphRunner[Any]) -> tuple[Any, ...]:
        return tuple(runner.metadata.metadata.values())

    def wrong_metadata(self, batch: ForwardBatch, metadata: Any, view: ForwardBatch | None) -> str:
        block = None if view is None else self.case.mode.num_tokens_per_req
        return wrong_mla_metadata(batch, self.pool, metadata, self.case.attention, block)

    def padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        count, width = batch.batch_size, self.case.mode.num_tokens_per_req
        uniform: Cells = {
            "seq_lens_k": (metadata.seq_lens_k[count:], length),
            "block_kv_indices": (metadata.block_kv_indices[count:, :pages], 0),
        }
        if metadata.cu_seqlens_q is not None:
            uniform["steps of cu_seqlens_q"] = (metadata.cu_seqlens_q[count:].diff(), width)
        return uniform

    def prepare(
        self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor, captured_rows: int = 0
    ) -> Callable[[], Tensor]:
        return self.backend.prepare_attention(
            batch,
            metadata,
            self.layer,
            query,
            self.cache,
            max_context_len=self.case.max_context_len,
            out=out,
            padded_query=self._padded_query(query, captured_rows) if captured_rows else None,
        )

    def _padded_query(self, query: Tensor, captured_rows: int) -> Tensor:
        """The buffer of padded rows that all captured sizes share."""
        if self.padded_query is None:
            width = self.case.mode.num_tokens_per_req
            self.padded_query = query.new_zeros(captured_rows // width, width, *query.shape[1:])
        return self.padded_query

    def truth(self, query: Tensor, histories: list[History], totals: list[int], q_lens: list[int]) -> Truth:
        entries = [entries for (entries,) in histories]
        return mla_truth(query, query.dtype, entries, tuple(totals), tuple(q_lens), self.layer)
