"""Build the tensors of a call over a paged K/V cache: each request's K and V, the pages that store them, and the arguments."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4, NVFP4_BLOCK, AttentionCall
from lab.references.errors import Truth
from lab.references.quantization import interleave_v_scale_factors
from lab.references.softmax_attention import Rules
from lab.workloads.attention_case import AttentionCase, TableTail
from lab.workloads.inputs.contents import (
    E4M3_K_SCALE,
    E4M3_V_SCALE,
    draw_contents,
    fill_dead,
    new_workspace,
    read_kv,
    stored_kv,
    unwritten,
)
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.masks import packed_mask
from lab.workloads.inputs.selection import (
    keys_up_to_rows,
    lengths_of_heads,
    positions_of_rank,
    seen_keys,
    selected_positions,
)

# The page id in the columns of a page table after a request's last page. The columns of FOREIGN have different ids.
TAIL_IDS = {TableTail.NEGATIVE: -1, TableTail.FAR: 2**30}


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The tensors of a call over a paged cache. Expected results are computed from `histories`, each request's K and V."""

    case: AttentionCase
    query: Tensor  # [num_rows, num_qo_heads, head_dim]
    # (K, V) of each request as a kernel must read them, without the global scale: as stored, or for NVFP4 dequantised to
    # float64; [kv_len, num_kv_heads, head_dim] and [kv_len, num_kv_heads, out_head_dim].
    histories: tuple[tuple[Tensor, Tensor], ...]
    # [num_pages, ., ., head_dim] in the case's layout, head_dim // 2 bytes for NVFP4; for MLA [num_pages, page_size, head_dim].
    k_pages: Tensor
    v_pages: Tensor
    # int32 [batch_size, max_num_pages_per_seq]; with a table of V's own [batch_size, 2, ...]; block-sparse [num_kv_heads,
    # batch_size, ...]
    block_tables: Tensor
    seq_lens: Tensor  # int32 [batch_size]; block-sparse [num_kv_heads, batch_size]
    sinks: Tensor | None  # float32 [num_qo_heads]
    # Scale factors of an NVFP4 cache's K and V, [num_pages, ., ., head_dim // 16] each
    scale_factors: tuple[Tensor, Tensor] | None = None
    # Block-sparse: the keys that each K/V head sees, bool [kv_len, num_kv_heads]
    seen: tuple[Tensor, ...] | None = None
    shown: Tensor | None = None  # a draft's mask, bool [batch_size, q_len, q_len]
    causal: bool = True  # a row does not see keys after its own
    factors: tuple[float, float] = (1.0, 1.0)  # bmm1_scale and bmm2_scale are multiplied by these
    # Positions of the keys that each request's rows select, int64 [q_len, top_k], -1 for none; None if the case has no top_k.
    selected: tuple[Tensor, ...] | None = None

    @property
    def interface(self) -> AttentionCall:
        return self.case.interface

    @property
    def q_lens(self) -> tuple[int, ...]:
        return self.case.q_lens

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return self.case.kv_lens

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.case.is_mla else self.case.dtype  # MLA's function has no other output dtype

    @property
    def out_head_dim(self) -> int:
        return self.case.out_head_dim

    @property
    def kv_bound(self) -> str:
        return "max_kv_len" if self.interface is AttentionCall.CONTEXT else "max_seq_len"

    @property
    def bmm1_scale(self) -> float:
        return self.case.softmax_scale * (E4M3_K_SCALE if self.case.is_quantised else 1.0) * self.factors[0]

    @property
    def bmm2_scale(self) -> float:
        v_scale = E4M3_K_SCALE if self.v_pages is self.k_pages else E4M3_V_SCALE
        return (v_scale if self.case.is_quantised else 1.0) * self.factors[1]

    @property
    def max_seq_len(self) -> int:
        return self.block_tables.shape[-1] * self.case.page_size

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of FlashInfer's function, without those that have their default value."""
        case, q_lens, device = self.case, self.case.q_lens, self.query.device
        arguments: dict[str, Any] = {
            "query": self.query,
            "kv_cache": (self.k_pages, self.v_pages),
            "workspace_buffer": new_workspace(device),
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "bmm1_scale": self.bmm1_scale,
            "bmm2_scale": self.bmm2_scale,
        }
        if case.window_left >= 0:
            arguments["window_left"] = case.window_left
        if self.sinks is not None:
            arguments["sinks"] = self.sinks
        if self.shown is not None:
            arguments["mask"] = packed_mask(self.shown.cpu()).to(device)
        if not self.causal:
            arguments["causal"] = False
        if self.scale_factors is not None:
            # XQA has no context calls and no block-sparse calls.
            is_of_xqa = case.interface is AttentionCall.DECODE and self.seen is None
            arguments |= self.scale_factor_arguments(interleaved=not is_of_xqa)
        if case.is_mla:
            arguments |= {
                "query": self.query if case.offsets else self.query.unflatten(0, (len(q_lens), q_lens[0])),
                "kv_cache": self.k_pages,
                "qk_nope_head_dim": case.out_head_dim // 4,  # 128 of 512 in DeepSeek-V3; changes no result
                "kv_lora_rank": case.out_head_dim,
                "qk_rope_head_dim": case.head_dim - case.out_head_dim,
            }
        elif case.storage.kv_layout != "HND":
            arguments["kv_layout"] = case.storage.kv_layout
        if case.has_offsets:
            arguments |= {"max_q_len": max(q_lens), "cum_seq_lens_q": running_sum(q_lens, device)}
        if case.interface is AttentionCall.CONTEXT:
            arguments |= {"max_kv_len": self.max_seq_len, "batch_size": len(q_lens)}
            arguments["cum_seq_lens_kv"] = running_sum(case.kv_lens, device)
        else:
            arguments["max_seq_len"] = self.max_seq_len
        if self.seen is not None:
            arguments["enable_block_sparse_attention"] = True
        elif self.block_tables.dim() == 3:
            arguments["uses_shared_paged_kv_idx"] = False
        if case.interface is AttentionCall.DECODE and (case.offsets or q_lens[0] > 1):
            arguments["q_len_per_req"] = None if case.offsets else q_lens[0]
        if case.top_k:
            arguments |= self._selection_arguments()
        if case.rank is not None:
            ends = torch.tensor(case.all_kv_lens, dtype=torch.int32, device=device)
            # The ranks' results are merged by their LSEs.
            arguments |= {"cp_rank": case.rank[0], "cp_world": case.rank[1], "return_lse": True}
            if case.is_mla:
                arguments |= {"enable_dcp": True, "causal_seqlens_kv_global": ends, "return_lse_base": "base2"}
            else:
                arguments["causal_seqlens_kv_global"] = ends - q_lens[0]
        return arguments

    def new_out(self, dtype: torch.dtype | None = None) -> Tensor:
        shape = (*self.arguments()["query"].shape[:-1], self.out_head_dim)
        return unwritten(torch.empty(shape, dtype=dtype or self.out_dtype, device=self.query.device))

    def rules(self, **changes: Any) -> Rules:
        case = self.case
        own = Rules(
            bmm1_scale=self.bmm1_scale,
            bmm2_scale=self.bmm2_scale,
            arithmetic=case.dtype if case.arithmetic is None else case.arithmetic,
            out_dtype=self.out_dtype,
            window_left=case.window_left,
            sinks=self.sinks,
            shown=self.shown,
            causal=self.causal,
        )
        return replace(own, **changes)

    def truth(self, **changes: Any) -> Truth:
        requests = self.query, list(self.histories), list(self.q_lens), self.rules(**changes)
        selected = self.selected if self.case.rank is None else positions_of_rank(self.case, self.query.device)
        return truth_of_requests(*requests, selected=selected, seen=self.seen)

    def with_separate_tables(self) -> "AttentionInputs":
        """Return the same requests with the pages of V in another order than those of K, so that V needs its own page table."""
        pages, factors = self.v_pages, self.scale_factors
        tables = torch.stack((self.block_tables, len(pages) - 1 - self.block_tables), dim=1)
        moved = pages.new_empty_strided(pages.shape, pages.stride()).copy_(pages.flip(0))
        if factors is not None:
            factors = factors[0], factors[1].flip(0)
        return replace(self, v_pages=moved, block_tables=tables, scale_factors=factors)

    def places_with_tail(self, used: Tensor) -> Tensor:
        """Return `places()` with other slots in each row's columns from `used[row]` on. No kernel may read these columns."""
        places, page_id = self.places(), TAIL_IDS.get(self.case.storage.table_tail)
        is_used = torch.arange(places.shape[1], device=places.device) < used.unsqueeze(1)
        return torch.where(is_used, places, places[:, :1].roll(-1, 0) if page_id is None else page_id)

    def places(self) -> Tensor:
        """Return the pool slots of the cache entries that each row selects, int32 [num_rows, top_k]; -1 for no entry."""
        size, rows = self.case.page_size, []
        for table, positions in zip(self.block_tables, self.selected or (), strict=True):
            pages = table[(positions.clamp(min=0) // size)]
            rows.append(torch.where(positions < 0, -1, pages * size + positions % size))
        return torch.cat(rows).to(torch.int32)

    def _selection_arguments(self) -> dict[str, Any]:
        case = self.case
        used, lens = torch.tensor(keys_up_to_rows(case), device=self.query.device), {}
        if case.top_k_lens:
            used = (self.places() >= 0).sum(dim=1, dtype=torch.int32)
            lens = {"sparse_mla_top_k_lens": used}
        places = self.places_with_tail(used)
        places = places if case.offsets else places.view(len(case.q_lens), case.q_lens[0], case.top_k)
        return {"block_tables": places, "sparse_mla_top_k": case.top_k} | lens

    def scale_factor_arguments(self, interleaved: bool) -> dict[str, Any]:
        """Return `kv_cache_sf` and `backend`: "trtllm-gen" if V's scale factors are to be `interleaved`, else "xqa"."""
        assert self.scale_factors is not None
        k, v = self.scale_factors
        if not interleaved:
            return {"kv_cache_sf": (k, v), "backend": "xqa"}
        is_nhd = self.case.storage.kv_layout == "NHD"
        plain = v.view(torch.uint8)
        v = interleave_v_scale_factors(plain.transpose(1, 2) if is_nhd else plain)
        v = v.transpose(1, 2).contiguous() if is_nhd else v
        return {"kv_cache_sf": (k, v.view(E4M3)), "backend": "trtllm-gen"}


def running_sum(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the running sum of the lengths, from 0 on: int32 [len(lens) + 1]."""
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)


def build_attention(case: AttentionCase, device: torch.device) -> AttentionInputs:
    """Draw query, K and V of a case's requests, store K and V in shuffled pages of a pool, and return the call's tensors."""
    query, keys, values, sinks = draw_contents(case, device)
    stored = stored_kv(case.kv_dtype, keys, values)
    size, storage = case.page_size, case.storage
    pages_of = [-(-kv_len // size) for kv_len in case.kv_lens]
    num_pages, used = 2 * sum(pages_of) + 4, sum(pages_of)
    ids = list(range(num_pages))
    random.Random(storage.page_seed).shuffle(ids)
    if case.top_k:  # the pool's first slot holds a key
        ids.sort(key=lambda page: page > 0)
    one = storage.page_seed % max(used, 1)
    ids = [page + storage.first_page if place == one or not storage.one_far else page for place, page in enumerate(ids)]
    pools = new_pools(case, storage.first_page + num_pages, device)
    factors: list[Tensor] = []
    if case.kv_dtype == NVFP4:
        room, (pages, *page) = 2 if storage.gaps_in_scale_factors else 1, pools[0].shape
        page[-1] = case.head_dim // NVFP4_BLOCK
        factors = [*torch.empty(2, pages, room, *page, dtype=E4M3, device=device)[:, :, 0]]
    tables = torch.tensor(ids[:used], dtype=torch.int64).split(pages_of)
    in_page = torch.arange(size)
    slots = torch.cat(
        [(table[:, None] * size + in_page).flatten()[:n] for table, n in zip(tables, case.kv_lens, strict=True)]
    ).to(device)
    for pool in (*pools, *factors):
        fill_dead(pool[storage.first_page :], storage.dead)
        if storage.one_far:
            fill_dead(pool[:num_pages], storage.dead)
    read_keys, read_values = read_kv(*stored)
    if case.is_mla:
        read_values = read_keys[..., : case.out_head_dim]
    rows, lengths = list(tables), torch.tensor(case.kv_lens, dtype=torch.int32)
    seen = None if case.head_pages is None else seen_keys(case, device)
    if seen is not None:
        heads, requests = range(case.num_kv_heads), range(len(tables))
        rows = [tables[request][case.selected_pages(request, head)] for head in heads for request in requests]
        lengths = lengths_of_heads(seen)
    for pool, tokens in zip((*pools, *factors), stored, strict=False):  # MLA has only a pool of keys, without heads
        by_token = pool if case.is_mla or storage.kv_layout == "NHD" else pool.transpose(1, 2)
        if seen is None:
            by_token[slots // size, slots % size] = tokens[:, 0] if case.is_mla else tokens
        else:
            token, head = torch.cat(seen).nonzero(as_tuple=True)
            by_token[slots[token] // size, slots[token] % size, head] = tokens[token, head]
    return AttentionInputs(
        case=case,
        query=query,
        histories=tuple(zip(read_keys.split(case.kv_lens), read_values.split(case.kv_lens), strict=True)),
        k_pages=pools[0],
        v_pages=pools[-1],
        block_tables=_block_tables(case, rows, max(pages_of), ids[:used] or ids[:1], device).view(*lengths.shape, -1),
        seq_lens=lengths.to(device),
        sinks=sinks,
        scale_factors=(factors[0], factors[1]) if factors else None,
        selected=selected_positions(case, device) if case.top_k else None,
        seen=seen,
    )


def new_pools(case: AttentionCase, num_pages: int, device: torch.device) -> list[Tensor]:
    new: dict[str, Any] = {"dtype": case.kv_dtype, "device": device}
    if case.is_mla:
        return [torch.empty(num_pages, case.page_size, case.head_dim, **new)]
    width = case.head_dim // 2 if case.kv_dtype == NVFP4 else case.head_dim
    page: tuple[int, ...] = (case.num_kv_heads, case.page_size, width)
    if case.storage.kv_layout == "NHD":
        page = (case.page_size, case.num_kv_heads, width)
    if case.storage.stacked:
        return list(torch.empty(num_pages, 2, *page, **new).unbind(1))
    return list(torch.empty(2, num_pages, *page, **new).unbind(0))


def _block_tables(
    case: AttentionCase, tables: Sequence[Tensor], most_pages: int, live: list[int], device: torch.device
) -> Tensor:
    # No kernel may read the columns after a row's pages. They have one page id, or page ids of all requests (`live`).
    width = most_pages + case.storage.spare_columns
    page_id = TAIL_IDS.get(case.storage.table_tail)
    if page_id is None:
        cells = torch.tensor(live, dtype=torch.int32).repeat(-(-len(tables) * width // len(live)))
        filled = cells[: len(tables) * width].view(len(tables), width).flip(0)
    else:
        filled = torch.full((len(tables), width), page_id, dtype=torch.int32)
    for row, table in enumerate(tables):
        filled[row, : len(table)] = table
    return filled.to(device)
