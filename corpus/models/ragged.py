"""Right models of the ragged context call, of DeepSeek-V4's call, of kernels that read a tensor only once, and of MLA decode calls
whose rows select entries.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corpus.models.split_kv import Forgiving, RowTile, SplitKV
from corpus.wrong import DSV4, MLA, RAGGED, Model, Problem
from lab.calls import DSV4DecodeCall, takes
from lab.calls.dsv4_decode import TwoPools
from lab.calls.problem import PagedAttention
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.references.paged_attention import paged_attention
from lab.references.ragged_attention import ragged_attention


class Ragged(Model, interface=(RAGGED,)):
    """A right model of FlashInfer's ragged context call. Every method except `launch` is a stage."""

    def __init__(self) -> None:
        self.trtllm_ragged_attention_deepseek = takes(RaggedContextCall)(self.launch)

    def launch(self, call: RaggedContextCall) -> Any:
        problem = self.applied(self.posed(call))
        out, lse_log2 = ragged_attention(problem)
        self.finish(problem, out, lse_log2)
        self.finish_call(call, out)
        return problem.returned(out, lse_log2)

    def posed(self, call: RaggedContextCall) -> RaggedAttention:
        return call.problem()

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        """A wrong kernel may change the results in place here."""

    def finish_call(self, call: RaggedContextCall, out: Tensor) -> None:
        """A wrong kernel may change the output in place here, depending on the call's arguments."""


class DSV4Decode(Model, interface=(DSV4,)):
    """A right model of FlashInfer's sparse MLA call of DeepSeek-V4."""

    def __init__(self) -> None:
        self.trtllm_batch_decode_sparse_mla_dsv4 = takes(DSV4DecodeCall)(self.launch)

    def launch(self, call: DSV4DecodeCall) -> Any:
        problem = self.applied(call.problem(), call)
        out, _ = paged_attention(problem)
        self.finish(problem, out)
        return call.returned(out)

    def finish(self, problem: TwoPools, out: Tensor) -> None:
        """A wrong kernel may change the rows of the output in place here."""


class ReadOnce(Model):
    """A defect: tensors of a problem are copied when their addresses are first seen, and later calls use the copies.

    Attributes:
        fields: names of the problem's fields that are copied.
    """

    fields: tuple[str, ...] = ()

    def changed(self, problem: Problem, *_: Any) -> Problem:
        return replace(problem, **{name: self._kept(problem, getattr(problem, name)) for name in self.fields})

    def _kept(self, problem: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.first((value.data_ptr(), value.shape, self.also_by(problem)), value.clone)

    def also_by(self, problem: Any) -> Any:
        """Return facts that must be equal, besides address and shape, for a copy to be used again."""


class PagedReadOnce(ReadOnce, Forgiving):
    """The defect `ReadOnce` in paged calls."""


class RaggedReadOnce(ReadOnce, Ragged):
    """The defect `ReadOnce` in ragged calls."""


class SelectedSplitKV(SplitKV, selects_entries=True):
    """A right model of MLA decode calls with `sparse_mla_top_k`; other calls are refused. A tile is one query row, and its keys are
    the columns that the row uses. A column without an entry is a key that the row does not see.
    """

    interface = (MLA,)

    def tiles(self, problem: PagedAttention) -> list[RowTile]:
        offsets = self.row_offsets(problem)
        tiles = []
        for request, kv_len in enumerate(self.kv_lens(problem)):
            for row in range(*offsets[request : request + 2]):
                position = self.position(kv_len, offsets[request + 1] - offsets[request], row - offsets[request])
                columns = self.columns(problem, row, position)
                tiles.append(RowTile(request, row, 1, position, 1, columns, 0, columns))
        return tiles

    def columns(self, problem: PagedAttention, row: int, position: int) -> int:
        """Return the number of columns that a row uses."""
        assert problem.selected is not None
        used = position + 1 if problem.selected_lens is None else int(problem.selected_lens[row])
        return max(0, min(used, problem.selected.shape[1]))

    def selected(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        """Return the places in a tile's columns, int64 [num_columns]; a negative place is no entry."""
        assert problem.selected is not None
        return problem.selected[tile.first_row, : tile.key_end].to(torch.int64)

    def is_entry(self, places: Tensor) -> Tensor:
        return places >= 0

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return self.is_entry(self.selected(problem, tile)).unsqueeze(0)

    def keys(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        return self.at_places(problem, problem.k_cache, self.selected(problem, tile))

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        return self.at_places(problem, problem.v_cache, self.selected(problem, tile))

    def at_places(self, problem: PagedAttention, cache: Tensor, places: Tensor) -> Tensor:
        """Return entries, float32 [1, num_columns, head_dim or v_head_dim]. A place that is no entry reads zeros."""
        is_entry = self.is_entry(places)
        found = places.clamp(0, cache.shape[0] * cache.shape[2] - 1)
        tokens = self.entries(cache, None, self.page(problem, found), self.offsets(problem, found))
        return torch.where(is_entry.view(1, -1, 1), tokens, 0.0)

    def page(self, problem: PagedAttention, places: Tensor) -> Tensor:
        return places // problem.page_size
