"""Build the tensors of DeepSeek-V4's call: a pool of tokens, a pool of compressed entries, and the entries that rows select."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.entries import entries_first
from lab.calls.problem import AttentionCall
from lab.calls.selection import WINDOW_COLUMNS
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, build_attention, running_sum
from lab.workloads.inputs.contents import new_workspace
from lab.workloads.inputs.selection import keys_up_to_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class DSV4Inputs(AttentionInputs):
    """The tensors of DeepSeek-V4's call. The inherited fields describe the pool of tokens, with two exceptions: a history
    contains a request's tokens and then its compressed entries, and `selected` has positions in this history.
    """

    compressed_pages: Tensor  # [num_pages, page_size, head_dim]
    sparse_indices: Tensor  # int32 [num_rows, num_columns]; unused cells contain the case's `table_tail`
    sparse_topk_lens: Tensor  # int32 [num_rows]

    @property
    def interface(self) -> AttentionCall:
        return AttentionCall.DSV4_DECODE

    def arguments(self) -> dict[str, Any]:
        case = self.case
        arguments: dict[str, Any] = {
            "query": self.query if case.offsets else self.query.unflatten(0, (len(case.q_lens), case.q_lens[0])),
            "swa_kv_cache": self.k_pages,
            "workspace_buffer": new_workspace(self.query.device),
            "compressed_kv_cache": self.compressed_pages,
            **{name: getattr(self, name) for name in ("sparse_indices", "sparse_topk_lens", "seq_lens")},
            **{name: getattr(self, name) for name in ("bmm1_scale", "bmm2_scale")},
        }
        if self.sinks is not None:
            arguments["sinks"] = self.sinks
        if case.offsets:
            arguments["cum_seq_lens_q"] = running_sum(case.q_lens, self.query.device)
            arguments["max_q_len"] = max(*case.q_lens, 1)  # FlashInfer refuses 0
        return arguments


def build_dsv4(of_window: AttentionCase, of_compressed: AttentionCase, device: torch.device) -> DSV4Inputs:
    """Return the tensors of DeepSeek-V4's call from the cases of two calls with equal query rows. `of_window` is over the pool
    of tokens, and determines query, sinks and scales. `of_compressed` is over the pool of compressed entries.
    """
    window, compressed = build_attention(of_window, device), build_attention(of_compressed, device)
    if compressed.selected is not None:
        compressed = replace(compressed, selected=tuple(map(entries_first, compressed.selected)))
    of_tokens, of_entries = window.selected or (), compressed.selected or (None,) * len(of_window.q_lens)
    selected, keys = [], []
    for (tokens, _), (entries, _), own, others in zip(
        window.histories, compressed.histories, of_tokens, of_entries, strict=True
    ):
        keys.append(torch.cat((tokens, entries)))
        selected.append(
            own if others is None else torch.cat((own, torch.where(others < 0, -1, others + len(tokens))), 1)
        )
    parts = [window.places_with_tail(torch.tensor(keys_up_to_rows(of_window), device=device))]
    lens = torch.zeros_like(parts[0][:, 0])
    if compressed.selected is not None:
        lens = (compressed.places() >= 0).sum(dim=1)
        parts.append(compressed.places_with_tail(lens))
    return DSV4Inputs(
        **vars(window) | {"histories": tuple((each, each) for each in keys), "selected": tuple(selected)},
        compressed_pages=compressed.k_pages,
        sparse_indices=torch.cat(parts, dim=1),
        sparse_topk_lens=(WINDOW_COLUMNS + lens).to(torch.int32),
    )
