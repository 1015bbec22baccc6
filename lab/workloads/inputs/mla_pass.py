"""Build the tensors of a forward pass of latent attention (MLA), whose cache has latent entries instead of K and V."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3
from lab.calls.selection import WINDOW_COLUMNS
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.backend import MLALayer, prepare_mla_dcp_attention
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.metadata.mla.dsv4 import NO_ENTRY, DSV4Cache, DSV4Layer, build_dsv4_metadata
from lab.metadata.mla.metadata import TRTLLMMLADecodeMetadata, build_mla_decode_metadata, replan_outgrown
from lab.references.errors import Truth
from lab.references.softmax_attention import Rules, rounded
from lab.workloads.inputs.contents import E4M3_K_SCALE, as_stored, draw_histories
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.forward_pass import (
    EnginePass,
    admit_and_write,
    limits_of,
    new_poisonable_pool,
    with_padding_rows,
)
from lab.workloads.mla_case import LatentLayer, MLACase
from lab.workloads.requests import History

# Takes a batch and a pool, and for MLA's decode call a `DraftAttention`.
BuildMLAMetadata = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class MLAPass(EnginePass):
    """A forward pass of the MLA backend. A request's history is (entries [kv_len, head_dim],).

    In DeepSeek sparse attention (DSA), `topk_indices`, int32 [rows, top_k], are the positions of the entries that rows select.
    In DeepSeek-V4, a group of tokens has one compressed entry. A row sees its window's tokens and the compressed entries of the
    groups `topk_indices`. A history is (entries, compressed entries), a row per token; a group's last token has its entry.
    """

    case: MLACase
    metadata: TRTLLMMLADecodeMetadata
    layer: MLALayer
    cache: PagedLatentCache

    def stored(self, *sides: Tensor) -> History:
        return tuple(as_stored(side, self.layer.k_scale, self.case.kv_dtype) for side in sides)

    def truth_of(self, query: Tensor, histories: Sequence[History], requests: Sequence[int]) -> Truth:
        case = self.case
        unseen = [case.kv_lens[request] - case.seen_lens[request] for request in requests]
        seen = [
            tuple(side[: len(side) - left_out] for side in history)
            for history, left_out in zip(histories, unseen, strict=True)
        ]
        query = rounded(query, case.query_dtype or self.query.dtype)
        q_lens, selected = [case.q_lens[request] for request in requests], None
        if self.topk_indices is not None:
            of_requests = self.rows_of_requests(self.topk_indices).split(case.q_lens)
            selected = torch.cat([of_requests[request] for request in requests])
        return mla_truth(query, self.query.dtype, seen, q_lens, self.layer, selected)


@dataclass(frozen=True, eq=False)
class ShardedMLAPass(MLAPass):
    """A forward pass with decode context parallelism: the ranks divide a request's tokens. One GPU makes all ranks' calls."""

    metadata: Any  # one per rank
    cache: Any

    def prepare(self, implementation: Any, **arguments: Any) -> Callable[[], Tensor]:
        del arguments["max_context_len"]  # each rank's metadata has its own bound
        return prepare_mla_dcp_attention(implementation, query_dtype=self.case.query_dtype, **arguments)

    def inputs(self) -> dict[str, Tensor]:
        of_ranks = {
            f"{name} of rank {i}": value for i, own in enumerate(self.metadata) for name, value in vars(own).items()
        }
        named = {"query": self.query, "cache": self.cache.storage, **of_ranks}
        return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def draw_groups(row_lens: Sequence[int], case: LatentLayer, generator: torch.Generator) -> Tensor:
    """Draw the groups of tokens whose compressed entries each row sees: int32 [num_rows, columns], in random order, then -1.
    Without an indexer, a row sees all groups up to its own token. `row_lens` are the numbers of tokens that each row sees.
    """
    counts = [seen // case.compress_ratio if case.compress_ratio else 0 for seen in row_lens]
    columns = case.index_topk or max(*counts, 0)
    drawn = torch.full((len(row_lens), columns), -1, dtype=torch.int32, device=generator.device)
    for row, count in zip(drawn, counts, strict=True):
        own = torch.randperm(count, generator=generator, device=drawn.device)[:columns]
        row[: len(own)] = own.to(torch.int32)
    return drawn


def draw_positions(row_lens: Sequence[int], topk: int, generator: torch.Generator) -> Tensor:
    """Draw the token positions that an indexer selects for each row: int32 [num_rows, topk], in random order, -1 for none. A
    row selects `topk` positions, or all that it sees if there are fewer. Every third row selects about half as many.
    """
    drawn = torch.full((len(row_lens), topk), -1, dtype=torch.int32, device=generator.device)
    for number, (row, seen) in enumerate(zip(drawn, row_lens, strict=True)):
        columns = min(seen, topk)
        positions, at = (torch.randperm(each, generator=generator, device=drawn.device) for each in (seen, columns))
        count = columns - columns // 2 if number % 3 == 2 else columns
        row[at[:count]] = positions[:count].to(torch.int32)
    return drawn


def mla_truth(
    query: Tensor,
    out_dtype: torch.dtype,
    histories: Sequence[History],
    q_lens: Sequence[int],
    layer: MLALayer,
    selected: Tensor | None = None,
) -> Truth:
    """Return the expected results of the query rows, [num_rows, num_qo_heads, head_dim]. `histories` have the entries that each
    request's last row sees. `selected`, [num_rows, top_k], has the positions, or for DeepSeek-V4 the groups, that each row
    selects. If `selected` is None, rows see all entries up to their own token.
    """
    entries = [history[0] for history in histories]
    if selected is not None:
        entries = list(_selected_entries(histories, q_lens, selected, layer))
        q_lens = (1,) * len(entries)
    k_scale = layer.k_scale if entries[0].dtype == E4M3 else 1.0
    rules = Rules(
        bmm1_scale=layer.softmax_scale * k_scale,
        bmm2_scale=k_scale,
        arithmetic=query.dtype,
        out_dtype=out_dtype,
        sinks=layer.sinks if isinstance(layer, DSV4Layer) else None,
    )
    keys = [each.unsqueeze(1) for each in entries]
    return truth_of_requests(query, [(each, each[..., : layer.kv_lora_rank]) for each in keys], list(q_lens), rules)


def _selected_entries(
    histories: Sequence[History], q_lens: Sequence[int], selected: Tensor, layer: MLALayer
) -> Iterator[Tensor]:
    rows = iter(selected)
    for (entries, *compressed), q_len in zip(histories, q_lens, strict=True):
        for end in range(len(entries) - q_len + 1, len(entries) + 1):
            row = next(rows)
            chosen = row[row >= 0].long()
            if isinstance(layer, DSV4Layer):
                groups = compressed[0][(chosen + 1) * layer.compress_ratio - 1]
                yield torch.cat((entries[max(end - WINDOW_COLUMNS, 0) : end], groups))
            else:
                yield entries[chosen]


def build_mla_pass(case: MLACase, device: torch.device, build_metadata: BuildMLAMetadata | None = None) -> MLAPass:
    """Build the forward pass `case`, with the lab's metadata if `build_metadata` is None. Unused cells hold huge values."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    widths = [width for (width,) in case.token_shapes]
    query, drawn = draw_histories(case, generator, limits_of(case), case.num_qo_heads, 1, widths, case.softmax_scale)
    layer, ranks = new_mla_layer(case, generator), case.dcp_size
    histories = [tuple(as_stored(side.squeeze(1), layer.k_scale, case.kv_dtype) for side in sides) for sides in drawn]
    pool = new_poisonable_pool(replace(case, page_size=case.page_size * ranks), device)
    cache: Any
    if isinstance(layer, DSV4Layer):
        cache = DSV4Cache.over(pool, case.head_dim, case.kv_dtype, layer.compress_ratio)
    elif ranks > 1:
        cache = pool.new_sharded_latent_cache(case.head_dim, case.kv_dtype, ranks)
    else:
        cache = pool.new_latent_cache(case.head_dim, case.kv_dtype)

    def build(batch: ForwardBatch, pool: KVPool) -> Any:
        if ranks > 1 and not case.is_sparse:
            shards = (DecodeContextParallel(ranks, rank) for rank in range(ranks))
            return [build_mla_dcp_metadata(batch, pool, shard, case.attention) for shard in shards]
        if case.compress_ratio is not None:
            return (build_metadata or build_dsv4_metadata)(batch, pool)
        if case.is_sparse:
            return case.backend().build_metadata(batch, pool)
        return (build_metadata or build_mla_decode_metadata)(batch, pool, case.attention)

    batch, metadata = admit_and_write(case, pool, cache, histories, build)
    if case.num_padding_requests:
        batch = pad_requests(batch, batch.batch_size + case.num_padding_requests)
        if not case.is_sparse:
            metadata = replan_outgrown(metadata, batch, lambda padded: build(padded, pool))
    rows = with_padding_rows(query, batch.num_tokens - len(query)).to(case.dtype)
    made = case, pool, batch, metadata, layer, cache, rows, histories
    if not case.is_sparse:
        return MLAPass(*made) if ranks == 1 else ShardedMLAPass(*made)
    if case.compress_ratio is None:
        return MLAPass(*made, draw_positions(case.row_lens, case.index_topk or 0, generator))
    groups = draw_groups(case.row_lens, case, generator)
    padding = (0, 0, 0, len(metadata.seq_lens) - len(groups))
    return MLAPass(*made, torch.nn.functional.pad(groups, padding, value=NO_ENTRY))


def new_mla_layer(case: LatentLayer, generator: torch.Generator) -> MLALayer:
    layer = MLALayer(
        softmax_scale=case.softmax_scale,
        k_scale=E4M3_K_SCALE,  # a checkpoint may have a scale for any dtype of the cache
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
        qk_nope_head_dim=case.kv_lora_rank // 4,
    )
    if case.compress_ratio is None:
        return layer
    sinks = torch.randn(case.num_qo_heads, device=generator.device, generator=generator) + 2.0
    return DSV4Layer(**vars(layer) | {"k_scale": 1.0}, compress_ratio=case.compress_ratio, sinks=sinks)
