"""Find an MLA pass that is right eagerly and wrong in a CUDA graph replay: old lengths or entries, padding that is used.

A case is a replay sequence of check S1 (graph_stories), with latent cache entries and the buffers of the MLA backend. Unused
columns of the page table hold values of an earlier batch.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from lab.calls.problem import LATENT_CALLS, AttentionCall
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.graph_replays import judge_sequence, replayed_modes
from lab.metadata.engine.graph_inputs import MetadataPlace
from lab.metadata.engine.lengths import DraftAttention
from lab.workloads.graph_case import MLAGraphCase, vllm_graph_modes

COUNTING = (DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET)  # ways to count the keys of a draft step


def _cases(scope: Scope) -> Iterator[MLAGraphCase]:
    ranges, is_full = scope.ranges, scope.is_full
    page_sizes = ranges.mla_page_sizes if is_full else ranges.mla_page_sizes[:1]
    head_dims = ranges.mla_head_dims if is_full else ranges.mla_head_dims[:1]
    if scope.interface is not AttentionCall.MLA_DECODE:
        yield from _of_two_pools(scope)
        return
    heads = min(ranges.mla_heads, key=lambda number: abs(number - 16))  # DeepSeek-V3's on one of 8 GPUs
    for number, (page_size, (head_dim, rank)) in enumerate(product(page_sizes, head_dims)):
        dims: dict[str, Any] = {"num_qo_heads": heads, "kv_lora_rank": rank, "qk_rope_head_dim": head_dim - rank}
        for mode, sequence, turn in replayed_modes(scope):
            settings = list(product(MetadataPlace, COUNTING[:1] if mode.draft_step is None else COUNTING))
            for place, attention in settings if is_full and not number else [settings[(turn + number) % len(settings)]]:
                yield MLAGraphCase(mode, sequence, place, page_size, attention=attention, **dims)
            if mode in vllm_graph_modes(mode.num_tokens_per_req) and not number:
                yield MLAGraphCase(mode, sequence, page_size=page_size, padded_seq_len=0, **dims)
            if (is_full or turn % 2) and not number and not mode.forward_mode.query_rows.are_unequal_drafts:
                yield MLAGraphCase(mode, sequence, list(MetadataPlace)[turn % 2], page_size, index_topk=48, **dims)


def _of_two_pools(scope: Scope) -> Iterator[MLAGraphCase]:
    heads, (_, rank) = min(scope.ranges.mla_heads), scope.ranges.mla_head_dims[0]
    dims: dict[str, Any] = {"page_size": 128, "num_qo_heads": heads, "kv_lora_rank": rank, "qk_rope_head_dim": 0}
    ratios = ((4, 48), (128, None), (1, 48), (0, None), (2, 48))
    for number, (mode, sequence, turn) in enumerate(replayed_modes(scope)):
        ratio, topk = ratios[number % len(ratios)]
        if mode.draft_step is not None or mode.forward_mode.extends_draft:
            ratio, topk = 0, None
        if mode.forward_mode.query_rows.are_uniform or mode.forward_mode.query_rows.are_bounded:
            place = list(MetadataPlace)[turn % 2]
            yield MLAGraphCase(mode, sequence, place, index_topk=topk, compress_ratio=ratio, **dims)


CHECK = Check("S2", __doc__, _cases, judge_sequence, LATENT_CALLS)
