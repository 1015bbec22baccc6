"""Time a recorded call with its page tables, lengths and strides, but with new contents for each sample. The new contents have
the standard deviations of the recorded ones. All page ids are shifted by the same number, so neighbouring pages stay
neighbours.
"""

import copy
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, Problem, RaggedAttention
from lab.calls.entries import keys_per_offset, num_keys, places_of
from lab.calls.problem import E4M3, NVFP4
from lab.kernels import prepare
from lab.recorded.call import distinct, sides_of
from lab.recorded.case import RecordedCase
from lab.recorded.suspicions import visible_of_request
from lab.references.assertion import histories_of, truth_of_problem
from lab.references.errors import Truth
from lab.workloads.inputs.contents import as_stored
from lab.workloads.inputs.redraw import MOST_SHORTER, SHORTER_EVERY, SeededRedraw, Seeds, touched, wipe


def sizes_of(problem: Problem) -> SimpleNamespace:
    """Return a problem's sizes, such as `bytes_moved`. A sparse problem's keys are the distinct selected entries."""
    q_lens, kv_lens = problem.q_lens(), num_keys(problem)
    visible = [visible_of_request(problem, *each) for each in zip(itertools.count(), q_lens, kv_lens)]
    seen = [keys.any(dim=0).nonzero().flatten() for keys in visible]
    requests = torch.arange(len(seen)).repeat_interleave(torch.tensor([len(keys) for keys in seen]))
    factor_bytes = 0 if (factors := getattr(problem, "k_scale_factors", None)) is None else factors.shape[-1]
    kv_bytes = sum(  # a key that several requests share is counted once
        len(at.unique()) * problem.num_kv_heads * (side.shape[-1] * side.dtype.itemsize + factor_bytes)
        for side, at in zip(_sides(problem), places_of(problem, requests, torch.cat(seen)), strict=False)
    )
    heads, head_dim, v_head_dim = problem.num_qo_heads, problem.head_dim, problem.v_head_dim
    row_bytes = heads * (head_dim * problem.query.dtype.itemsize + v_head_dim * problem.out_dtype.itemsize)
    return SimpleNamespace(
        mode=problem.call,
        geometry=f"{heads}/{problem.num_kv_heads} heads of {head_dim}",
        page_size=None if isinstance(problem, RaggedAttention) else problem.page_size,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        dtype=problem.query.dtype,
        kv_dtype=problem.kv_dtype,
        bytes_moved=kv_bytes + sum(q_lens) * row_bytes,
        operations=2 * heads * (head_dim + v_head_dim) * sum(int(each.sum()) for each in visible),
    )


@dataclass(frozen=True, eq=False)
class RecordedPass:  # with what the timing of an `EnginePass` needs
    case: SimpleNamespace  #: from `sizes_of`
    given: Mapping[str, Any]  #: the arguments, with `out`. Kernels get copies of these tensors.
    deviations: Sequence[float]  #: the standard deviations of the recorded query, K and V
    query: Tensor  #: as in the problem
    pool_bytes: int
    functions: list[str]

    @classmethod
    def of(cls, recorded: RecordedCase, device: torch.device) -> "RecordedPass":
        call, problem = recorded.posed()
        call.refuse_unsupported("timed")
        sizes, given = sizes_of(problem), call.arguments(device)
        if given.get("out") is None:
            shape = (*given["query"].shape[:-1], problem.v_head_dim)
            given["out"] = torch.empty(shape, dtype=problem.out_dtype, device=device)
        longest = max(range(problem.batch_size), key=sizes.kv_lens.__getitem__)
        wide = [each.to(torch.float32) for each in (problem.query, *histories_of(problem, [longest])[0])]
        deviations = [float(each[each.isfinite()].std(correction=0).nan_to_num()) or 1.0 for each in wide]
        query = CALL_TYPES[call.function](**given).problem().query
        return cls(sizes, given, deviations, query, sum(side.nbytes for side in _sides(problem)), [call.function.value])

    def posed(self, arguments: Mapping[str, Any]) -> Problem:
        problem: Problem = CALL_TYPES[self.case.mode](**arguments).problem()
        return problem

    def prepare(self, implementation: Any, **arguments: Any) -> Callable[[], Any]:
        return prepare(implementation, self.case.mode.value, **arguments)

    def new_out(self) -> Tensor:
        return torch.empty_like(self.given["out"])

    def rows_of_requests(self, out: Tensor) -> Tensor:
        return out.flatten(0, -3)[: sum(self.case.q_lens)]


@dataclass(frozen=True, eq=False)
class CallRedraw(SeededRedraw):
    """Draws new queries, K, V, page ids and lengths for a recorded call. Lengths of unpaged (ragged) K and V do not change."""

    forward: RecordedPass

    def first_set(self) -> dict[str, Any]:
        return copy.deepcopy({name: value for name, value in self.forward.given.items() if name != "out"})

    def write_tokens(self, arguments: Mapping[str, Any], seed: int) -> None:
        sides = _sides(self.forward.posed(arguments))
        for number, side in enumerate(sides, start=1):
            side.copy_(self._drawn(side.shape, side.dtype, number, seed))
        if self.forward.case.page_size:
            table, num_pages = distinct(self.forward.given["block_tables"]), len(sides[0])
            stays = self.keeps_metadata or sides[0].dtype == NVFP4  # the scale factors of a page are not moved
            shift = 0 if stays else random.Random(f"pages {seed}").randrange(num_pages)
            selects = self.forward.given.get("sparse_mla_top_k")
            in_page = self.forward.case.page_size if selects else 1  # a cell names an entry of a page, or a page
            is_page, count = (table >= 0) & (table < num_pages * in_page), num_pages * in_page
            distinct(arguments["block_tables"]).copy_(torch.where(is_page, (table + shift * in_page) % count, table))

    def write_call(self, arguments: Mapping[str, Any], seeds: Seeds) -> None:
        query, kv_lens = arguments["query"], torch.tensor(self.forward.case.kv_lens, device=arguments["query"].device)
        query.copy_(self._drawn(query.shape, query.dtype, 0, seeds.call))
        problem, ends = self.forward.posed(arguments), kv_lens.cumsum(0)
        chosen = touched(seeds.tokens, sum(self.forward.case.kv_lens), query.device)
        requests = torch.searchsorted(ends, chosen, right=True)
        places = places_of(problem, requests, chosen - (ends - kv_lens)[requests])
        for number, (side, some) in enumerate(zip(_sides(problem), places, strict=False), start=1):
            at, size = some.unique(), side.shape[1]
            drawn = self._drawn((len(at), *side.shape[2:]), side.dtype, number, seeds.call + 1)
            if side.dtype == E4M3:  # torch cannot index it
                side, drawn = side.view(torch.uint8), drawn.view(torch.uint8)
            side[at // size, at % size] = drawn
        # Selected entries depend on the lengths, which are kept then.
        if self.forward.case.page_size and not self.forward.given.get("sparse_mla_top_k"):
            dice, case = random.Random(f"lengths {seeds.call}"), self.forward.case
            shortens = not self.keeps_metadata and seeds.call % SHORTER_EVERY == 0
            spare = (max(keys - max(rows, 1), 0) for keys, rows in zip(case.kv_lens, case.q_lens, strict=True))
            shorter = [dice.randint(0, min(MOST_SHORTER, each)) if shortens else 0 for each in spare]
            lengths = kv_lens - torch.tensor(shorter, device=query.device)
            arguments["seq_lens"].copy_(lengths)
            if "cum_seq_lens_kv" in arguments:
                unit = keys_per_offset(self.forward.posed(self.forward.given))
                arguments["cum_seq_lens_kv"][1:].copy_((-(-lengths // unit)).cumsum(0))
        wipe(arguments)

    def truth(self, seeds: Seeds, requests: Sequence[int]) -> Truth:
        arguments = {**self.forward.given, **self.first_set()}
        self.write_tokens(arguments, seeds.tokens)
        self.write_call(arguments, seeds)
        arithmetic = E4M3 if self.forward.case.kv_dtype == E4M3 else None  # as XQA computes
        return truth_of_problem(self.forward.posed(arguments), arithmetic, requests=requests)

    def _drawn(self, shape: Sequence[int], dtype: torch.dtype, number: int, seed: int) -> Tensor:
        generator = self._generator(seed + number)  # 0 for the query, 1 for K, 2 for V
        if dtype == NVFP4:
            return torch.randint(256, tuple(shape), dtype=dtype, device=generator.device, generator=generator)
        drawn = torch.randn(tuple(shape), device=generator.device, generator=generator)
        return as_stored(drawn * self.forward.deviations[number], 1.0, dtype)


def _sides(problem: Problem) -> list[Tensor]:
    k, v = sides_of(problem)
    return [k] if k.data_ptr() == v.data_ptr() else [k, v]  # V may be the first part of K (MLA)
