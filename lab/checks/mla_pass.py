"""An MLA case made concrete: pool, histories, metadata and arguments as an engine has them, and poison everywhere else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.checks.forward_pass import E4M3, E4M3_K_SCALE, fill_with_poison
from lab.checks.needles import needle_positions
from lab.checks.truth import Rules, Truth, truth_of_requests
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.kv_cache import PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.calls import MLALayer, prepare_mla_attention
from lab.metadata.mla.metadata import TRTLLMMLADecodeMetadata, build_mla_decode_metadata
from lab.references.paged_attention import piece_elements
from lab.references.quantization import quantize_e4m3
from lab.workloads.forward_case import Inputs
from lab.workloads.mla_case import MLACase

BuildMLAMetadata = Callable[[ForwardBatch, KVPool, DraftAttention], TRTLLMMLADecodeMetadata]


@dataclass(frozen=True, eq=False)
class MLAPass:
    """A case made concrete.

    Attributes:
        pool, batch, metadata, layer, cache: the engine's side.
        query: [num_rows, num_qo_heads, kv_lora_rank + qk_rope_head_dim].
        histories: per request its entries as stored, [kv_len, kv_lora_rank + qk_rope_head_dim].
    """

    case: MLACase
    pool: KVPool
    batch: ForwardBatch
    metadata: TRTLLMMLADecodeMetadata
    layer: MLALayer
    cache: PagedLatentCache
    query: Tensor
    histories: list[Tensor]

    def inputs(self) -> dict[str, Tensor]:
        """What a kernel is handed and must leave as it is."""
        return {
            "query": self.query,
            "cache": self.cache.storage,
            "block table": self.metadata.block_kv_indices,
            "lengths": self.metadata.seq_lens_k,
        }

    def new_out(self) -> Tensor:
        """NaN, [num_rows, num_qo_heads, kv_lora_rank]."""
        shape = (*self.query.shape[:2], self.case.kv_lora_rank)
        return torch.full(shape, float("nan"), dtype=self.case.dtype, device=self.query.device)

    def arguments(self, out: Tensor) -> dict[str, Any]:
        """What `prepare_mla_attention` wants besides the implementation; `out` is as `new_out` makes it."""
        return {
            "batch": self.batch,
            "metadata": self.metadata,
            "layer": self.layer,
            "query": self.query,
            "cache": self.cache,
            "out": out,
        }

    def run(self, implementation: Any, out: Tensor) -> None:
        """Run an implementation's attention into `out`."""
        prepare_mla_attention(implementation, **self.arguments(out))()

    def truth(self) -> Truth:
        """From the histories alone."""
        return mla_truth(self.query, self.histories, self.case.seen_lens, self.case.q_lens, self.layer)


def mla_truth(
    query: Tensor, histories: list[Tensor], seen_lens: tuple[int, ...], q_lens: tuple[int, ...], layer: MLALayer
) -> Truth:
    """What rows of requests must give whose last one sees so many of its history's entries.

    The control repeats the entries for every query head, 45 GB of float32 for 81,920 of DeepSeek-V3's and 128 heads, so that
    few heads are done at once where entries are many.
    """
    rank = layer.kv_lora_rank
    seen = [entries[:length].unsqueeze(1) for entries, length in zip(histories, seen_lens, strict=True)]
    rules = Rules(
        bmm1_scale=layer.softmax_scale * layer.k_scale,
        bmm2_scale=layer.k_scale,
        arithmetic=query.dtype,
        out_dtype=query.dtype,
    )
    sides = [(keys, keys[..., :rank]) for keys in seen]
    elements_per_head = max(1, max(seen_lens) * (query.shape[-1] + rank))
    heads_at_once = max(1, piece_elements(query.device) // elements_per_head)
    parts = [truth_of_requests(heads, sides, list(q_lens), rules) for heads in query.split(heads_at_once, dim=1)]
    return Truth(
        expected=torch.cat([part.expected for part in parts], dim=1),
        control=torch.cat([part.control for part in parts], dim=1),
        lse_log2=torch.cat([part.lse_log2 for part in parts], dim=1),
        request_of_row=parts[0].request_of_row,
        arithmetic=rules.arithmetic,
    )


def build_mla_pass(
    case: MLACase, device: torch.device, build_metadata: BuildMLAMetadata = build_mla_decode_metadata
) -> MLAPass:
    """Build the pool, write the histories into pages between poison, and build the metadata."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    pages = sum(-(-kv_len // case.page_size) for kv_len in case.kv_lens)
    pool = KVPool(
        num_requests=len(case.q_lens),
        max_context_len=case.max_context_len,
        page_size=case.page_size,
        num_pages=2 * pages + 2,  # half of them stay poisoned
        seed=case.seed,
        device=device,
    )
    cache = pool.new_latent_cache(case.head_dim, case.kv_dtype)
    fill_with_poison(cache.storage)
    query, histories = _draw(case, device, generator)
    requests, slots = [], []
    for request, entries in enumerate(histories):
        index = pool.add_request(case.prefix_lens[request])
        pool.extend_request(index, case.new_tokens[request])
        cache.write(pool.slots(index, 0, len(entries)), entries)
        requests.append(index)
        slots.append(pool.slots(index, len(entries) - case.q_lens[request], len(entries)))
    batch = _batch(case, device, requests, torch.cat(slots))
    return MLAPass(
        case=case,
        pool=pool,
        batch=batch,
        metadata=build_metadata(batch, pool, case.attention),
        layer=MLALayer(
            softmax_scale=case.softmax_scale,
            k_scale=E4M3_K_SCALE if case.kv_dtype == E4M3 else 1.0,
            kv_lora_rank=case.kv_lora_rank,
            qk_rope_head_dim=case.qk_rope_head_dim,
            qk_nope_head_dim=case.kv_lora_rank // 4,
        ),
        cache=cache,
        query=query,
        histories=histories,
    )


def _batch(case: MLACase, device: torch.device, requests: list[int], out_cache_loc: Tensor) -> ForwardBatch:
    mode = case.mode
    extends = mode.is_draft_extend(include_v2=True)
    counts_new_tokens = case.draft_step is None and not mode.is_target_verify()
    spec_info = None
    if case.draft_step is not None:
        spec_info = SpecInfo(speculative_step_id=case.draft_step)
    elif mode.is_target_verify():
        spec_info = SpecInfo(num_draft_tokens=case.q_lens[0])
    elif mode.is_draft_extend_v2():
        spec_info = SpecInfo(num_tokens_per_req=case.q_lens[0])
    return ForwardBatch(
        forward_mode=mode,
        req_pool_indices=torch.tensor(requests, device=device),
        seq_lens=torch.tensor(case.kv_lens if counts_new_tokens else case.prefix_lens, device=device),
        out_cache_loc=out_cache_loc,
        num_tokens=sum(case.q_lens),
        extend_seq_lens=torch.tensor(case.q_lens, device=device) if extends else None,
        extend_prefix_lens=torch.tensor(case.prefix_lens, device=device) if extends else None,
        extend_seq_lens_cpu=case.q_lens if extends else None,
        extend_prefix_lens_cpu=case.prefix_lens if extends else None,
        spec_info=spec_info,
    )


def _draw(case: MLACase, device: torch.device, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """The query, and each request's entries as stored."""
    query = torch.randn(sum(case.q_lens), case.num_qo_heads, case.head_dim, device=device, generator=generator)
    direction = torch.randn(case.head_dim, device=device, generator=generator)
    direction = direction / direction.norm()
    if case.inputs is Inputs.NEEDLES:
        query = query + 4.0 * direction
    histories = []
    for kv_len, seen, q_len in zip(case.kv_lens, case.seen_lens, case.q_lens, strict=True):
        entries = torch.randn(kv_len, case.head_dim, device=device, generator=generator)
        if case.inputs is Inputs.NEEDLES:
            # At the limits of what is seen, and just beyond: the needles' logits stand 10 above the others'.
            positions = {
                *needle_positions(kv_len, q_len, case.page_size),
                *needle_positions(seen, q_len, case.page_size),
            }
            index = torch.tensor(sorted(positions), dtype=torch.int64, device=device)
            entries[index] += direction * (10.0 / (4.0 * case.softmax_scale))
        quantised = case.kv_dtype == E4M3
        histories.append(quantize_e4m3(entries, E4M3_K_SCALE) if quantised else entries.to(case.kv_dtype))
    return query.to(case.dtype), histories
