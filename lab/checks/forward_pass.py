"""A case made concrete: pool, histories, metadata and arguments as an engine has them, and poison everywhere else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lab.checks.needles import needle_positions
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.calls import AttentionLayer, PlannedCall, plan_calls, prepare_attention
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.references.quantization import quantize_e4m3
from lab.workloads.forward_case import ForwardCase, Inputs

E4M3 = torch.float8_e4m3fn
# Finite, and so large that one poisoned value in a product shows; e4m3 holds nothing larger than 448.
POISON = {torch.bfloat16: 1e30, torch.float16: 6e4, E4M3: 448.0}
# Scales of an e4m3 cache: unequal, and far from 1, so that a dropped or exchanged one shows.
E4M3_K_SCALE = 0.03125
E4M3_V_SCALE = 0.0625


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """A case made concrete: what the engine would hand over, and the histories behind it.

    Attributes:
        pool, batch, metadata, layer, cache, plan: the engine's side.
        query: [num_rows, num_qo_heads, head_dim].
        histories: per request (K, V) as a kernel must understand them: [kv_len, num_kv_heads, head_dim], dequantised but for
            the cache's scales, which are the layer's.
    """

    case: ForwardCase
    pool: KVPool
    batch: ForwardBatch
    metadata: TRTLLMMHAMetadata
    layer: AttentionLayer
    cache: PagedKVCache
    plan: list[PlannedCall]
    query: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a kernel is handed and must leave as it is."""
        metadata = self.metadata
        tensors = {
            "query": self.query,
            "K/V cache": self.cache.storage,
            "page table": metadata.page_table,
            "sliding-window page table": metadata.swa_page_table,
            "lengths": metadata.cache_seqlens_int32,
            "query offsets": metadata.cu_seqlens_q,
            "key offsets": metadata.cu_seqlens_k,
            "sinks": self.layer.sinks,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def arguments(self, out: torch.Tensor) -> dict[str, Any]:
        """What `prepare_attention` wants besides the implementation; `out` is [num_rows, num_qo_heads, head_dim]."""
        return {
            "batch": self.batch,
            "metadata": self.metadata,
            "layer": self.layer,
            "query": self.query,
            "cache": self.cache,
            "max_context_len": self.case.max_context_len,
            "out": out,
            "plan": self.plan,
        }

    def run(self, implementation: Any, out: torch.Tensor) -> None:
        """Run an implementation's attention into `out`."""
        prepare_attention(implementation, **self.arguments(out))()


BuildMetadata = Callable[[ForwardBatch, KVPool], TRTLLMMHAMetadata]


def build_forward(case: ForwardCase, device: torch.device, build_metadata: BuildMetadata | None = None) -> ForwardPass:
    """Build the pool, write the histories, poison the rest, and build the metadata, by the lab's builder or the given one."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    pool = _new_pool(case, device)
    cache = pool.new_cache(
        case.model.num_kv_heads, case.model.head_dim, case.kv_dtype, case.layout, sliding_window=case.sliding_window
    )
    fill_with_poison(cache.storage)
    query, histories = _draw_inputs(case, device, generator)

    requests, write_slots = [], []
    for request, (keys, values) in enumerate(histories):
        index = pool.add_request(case.prefix_lens[request])
        new_slots = pool.extend_request(index, case.new_tokens[request])
        requests.append(index)
        write_slots.append(new_slots[-case.q_lens[request] :])
        # The engine has written all tokens but this pass's; a window's pages before it have been given back.
        first = _evict(case, pool, index, request) if case.sliding_window else 0
        last = case.kv_lens[request] - case.q_lens[request]
        slots = pool.slots(index, first, last)
        cache.write(pool.swa_slots(slots) if case.sliding_window else slots, keys[first:last], values[first:last])

    batch = _new_batch(case, device, requests, torch.cat(write_slots))
    metadata = (build_metadata or build_mha_metadata)(batch, pool)
    new_keys = torch.cat([keys[-rows:] for (keys, _), rows in zip(histories, case.q_lens, strict=True)])
    new_values = torch.cat([values[-rows:] for (_, values), rows in zip(histories, case.q_lens, strict=True)])
    cache.write(_write_locations(case, batch, metadata), new_keys, new_values)
    _poison_table_tails(metadata, cache, case)
    return ForwardPass(
        case=case,
        pool=pool,
        batch=batch,
        metadata=metadata,
        layer=_new_layer(case, device, generator),
        cache=cache,
        plan=plan_calls(batch, case.draft_extend, case.split_mixed_tail),
        query=query,
        histories=histories,
    )


def _new_pool(case: ForwardCase, device: torch.device) -> KVPool:
    pages = sum(-(-kv_len // case.page_size) for kv_len in case.kv_lens)
    return KVPool(
        num_requests=len(case.q_lens),
        max_context_len=case.max_context_len,
        page_size=case.page_size,
        num_pages=2 * pages + 2,  # half of them stay poisoned
        swa_num_pages=pages + 2 if case.sliding_window else None,
        seed=case.seed,
        device=device,
    )


def _new_layer(case: ForwardCase, device: torch.device, generator: torch.Generator) -> AttentionLayer:
    model, quantised = case.model, case.kv_dtype == E4M3
    sinks = None
    if model.has_sinks:
        # Trained sinks lie around the largest logits; distinct per head, so that an exchanged one shows.
        sinks = torch.randn(model.num_qo_heads, device=device, generator=generator) + 2.0
    return AttentionLayer(
        softmax_scale=model.softmax_scale,
        k_scale=E4M3_K_SCALE if quantised else 1.0,
        v_scale=E4M3_V_SCALE if quantised else 1.0,
        window_left=case.window_left,
        reads_swa_pool=case.sliding_window,
        sinks=sinks,
    )


def _new_batch(
    case: ForwardCase, device: torch.device, requests: list[int], out_cache_loc: torch.Tensor
) -> ForwardBatch:
    mode = case.mode
    counts_new_tokens = case.draft_step is None and not mode.is_target_verify()
    seq_lens = case.kv_lens if counts_new_tokens else case.prefix_lens
    extends = mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify()
    return ForwardBatch(
        forward_mode=mode,
        req_pool_indices=torch.tensor(requests, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        out_cache_loc=out_cache_loc,
        num_tokens=sum(case.q_lens),
        extend_seq_lens=torch.tensor(case.q_lens, device=device) if extends else None,
        extend_prefix_lens=torch.tensor(case.prefix_lens, device=device) if extends else None,
        extend_seq_lens_cpu=case.q_lens if extends else None,
        extend_prefix_lens_cpu=case.prefix_lens if extends else None,
        spec_info=_spec_info(case),
    )


def _spec_info(case: ForwardCase) -> SpecInfo | None:
    width = case.q_lens[0]
    if case.draft_step is not None:
        return SpecInfo(speculative_step_id=case.draft_step)
    if case.mode.is_target_verify():
        return SpecInfo(num_draft_tokens=width)
    if case.mode.is_draft_extend_v2():
        return SpecInfo(num_tokens_per_req=width)
    return SpecInfo() if case.mode.is_draft_extend() else None


def _evict(case: ForwardCase, pool: KVPool, index: int, request: int) -> int:
    """Give back the pages that no row of this pass sees; returns the first position that is kept."""
    first_row = case.kv_lens[request] - case.q_lens[request]
    before = min(max(0, first_row - case.window_left), first_row)
    pool.evict_swa(index, before)
    return before // case.page_size * case.page_size


def _write_locations(case: ForwardCase, batch: ForwardBatch, metadata: TRTLLMMHAMetadata) -> torch.Tensor:
    if not case.sliding_window:
        return batch.out_cache_loc
    assert metadata.swa_out_cache_loc is not None
    return metadata.swa_out_cache_loc


def fill_with_poison(storage: torch.Tensor) -> None:
    """Finite values so large that one of them in a product shows."""
    poison = torch.tensor(POISON[storage.dtype]).to(storage.dtype)
    if storage.dtype == E4M3:
        storage.view(torch.uint8).fill_(int(poison.view(torch.uint8)))
    else:
        storage.fill_(float(poison))


def _poison_table_tails(metadata: TRTLLMMHAMetadata, cache: PagedKVCache, case: ForwardCase) -> None:
    """Dead cells name live pages of other requests and pages never written, as a replayed table's stale cells do."""
    tables = (
        [metadata.page_table] if metadata.swa_page_table is None else [metadata.page_table, metadata.swa_page_table]
    )
    for table in tables:
        live = -(-metadata.cache_seqlens_int32 // case.page_size)
        columns = torch.arange(table.shape[1], device=table.device)
        foreign = (columns * 7 + 1) % cache.storage.shape[1]
        table.copy_(torch.where(columns < live.unsqueeze(1), table, foreign.to(torch.int32)))


def _draw_inputs(
    case: ForwardCase, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    model = case.model

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    query = randn(sum(case.q_lens), model.num_qo_heads, model.head_dim)
    directions = randn(model.num_kv_heads, model.head_dim)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    if case.inputs is Inputs.NEEDLES:
        # Every row leans toward its K/V head's direction; the needles' logits stand 10 above the others' ± 1.
        query = query + 4.0 * directions.repeat_interleave(model.group, dim=0)
    histories = []
    for request, kv_len in enumerate(case.kv_lens):
        keys = randn(kv_len, model.num_kv_heads, model.head_dim)
        values = randn(kv_len, model.num_kv_heads, model.head_dim)
        if case.inputs is Inputs.NEEDLES:
            limits = needle_positions(kv_len, case.q_lens[request], case.page_size, case.window_left)
            needles = torch.tensor(limits, dtype=torch.int64, device=device)
            keys[needles] += directions * (10.0 / (4.0 * model.softmax_scale))
        histories.append((_stored(keys, E4M3_K_SCALE, case), _stored(values, E4M3_V_SCALE, case)))
    return query.to(case.dtype), histories


def _stored(values: torch.Tensor, scale: float, case: ForwardCase) -> torch.Tensor:
    return quantize_e4m3(values, scale) if case.kv_dtype == E4M3 else values.to(case.kv_dtype)
