"""The tensors of an MLA forward pass, whose cache has latent entries. `forward_pass` makes those of a pass over K and V."""

import itertools
from collections.abc import Callable, Sequence
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
from lab.metadata.mla.calls import MLALayer
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata, prepare_mla_dcp_attention
from lab.metadata.mla.dsv4 import NO_ENTRY, DSV4Cache, DSV4Layer, build_dsv4_metadata
from lab.metadata.mla.metadata import TRTLLMMLADecodeMetadata, build_mla_decode_metadata, replan_outgrown
from lab.references.errors import Truth
from lab.references.quantization import rounded
from lab.references.softmax_attention import Rules
from lab.workloads.inputs.encoding import E4M3_K_SCALE, as_stored, fill
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.forward_pass import EnginePass, admit_and_write, limits_of, new_poisonable_pool
from lab.workloads.inputs.needles import draw_histories
from lab.workloads.mla_case import LatentLayer, MLACase
from lab.workloads.requests import History, admit

# Of a batch and a pool, and for MLA's decode call of `DraftAttention`.
BuildMLAMetadata = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class MLAPass(EnginePass):
    """An `EnginePass` over paged latent entries, on the MLA decode kernel. A history is (entries [kv_len, head_dim],)."""

    case: MLACase
    metadata: TRTLLMMLADecodeMetadata
    layer: MLALayer
    cache: PagedLatentCache

    def stored(self, *sides: Tensor) -> History:
        return tuple(as_stored(side, E4M3_K_SCALE, self.case.kv_dtype) for side in sides)

    def truth_of(self, query: Tensor, histories: Sequence[History], requests: Sequence[int]) -> Truth:
        case, entries = self.case, [entries for (entries,) in histories]
        unseen = [case.kv_lens[request] - case.seen_lens[request] for request in requests]
        seen_lens = tuple(len(each) - left_out for each, left_out in zip(entries, unseen, strict=True))
        query = rounded(query, case.query_dtype or self.query.dtype)
        q_lens = tuple(case.q_lens[request] for request in requests)
        return mla_truth(query, self.query.dtype, entries, seen_lens, q_lens, self.layer)


@dataclass(frozen=True, eq=False)
class ShardedMLAPass(MLAPass):
    """A pass with decode context parallelism: ranks share the tokens of each request. One GPU makes the calls of all ranks."""

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


@dataclass(frozen=True, eq=False)
class SparseMLAPass(MLAPass):
    """A pass of DeepSeek sparse attention: each query row sees only the entries at its positions in `topk_indices`.

    Attributes:
        topk_indices: int32 [rows of the requests, top_k], -1 for no position.
    """

    metadata: Any
    topk_indices: Tensor

    def arguments(self, out: Tensor) -> dict[str, Any]:
        return super().arguments(out) | {"topk_indices": self.topk_indices}

    def inputs(self) -> dict[str, Tensor]:
        return super().inputs() | {"topk_indices": self.topk_indices}

    def truth_of(self, query: Tensor, histories: Sequence[History], requests: Sequence[int]) -> Truth:
        case, rows = self.case, list(itertools.accumulate(self.case.q_lens, initial=0))
        own = torch.cat([self.topk_indices[rows[each] : rows[each + 1]] for each in requests])
        entries = [entries for request, (entries,) in zip(requests, histories, strict=True)]
        of_rows = [each for each, request in zip(entries, requests, strict=True) for _ in range(case.q_lens[request])]
        query = rounded(query, case.query_dtype or self.query.dtype)
        return sparse_mla_truth(query, self.query.dtype, of_rows, own, self.layer)


@dataclass(frozen=True, eq=False)
class TwoPoolPass(SparseMLAPass):
    """A pass of DeepSeek-V4: each row sees the tokens of its window, and compressed entries.

    A history is (entries, compressed entries), `[kv_len, head_dim]` both: the group that ends at a token has its entry there.
    `topk_indices` are numbers of groups; without an indexer a row has all of them.
    """

    cache: Any
    layer: DSV4Layer

    @property
    def functions(self) -> list[str]:
        return [self.case.interface.value]

    def stored(self, *sides: Tensor) -> History:
        return tuple(as_stored(side, self.layer.k_scale, self.case.kv_dtype) for side in sides)

    def truth_of(self, query: Tensor, histories: Sequence[History], requests: Sequence[int]) -> Truth:
        of, first = self.case, list(itertools.accumulate(self.case.q_lens, initial=0))
        rows = [row for each in requests for row in range(first[each], first[each + 1])]
        of_rows = [each for each, request in zip(histories, requests, strict=True) for _ in range(of.q_lens[request])]
        query = rounded(query, of.query_dtype or self.query.dtype)
        seen = [of.row_lens[row] for row in rows]
        return two_pool_truth(query, self.query.dtype, of_rows, seen, self.topk_indices[rows], self.layer)


def draw_groups(row_lens: Sequence[int], case: LatentLayer, generator: torch.Generator) -> Tensor:
    """Draw the groups whose compressed entries each row sees, those that an indexer selects in any order: int32 [num_rows,
    columns], -1 after the last.

    Args:
        row_lens: how many tokens each row sees.
        case: has the number of tokens of a group and the number of columns; without an indexer a row has all groups.
        generator: draws, on its device.
    """
    counts = [seen // case.compress_ratio if case.compress_ratio else 0 for seen in row_lens]
    columns = case.index_topk or max(*counts, 0)
    drawn = torch.full((len(row_lens), columns), -1, dtype=torch.int32, device=generator.device)
    for row, count in zip(drawn, counts, strict=True):
        own = torch.randperm(count, generator=generator, device=drawn.device)[:columns]
        row[: len(own)] = own.to(torch.int32)
    return drawn


def two_pool_truth(
    query: Tensor,
    out_dtype: torch.dtype,
    histories: Sequence[History],
    row_lens: Sequence[int],
    groups: Tensor,
    layer: DSV4Layer,
) -> Truth:
    """Return the expected results of query rows of DeepSeek-V4.

    Args:
        query, out_dtype: as in `mla_truth`.
        histories: the history of each row's request, as in `TwoPoolPass`.
        row_lens: how many tokens each row sees.
        groups: as from `draw_groups`.
        layer: the layer, with its sinks and the number of tokens of a group.
    """
    seen = []
    for (entries, compressed), length, own in zip(histories, row_lens, groups, strict=True):
        ends = (own[own >= 0].long() + 1) * layer.compress_ratio - 1
        seen.append(torch.cat((entries[max(length - WINDOW_COLUMNS, 0) : length], compressed[ends])))
    return mla_truth(query, out_dtype, seen, tuple(map(len, seen)), (1,) * len(seen), layer)


def draw_positions(row_lens: Sequence[int], topk: int, generator: torch.Generator) -> Tensor:
    """Draw the positions that an indexer selects for each row, in any order: int32 [num_rows, topk].

    A row selects `topk` positions, or all that it has if these are fewer; every third row about half as many. Columns of -1,
    which select nothing, are between them and behind them.

    Args:
        row_lens: how many tokens of its request each row may select.
        topk: number of columns.
        generator: draws, on its device.
    """
    drawn = torch.full((len(row_lens), topk), -1, dtype=torch.int32, device=generator.device)
    for number, (row, seen) in enumerate(zip(drawn, row_lens, strict=True)):
        columns = min(seen, topk)
        positions, at = (torch.randperm(each, generator=generator, device=drawn.device) for each in (seen, columns))
        count = columns - columns // 2 if number % 3 == 2 else columns
        row[at[:count]] = positions[:count].to(torch.int32)
    return drawn


def sparse_mla_truth(
    query: Tensor, out_dtype: torch.dtype, entries: Sequence[Tensor], topk_indices: Tensor, layer: MLALayer
) -> Truth:
    """Return the expected results of query rows, each from the entries of its request at its positions in `topk_indices`.

    Args:
        query, out_dtype, layer: as in `mla_truth`.
        entries: the stored entries of each row's request, [kv_len, head_dim].
        topk_indices: int32 [num_rows, top_k], -1 for no position.
    """
    seen = [own[row[row >= 0].long()] for own, row in zip(entries, topk_indices, strict=True)]
    return mla_truth(query, out_dtype, seen, tuple(map(len, seen)), (1,) * len(seen), layer)


def mla_truth(
    query: Tensor,
    out_dtype: torch.dtype,
    entries: list[Tensor],
    seen_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    layer: MLALayer,
) -> Truth:
    """Return the expected results of the query rows of requests, computed from the requests' latent entries.

    Args:
        query: [num_rows, num_qo_heads, head_dim], in the dtype that the call takes.
        out_dtype: dtype of the output.
        entries: the stored entries of each request, [kv_len, head_dim].
        seen_lens: how many entries each request's last row sees.
        q_lens: query rows of each request.
        layer: the layer, with the length of an entry's latent vector and the scale by which entries were divided.
    """
    seen = [each[:length].unsqueeze(1) for each, length in zip(entries, seen_lens, strict=True)]
    k_scale = layer.k_scale if entries[0].dtype == E4M3 else 1.0
    rules = Rules(
        bmm1_scale=layer.softmax_scale * k_scale,
        bmm2_scale=k_scale,
        arithmetic=query.dtype,
        out_dtype=out_dtype,
        sinks=layer.sinks if isinstance(layer, DSV4Layer) else None,
    )
    return truth_of_requests(query, [(keys, keys[..., : layer.kv_lora_rank]) for keys in seen], list(q_lens), rules)


def build_mla_pass(case: MLACase, device: torch.device, build_metadata: BuildMLAMetadata | None = None) -> MLAPass:
    """Return the pass of a case: build the pool, write the histories, fill all other cells with huge values (poison), and build
    the metadata. By default the lab's builder for the case builds it.
    """
    generator = torch.Generator(device=device).manual_seed(case.seed)
    query, drawn = draw_histories(
        case,
        generator,
        limits_of(case),
        case.num_qo_heads,
        1,
        [width for (width,) in case.token_shapes],
        case.softmax_scale,
    )
    layer = new_mla_layer(case, generator)
    histories = [tuple(as_stored(side.squeeze(1), layer.k_scale, case.kv_dtype) for side in sides) for sides in drawn]
    if case.compress_ratio is not None:
        return _build_two_pools(case, device, query.to(case.dtype), histories, layer, build_metadata, generator)
    if case.dcp_size > 1:
        return _build_sharded(case, device, query.to(case.dtype), histories, layer)
    pool = new_poisonable_pool(case, device)
    cache = pool.new_latent_cache(case.head_dim, case.kv_dtype)
    is_sparse = case.index_topk is not None

    def build(batch: ForwardBatch, pool: KVPool) -> Any:
        if is_sparse:
            return case.backend().build_metadata(batch, pool)
        return (build_metadata or build_mla_decode_metadata)(batch, pool, case.attention)

    batch, metadata = admit_and_write(case, pool, cache, histories, build)
    if case.num_padding_requests:
        batch = pad_requests(batch, batch.batch_size + case.num_padding_requests)
        metadata = metadata if is_sparse else replan_outgrown(metadata, batch, lambda padded: build(padded, pool))
    rows = torch.cat([query, query.new_full((batch.num_tokens - len(query), *query.shape[1:]), float("nan"))])
    made = case, pool, batch, metadata, layer, cache, rows.to(case.dtype), histories
    if case.index_topk is None:
        return MLAPass(*made)
    return SparseMLAPass(*made, draw_positions(case.row_lens, case.index_topk, generator))


def _build_sharded(
    case: MLACase, device: torch.device, query: Tensor, histories: Sequence[History], layer: MLALayer
) -> ShardedMLAPass:
    size = case.dcp_size
    pool = new_poisonable_pool(replace(case, page_size=case.page_size * size), device)
    cache = pool.new_sharded_latent_cache(case.head_dim, case.kv_dtype, size)
    ranks = [DecodeContextParallel(size, rank) for rank in range(size)]
    batch, metadata = admit_and_write(
        case,
        pool,
        cache,
        histories,
        lambda batch, pool: [build_mla_dcp_metadata(batch, pool, rank, case.attention) for rank in ranks],
    )
    return ShardedMLAPass(case, pool, batch, metadata, layer, cache, query, histories)


def _build_two_pools(
    case: MLACase,
    device: torch.device,
    query: Tensor,
    histories: Sequence[History],
    layer: MLALayer,
    build_metadata: BuildMLAMetadata | None,
    generator: torch.Generator,
) -> TwoPoolPass:
    """Return a pass of DeepSeek-V4. Sliding-window pages that no row sees are given back before the metadata is built."""
    assert isinstance(layer, DSV4Layer)
    pool = new_poisonable_pool(case, device)
    cache = DSV4Cache.over(pool, case.head_dim, case.kv_dtype, layer.compress_ratio)
    fill(cache.storage)
    requests = admit(pool, case.prefix_lens, case.q_lens, case.draft_step, case.num_draft_tokens)
    parts = [
        [tuple(side[span] for side in history) for history, span in zip(histories, spans, strict=True)]
        for spans in (map(slice, requests.first_written), (slice(first, None) for first in requests.first_written))
    ]
    requests.write(cache, parts[0])
    requests.evict(case.window_left)
    batch = requests.batch(case.mode, case.num_padding_rows)
    metadata = (build_metadata or build_dsv4_metadata)(batch, pool)
    cache.write(batch.out_cache_loc, *map(torch.cat, zip(*parts[1], strict=True)))
    if case.num_padding_requests:
        batch = pad_requests(batch, batch.batch_size + case.num_padding_requests)
    rows = torch.cat([query, query.new_full((batch.num_tokens - len(query), *query.shape[1:]), float("nan"))])
    groups = draw_groups(case.row_lens, case, generator)
    padding = (0, 0, 0, len(metadata.seq_lens) - len(groups))
    groups = torch.nn.functional.pad(groups, padding, value=NO_ENTRY)
    return TwoPoolPass(case, pool, batch, metadata, layer, cache, rows, histories, groups)


def new_mla_layer(case: LatentLayer, generator: torch.Generator) -> MLALayer:
    """Return the layer of a case: its scales, its sizes and, for DeepSeek-V4, its sinks, which the generator draws."""
    layer = MLALayer(
        softmax_scale=case.softmax_scale,
        k_scale=E4M3_K_SCALE,  # a checkpoint may have it for any dtype of the cache
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
        qk_nope_head_dim=case.kv_lora_rank // 4,
    )
    if case.compress_ratio is None:
        return layer
    sinks = torch.randn(case.num_qo_heads, device=generator.device, generator=generator) + 2.0
    return DSV4Layer(**vars(layer) | {"k_scale": 1.0}, compress_ratio=case.compress_ratio, sinks=sinks)
