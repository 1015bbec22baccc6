"""The graph stories of `lab.checks.graphs`, told of the MLA backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.checks.graphs import (
    CHECKS,
    HUGE,
    POISONED_LENGTH,
    Check,
    GraphVerdict,
    Result,
    RunnerFactory,
    Scene,
    judge_graphs,
)
from lab.checks.metadata_truth import wrong_mla_metadata
from lab.checks.mla_pass import mla_truth
from lab.checks.truth import Truth
from lab.metadata.engine.cuda_graph import Body, GraphRunner, MetadataPlace
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import PADDED_SEQ_LEN, GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, uncounted_tokens
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.calls import MLALayer, prepare_mla_attention
from lab.metadata.mla.metadata import QueryLayout


@dataclass(frozen=True)
class MLAGraphCase:
    """One mode of the MLA backend in graphs, on what.

    Attributes:
        mode: of the runner.
        place: where the metadata is rebuilt.
        attention: which keys a draft step counts.
        num_qo_heads, kv_lora_rank, qk_rope_head_dim: of the layer.
        page_size: tokens per page, 32 or 64.
        num_pages: of each request's history.
        padded_seq_len: see `lab.metadata.engine.graph_inputs.StaticInputs`.
        seed: of everything drawn.
    """

    mode: GraphMode
    place: MetadataPlace = MetadataPlace.IN_GRAPH
    attention: DraftAttention = DraftAttention.MLA
    num_qo_heads: int = 4
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16
    page_size: int = 32
    num_pages: int = 5
    padded_seq_len: int = PADDED_SEQ_LEN
    seed: int = 0

    @property
    def max_context_len(self) -> int:
        return self.page_size * self.num_pages


def right_mla_runner(case: MLAGraphCase, pool: KVPool, batch_sizes: Sequence[int], body: Body[Any]) -> GraphRunner[Any]:
    """The runner that is judged; what takes its place has the same arguments."""
    backend = TRTLLMMLABackend(attention=case.attention)
    return GraphRunner(backend, case.mode, pool, batch_sizes, body, case.place, case.padded_seq_len)


def judge_mla_graphs(
    implementation: Any,
    case: MLAGraphCase,
    device: torch.device | str | None = None,
    make: RunnerFactory = right_mla_runner,
    checks: Sequence[Check] = CHECKS,
) -> list[GraphVerdict]:
    """Tell every story of an implementation's MLA decode call; arguments as in `lab.checks.graphs.judge_graphs`."""
    return judge_graphs(implementation, case, device, make, checks, MLAScene)


class MLAScene(Scene):
    """Latent entries in place of K and V, and the MLA backend's metadata."""

    padded_query: Tensor | None = None

    def poison(self, value: float) -> None:
        state = self.runner.metadata.state
        pads = any(metadata.query_layout is QueryLayout.PADDED for metadata in state.metadata.values())
        # Lengths of a padded draft extend count the padding, so that entries of the sink are keys, of a weight of zero for the
        # requests' own rows. Zero times NaN is NaN, in the reference too: there the sink stays finite, as an engine's is.
        self.cache.storage[0].fill_(HUGE if pads else value)
        state.block_kv_indices.zero_()
        for metadata in state.metadata.values():
            metadata.seq_lens_k.fill_(POISONED_LENGTH)
            if metadata.query_layout is QueryLayout.PADDED:
                metadata.cu_seqlens_q[1:].fill_(POISONED_LENGTH)
                metadata.seq_lens_q.fill_(POISONED_LENGTH)
        if self.padded_query is not None:
            self.padded_query.fill_(value)

    def _swa_num_pages(self, num_pages: int) -> int | None:
        return None

    def _heads(self) -> tuple[int, int, int]:
        case = self.case
        return case.num_qo_heads, case.kv_lora_rank + case.qk_rope_head_dim, case.kv_lora_rank

    def _new_cache(self) -> Any:
        return self.pool.new_latent_cache(self.case.kv_lora_rank + self.case.qk_rope_head_dim, torch.bfloat16)

    def _layer(self) -> MLALayer:
        rank, rope = self.case.kv_lora_rank, self.case.qk_rope_head_dim
        return MLALayer((rank // 4 + rope) ** -0.5, 1.0, rank, rope, rank // 4)

    def _write_history(self, row: int) -> Any:
        entries = self._randn(self.case.max_context_len, self.case.kv_lora_rank + self.case.qk_rope_head_dim)
        self.cache.write(self.pool.slots(row, 0, self.case.max_context_len), entries)
        return entries

    def _uncounted(self) -> int:
        return uncounted_tokens(self.runner.inputs.view(1), self.case.attention)

    def _metadata_owners(self) -> tuple[Any, ...]:
        return tuple(self.runner.metadata.state.metadata.values())

    def _wrong_metadata(self, batch: ForwardBatch, result: Result) -> str:
        block = None if result.view is None else self.case.mode.num_tokens_per_req
        return wrong_mla_metadata(batch, self.pool, result.metadata, self.case.attention, block)

    def _padded_metadata(
        self, batch: ForwardBatch, metadata: Any, length: int, pages: int
    ) -> dict[str, tuple[Tensor | None, int]]:
        n, width = batch.batch_size, self.case.mode.num_tokens_per_req
        uniform: dict[str, tuple[Tensor | None, int]] = {
            "seq_lens_k": (metadata.seq_lens_k[n:], length),
            "block_kv_indices": (metadata.block_kv_indices[n:, :pages], 0),
        }
        if metadata.cu_seqlens_q is not None:
            uniform["steps of cu_seqlens_q"] = (metadata.cu_seqlens_q[n:].diff(), width)
        return uniform

    def _prepare(self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor) -> Callable[[], Tensor]:
        captured = query.data_ptr() == self.query.data_ptr()
        return prepare_mla_attention(
            self.implementation,
            batch,
            metadata,
            self.layer,
            query,
            self.cache,
            out=out,
            padded_query=self._padded_query() if captured else None,
        )

    def _padded_query(self) -> Tensor:
        """The buffer of padded rows that all captured sizes share."""
        if self.padded_query is None:
            heads, head_dim, _ = self._heads()
            shape = (self.query.shape[0] // self.case.mode.num_tokens_per_req, self.case.mode.num_tokens_per_req)
            self.padded_query = torch.zeros(*shape, heads, head_dim, dtype=torch.bfloat16, device=self.device)
        return self.padded_query

    def _truth(self, batch: ForwardBatch, query: Tensor) -> Truth:
        requests, totals = self._seen(batch)
        histories = [self.histories[request] for request in requests]
        return mla_truth(query, histories, tuple(totals), tuple(self.widths(batch.batch_size)), self.layer)
