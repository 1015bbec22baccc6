"""Build the tensors of a forward pass: a K/V pool, metadata, arguments and each request's tokens. All other memory of the pool
is poisoned with values that would change a result.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import NVFP4KVCache, PagedKVCache, PagedLatentCache, ShardedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import with_padding_requests
from lab.metadata.mha.backend import AttentionLayer, PlannedCall
from lab.metadata.mha.block_sparse import PAGE_SIZE
from lab.metadata.mha.context_parallel import ZigzagShard, prepare_zigzag, zigzag_shard
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.mla.dsv4 import DSV4Cache
from lab.references.errors import Truth
from lab.references.softmax_attention import Rules, rounded
from lab.workloads.attention_case import Contents
from lab.workloads.forward_case import ForwardCase, PassCase
from lab.workloads.inputs.contents import (
    E4M3_K_SCALE,
    E4M3_V_SCALE,
    draw_histories,
    fill,
    needle_positions,
    read_kv,
    stored_kv,
    unwritten,
)
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.selection import draw_pages
from lab.workloads.requests import History, admit, new_pool, num_pages

BuildMetadata = Callable[[ForwardBatch, KVPool], TRTLLMMHAMetadata]


@dataclass(frozen=True, eq=False)
class EnginePass:
    """A forward pass that is ready to run, and each request's tokens, from which the expected results are computed."""

    case: Any  #: the pass as data
    pool: KVPool
    batch: ForwardBatch
    metadata: Any
    layer: Any
    cache: Any
    query: Tensor  #: [num_rows, num_qo_heads, head_dim]; rows after the requests' rows are padding, filled with NaN
    #: each request's K and V, or latent entries, [kv_len, ...], as the cache stores them, before the layer's scales are
    #: applied; dequantised for an NVFP4 cache
    histories: Sequence[History]
    #: the pages, entries or groups of tokens that each row sees, -1 for none; None: all
    topk_indices: Tensor | None = None

    @property
    def functions(self) -> list[str]:
        return [self.case.interface.value]

    @property
    def pool_bytes(self) -> int:
        return int(self.cache.storage.nbytes)

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors that a kernel must not change, by name."""
        factors = getattr(self.cache, "scale_factors", None)
        cached = {"cache": self.cache.storage, "scale_factors": factors, "topk_indices": self.topk_indices}
        named = {"query": self.query, **cached, **vars(self.metadata), **vars(self.layer)}
        return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}

    def arguments(self, out: Tensor) -> dict[str, Any]:
        arguments = {
            "batch": self.batch,
            "metadata": self.metadata,
            "layer": self.layer,
            "query": self.query,
            "cache": self.cache,
            "max_context_len": self.case.max_context_len,
            "out": out,
        }
        return arguments if self.topk_indices is None else arguments | {"topk_indices": self.topk_indices}

    def prepare(self, implementation: Any, **arguments: Any) -> Callable[[], Tensor]:
        """Return a function that makes the pass's attention calls. `arguments` are for the backend's `prepare_attention`."""
        call: Callable[[], Tensor] = self.case.backend(implementation).prepare_attention(**arguments)
        return call

    def new_out(self) -> Tensor:
        return unwritten(self.query.new_empty((len(self.query), *self.case.out_shape)))

    def rows_of_requests(self, out: Tensor) -> Tensor:
        return out[: sum(self.case.q_lens)]

    def run(self, implementation: Any, out: Tensor) -> None:
        self.prepare(implementation, **self.arguments(out))()

    def truth(self) -> Truth:
        """Return the expected results of the pass, computed from the requests' tokens and not from any metadata."""
        return self.truth_of(self.rows_of_requests(self.query), self.histories, range(len(self.case.q_lens)))

    def truth_of(self, query: Tensor, histories: Sequence[History], requests: Sequence[int]) -> Truth:
        """Return the expected results of some requests: `query` has their rows, `histories` the tokens of each request."""
        raise NotImplementedError

    def stored(self, *sides: Tensor) -> History:
        """Convert K and V, or latent entries, to the tensors that the cache stores."""
        raise NotImplementedError

    def read(self, *stored: Tensor) -> History:
        """Convert tensors of the cache to K and V, or latent entries, without the layer's scales. NVFP4 is dequantised."""
        return stored


@dataclass(frozen=True, eq=False)
class ForwardPass(EnginePass):
    case: ForwardCase
    metadata: TRTLLMMHAMetadata
    layer: AttentionLayer
    cache: PagedKVCache

    @property
    def plan(self) -> list[PlannedCall]:
        return self.case.backend().plan_calls(self.batch, self.layer, self.case.dtypes.query, self.case.kv_dtype)

    @property
    def functions(self) -> list[str]:
        return super().functions if self.case.block_sparse else [planned.call.value for planned in self.plan]

    @functools.cached_property
    def shards(self) -> tuple[ZigzagShard, ...]:
        """Return the query rows and metadata of each context-parallel rank; () if there is one rank."""
        ranks = self.case.context_parallel
        return tuple(zigzag_shard(self.batch, self.metadata, ranks, rank) for rank in range(ranks)) if ranks > 1 else ()

    def run(self, implementation: Any, out: Tensor) -> None:
        if not self.shards:
            super().run(implementation, out)
            return
        arguments = self.arguments(out) | {"shards": self.shards}
        del arguments["metadata"]
        prepare_zigzag(self.case.backend(implementation), **arguments)()

    def stored(self, *sides: Tensor) -> History:
        return stored_kv(self.case.kv_dtype, *sides)

    def read(self, *stored: Tensor) -> History:
        return read_kv(*stored)

    def truth_of(self, query: Tensor, histories: Sequence[History], requests: Sequence[int]) -> Truth:
        case = self.case
        q_lens = [case.q_lens[request] for request in requests]
        if self.topk_indices is not None:
            of_requests = self.topk_indices.split(case.q_lens, dim=1)
            own = torch.cat([of_requests[request] for request in requests], dim=1)
            return block_sparse_truth(query, histories, q_lens, own, self.layer)
        given = rounded(query, case.dtypes.query), histories, q_lens, self.layer
        return mha_truth(*given, kv_dtype=case.kv_dtype, out_dtype=case.dtypes.out, arithmetic=case.arithmetic)


def block_sparse_truth(
    query: Tensor, histories: Sequence[History], q_lens: Sequence[int], topk_pages: Tensor, layer: AttentionLayer
) -> Truth:
    """Return the expected results of causal rows that see only the pages `topk_pages`, int32 [num_kv_heads, num_rows, 16]."""
    of_rows, seen = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for (keys, values), q_len in zip(histories, q_lens, strict=True):
        for length in range(len(keys) - q_len + 1, len(keys) + 1):
            pages = torch.arange(length, device=keys.device)[:, None, None] // PAGE_SIZE
            seen.append((pages == topk_pages[:, len(seen)]).any(dim=2))
            of_rows.append((keys[:length], values[:length]))
    rules = Rules(bmm1_scale=layer.softmax_scale, bmm2_scale=1.0, arithmetic=query.dtype, out_dtype=query.dtype)
    return truth_of_requests(query, of_rows, [1] * len(of_rows), rules, seen=seen)


def mha_truth(
    query: Tensor,
    histories: Sequence[History],
    q_lens: Sequence[int],
    layer: AttentionLayer,
    *,
    kv_dtype: torch.dtype,
    out_dtype: torch.dtype,
    arithmetic: torch.dtype | None = None,
) -> Truth:
    """Return the expected results of one layer. The query rows, [num_rows, num_qo_heads, head_dim], are each request's last
    tokens. The layer's scales apply if the cache is quantised. The error bound is that of a kernel that rounds the operands of
    its products to the dtype `arithmetic`; None means the query's dtype.
    """
    is_quantised = kv_dtype in (E4M3, NVFP4)
    rules = Rules(
        bmm1_scale=layer.softmax_scale * (layer.k_scale if is_quantised else 1.0),
        bmm2_scale=layer.v_scale if is_quantised else 1.0,
        arithmetic=query.dtype if arithmetic is None else arithmetic,
        out_dtype=out_dtype,
        window_left=layer.window_left,
        sinks=layer.sinks,
        causal=not layer.encoder_only,
    )
    return truth_of_requests(query, [(keys, values) for keys, values in histories], list(q_lens), rules)


def build_forward(case: ForwardCase, device: torch.device, build_metadata: BuildMetadata | None = None) -> ForwardPass:
    """Build the forward pass `case`, with the lab's metadata if `build_metadata` is None. Unused cells hold huge values."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    model = case.model
    heads, sides = (model.num_qo_heads, model.num_kv_heads), (model.head_dim, model.head_dim)
    query, drawn = draw_histories(case, generator, limits_of(case), *heads, sides, model.softmax_scale)
    stored = [stored_kv(case.kv_dtype, *sides) for sides in drawn]
    histories = [read_kv(*sides) for sides in stored]
    layer = new_layer(case, device, generator)
    pool = new_poisonable_pool(case, device)
    sizes = model.num_kv_heads, stored_width(case)
    cache = pool.new_cache(*sizes, case.kv_dtype, case.layout, sliding_window=case.sliding_window)
    cache = with_scale_factors(case, cache)
    batch, metadata = admit_and_write(case, pool, cache, stored, build_metadata or case.backend().build_metadata)
    rows = with_padding_rows(query, case.num_padding_rows).to(case.dtype)
    made = case, pool, batch, metadata, layer, cache, rows, histories
    if case.block_sparse:
        return ForwardPass(*made, draw_pages(case.row_lens, model.num_kv_heads, generator))
    _poison_table_tails(metadata, cache, case)
    return ForwardPass(*made)


def with_padding_rows(query: Tensor, count: int) -> Tensor:
    return torch.cat([query, query.new_full((count, *query.shape[1:]), float("nan"))])


def stored_width(case: ForwardCase) -> int:
    return case.model.head_dim // 2 if case.kv_dtype == NVFP4 else case.model.head_dim  # two NVFP4 values per byte


def with_scale_factors(case: ForwardCase, cache: PagedKVCache) -> PagedKVCache:
    return NVFP4KVCache.over(cache, trtllm_gen=case.query_dtype == E4M3) if case.kv_dtype == NVFP4 else cache


def new_poisonable_pool(case: PassCase, device: torch.device) -> KVPool:
    """Return an empty K/V pool with twice the pages that the requests need, so that unused pages can be poisoned."""
    return new_pool(
        case.kv_lens,
        page_size=case.page_size,
        max_context_len=case.max_context_len,
        spare_pages=num_pages(case.kv_lens, case.page_size) + 1,
        swa_spare_pages=1 if case.window_left >= 0 else None,
        virtual_slots=case.virtual_slots,
        seed=case.seed,
        device=device,
    )


def admit_and_write(
    case: PassCase,
    pool: KVPool,
    cache: PagedKVCache | PagedLatentCache | ShardedLatentCache | DSV4Cache,
    histories: Sequence[History],
    build_metadata: Callable[[ForwardBatch, KVPool], Any],
) -> tuple[ForwardBatch, Any]:
    """Admit the case's requests to the pool, and write their tokens (`histories`) to the cache in the order of an engine: the
    cached tokens, then the metadata, then the new tokens. Return (batch, metadata).
    """
    fill(cache.storage)
    if isinstance(cache, NVFP4KVCache):
        fill(cache.scale_factors)
    has_two_pools = isinstance(cache, DSV4Cache)
    has_window = case.window_left >= 0 and not has_two_pools
    requests = admit(pool, case.prefix_lens, case.q_lens, case.draft_step, case.num_draft_tokens, case.topk)
    first_kept = requests.evict(case.window_left) if has_window else None  # for DeepSeek-V4 after the first write
    before = [
        tuple(side[:first] for side in history)
        for history, first in zip(histories, requests.first_written, strict=True)
    ]
    requests.write(cache, before, first_kept, sliding_window=has_window)
    if has_two_pools:
        requests.evict(case.window_left)
    batch = requests.batch(case.mode, case.num_padding_rows)
    # A prefill with padding requests is vLLM's. SGLang pads other modes, after it built the metadata.
    if case.num_padding_requests and case.mode.is_prefill:
        batch = with_padding_requests(batch, case.num_padding_requests, seq_len=0, width=0)
    metadata = build_metadata(batch, pool)
    new = [
        torch.cat([side[first:] for side, first in zip(sides, requests.first_written, strict=True)])
        for sides in zip(*histories, strict=True)
    ]
    if not batch.writes_no_kv:  # with a window to the metadata's slots, which are those of the sliding-window pool
        rows = len(batch.out_cache_loc)
        slots = metadata.swa_out_cache_loc[:rows] if has_window else pool.physical_slots(batch.out_cache_loc)
        cache.write(slots, *new)
    return batch, metadata


def limits_of(case: PassCase) -> list[set[int]] | None:
    if case.contents is not Contents.NEEDLES:
        return None
    return [
        {at for end in (kv_len, seen) for at in needle_positions(end, q_len, case.page_size, case.window_left)}
        for kv_len, seen, q_len in zip(case.kv_lens, case.seen_lens, case.q_lens, strict=True)
    ]


def new_layer(case: ForwardCase, device: torch.device, generator: torch.Generator) -> AttentionLayer:
    model = case.model
    sinks = None
    if model.has_sinks and not case.block_sparse:
        # Trained sinks lie around the largest logits. They are distinct per head, so that swapped sinks change the output.
        sinks = torch.randn(model.num_qo_heads, device=device, generator=generator) + 2.0
    return AttentionLayer(
        softmax_scale=model.softmax_scale,
        k_scale=E4M3_K_SCALE,
        v_scale=E4M3_V_SCALE,
        window_left=case.window_left,
        reads_swa_pool=case.sliding_window,
        sinks=sinks,
        encoder_only=case.encoder_only,
    )


def _poison_table_tails(metadata: TRTLLMMHAMetadata, cache: PagedKVCache, case: ForwardCase) -> None:
    lens, encoder_lens = metadata.cache_seqlens_int32, metadata.encoder_cache_seqlens
    tables = ((metadata.page_table, lens), (metadata.swa_page_table, lens), (metadata.encoder_page_table, encoder_lens))
    for table, keys in tables:
        if table is not None and keys is not None:
            live = -(-keys // case.page_size)
            columns = torch.arange(table.shape[1], device=table.device)
            foreign = (columns * 7 + 1) % cache.storage.shape[1]
            table.copy_(torch.where(columns < live.unsqueeze(1), table, foreign.to(torch.int32)))
