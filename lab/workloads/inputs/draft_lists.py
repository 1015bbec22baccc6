"""Check that a function writes the K/V index lists of a multi-step draft (slots that each step reads), and nothing else."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.references.draft_decode_kv_indices import draft_start, generate_draft_decode_kv_indices
from lab.workloads.inputs.guards import surrounded
from lab.workloads.inputs.views import Layout

# POISON fills cells that the function must not write, FOREIGN cells that it must not read.
POISON, FOREIGN = -77, 2**30
SPARE_ROWS = 2  # rows of req_to_token after the requests' rows
WIDE_SLOT = 2**33  # added to slots if the tensors that hold them have 64 bits
TENSORS = ("req_pool_indices", "req_to_token", "paged_kernel_lens", "kv_indices", "kv_indptr", "positions", "v2p")
DTYPES = dict.fromkeys(TENSORS, torch.int64)

Writer = Callable[..., None]  # takes the keyword arguments of `lab.kernels.generate_draft_decode_kv_indices`


@dataclass(frozen=True)
class DraftListsCase:
    """A multi-step speculative draft, as data. A negative `spare_columns` or `spare_capacity` makes a tensor too small."""

    lens: tuple[int, ...]  # lengths of the prefixes
    num_steps: int = 3
    topk: int = 1
    page_size: int = 1
    positions_differ: bool = False  # `positions`, from which `kv_indptr` is summed, differ from the prefix lengths
    repeated: bool = False  # all requests have the same row of `req_to_token`; otherwise the rows are in random order
    spare_columns: int = 3  # columns of `req_to_token` after the longest draft
    row_gap: int = 0  # cells between the rows of `req_to_token`
    far_rows: bool = False  # the last row of `req_to_token`, which a request has, begins 2**31 cells after the first
    spare_capacity: int = 5  # cells of a `kv_indices` row after the last step's lists
    spare_boundaries: int = 2  # rows of `kv_indptr`, and cells per row, that belong to no step or request
    first_cell: int = 8  # index in its storage at which each tensor starts
    dtypes: dict[str, torch.dtype] = field(default_factory=lambda: DTYPES)
    seed: int = 0  # seed of slots and rows
    window_size: int = 0  # number of tokens at a prefix's end that a list keeps; 0 for all
    sink_size: int = 0  # number of tokens at a prefix's start that a list with a window keeps too
    entries_are_pages: bool = False  # an entry of `req_to_token` is a page
    translated: bool = False  # `req_to_token` has virtual slots or pages, some of which have no page of the pool

    @property
    def num_rows(self) -> int:
        return len(self.lens) + (0 if self.far_rows else SPARE_ROWS)

    @property
    def entry_page_size(self) -> int:
        return self.page_size if self.entries_are_pages else 1

    @property
    def longest_row(self) -> int:
        """Return the number of columns of ``req_to_token`` that the longest request needs, with its drafted tokens."""
        shape = {"num_steps": self.num_steps, "topk": self.topk, "page_size": self.page_size}
        tokens = max((draft_start(n, self.topk - 1, **shape) + self.num_steps for n in self.lens), default=0)
        return -(-tokens // self.entry_page_size)

    @property
    def most_tokens(self) -> int:
        most = self.window_size + self.sink_size if self.window_size else max(self.lens, default=0)
        return self.topk * sum(min(n, most) + self.num_steps for n in self.lens)


class DraftLists:
    """The tensors of a multi-step draft: `arguments` are the keyword arguments of `generate_draft_decode_kv_indices`."""

    def __init__(self, case: DraftListsCase, device: str = "cpu") -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(case.seed)
        rows = torch.randperm(case.num_rows, generator=generator)[: len(case.lens)]
        positions = torch.tensor(case.lens, dtype=torch.int64).repeat_interleave(case.topk)
        if case.positions_differ:
            positions = torch.randint(0, 1000, positions.shape, generator=generator)
        most = max(0, case.most_tokens + case.spare_capacity)
        num_lists, num_steps = len(positions) + 1 + case.spare_boundaries, case.num_steps + case.spare_boundaries
        indices, kv_indices = self._surrounded("kv_indices", case.num_steps, most)
        boundaries, kv_indptr = self._surrounded("kv_indptr", num_steps, num_lists)
        self._outputs = {"kv_indices": indices, "kv_indptr": boundaries}  # the whole memory of each output
        table = self._request_table(generator)
        self.arguments: dict[str, Any] = {
            "req_pool_indices": self._vector("req_pool_indices", rows[:1].expand(len(rows)) if case.repeated else rows),
            "req_to_token": table,
            "paged_kernel_lens": self._vector("paged_kernel_lens", torch.tensor(case.lens, dtype=torch.int64)),
            "kv_indices": kv_indices,
            "kv_indptr": kv_indptr,
            "positions": self._vector("positions", positions),
            "topk": case.topk,
            "page_size": case.page_size,
        }
        if case.window_size:
            self.arguments |= {"window_size": case.window_size, "sink_size": case.sink_size}
        if case.entries_are_pages:
            self.arguments["entry_page_size"] = case.page_size
        if case.translated:
            self.arguments["v2p"] = self._page_map(table, generator)

    def wrongs(self, write: Writer) -> list[str]:
        for whole in self._outputs.values():
            whole.fill_(POISON)
        inputs = {name: value.clone() for name, value in self._inputs().items()}
        write(**self.arguments)
        found = [f"it changed {name}" for name, value in self._inputs().items() if not torch.equal(value, inputs[name])]
        for name, value in self._inputs().items():  # the reference reads the same inputs
            value.copy_(inputs[name])
        for (name, whole), expected in zip(self._outputs.items(), self._expected(), strict=True):
            wrong = (whole.cpu() != expected).nonzero()
            if len(wrong):
                first = tuple(wrong[0].tolist())
                found.append(
                    f"{len(wrong)} cells of {name} or of the memory around it are wrong, of {expected.numel()}; the first one, "
                    f"{list(first)}, holds {int(whole[first])} and should hold {int(expected[first])}"
                )
        return found

    def take(self, other: "DraftLists") -> None:
        """Copy the inputs of another draft of the same sizes into these tensors, as an engine does before a graph replay."""
        theirs = other._inputs()
        for name, value in self._inputs().items():
            value.copy_(theirs[name])

    def _inputs(self) -> dict[str, Any]:
        names = ("req_pool_indices", "req_to_token", "paged_kernel_lens", "positions", "v2p")
        return {name: self.arguments[name] for name in names if name in self.arguments}

    def _expected(self) -> list[Tensor]:
        memory = [torch.full_like(whole, POISON, device="cpu") for whole in self._outputs.values()]
        given = self.arguments | {name: value.cpu() for name, value in self._inputs().items()}
        for name, whole in zip(self._outputs, memory, strict=True):
            part = given[name]
            given[name] = whole.as_strided(part.shape, part.stride(), part.storage_offset())
        in_place(generate_draft_decode_kv_indices)(**given)
        return memory

    def _surrounded(self, name: str, *shape: int, filling: int = POISON, after: int = 8) -> tuple[Tensor, Tensor]:
        dtype, before = self.case.dtypes[name], self.case.first_cell
        return surrounded(*shape, dtype=dtype, device=self.device, filling=filling, before=before, after=after)

    def _vector(self, name: str, values: Tensor) -> Tensor:
        return self._surrounded(name, len(values))[1].copy_(values)

    def _request_table(self, generator: torch.Generator) -> Tensor:
        case = self.case
        shape = case.num_rows, max(1, case.longest_row + case.spare_columns)
        _, part = self._surrounded("req_to_token", *shape, filling=FOREIGN, after=case.row_gap)
        part = Layout.FAR_APART.of(part) if case.far_rows else part
        entries = torch.randperm(part.numel(), generator=generator).view(part.shape) + 1
        if case.translated:
            return part.copy_(entries.masked_fill(entries % 16 == 0, -1))
        return part.copy_(entries + self._wide("req_to_token", case.entry_page_size))

    def _page_map(self, table: Tensor, generator: torch.Generator) -> Tensor:
        case = self.case
        num_pages = table.numel() * case.entry_page_size // case.page_size + 2
        pages = torch.randperm(num_pages, generator=generator)
        return self._vector("v2p", torch.where(pages % 8 == 7, -1, pages + self._wide("v2p", case.page_size)))

    def _wide(self, source: str, tokens: int) -> int:
        # Added to the entries of the tensor `source`, so that the slots computed from them exceed 32 bits.
        most = torch.iinfo(self.case.dtypes[source]).max // 2
        is_wide = self.case.dtypes["kv_indices"] == torch.int64 and WIDE_SLOT // tokens < most
        return WIDE_SLOT // tokens if is_wide else 0


def in_place(function: Callable[..., Any]) -> Writer:
    """Return a function that writes kv_indices and kv_indptr in place: `function` itself, or a wrapper if it returns lists."""
    if "num_steps" not in inspect.signature(function).parameters:
        return function

    def write(kv_indices: Tensor, kv_indptr: Tensor, req_to_token: Tensor, **given: Any) -> None:
        num_steps, topk, page_size = kv_indices.shape[0], given["topk"], given["page_size"]
        read = [
            draft_start(length, topk - 1, num_steps=num_steps, topk=topk, page_size=page_size) + num_steps
            for length in given["paged_kernel_lens"].tolist()
        ]
        columns = -(-max(read, default=0) // given.get("entry_page_size", 1))
        table = torch.nn.functional.pad(req_to_token, (0, max(0, columns - req_to_token.shape[1])))
        lists, boundaries = function(req_to_token=table, num_steps=num_steps, **given)
        for step in range(num_steps):
            fitting = lists[step][: kv_indices.shape[1]]
            kv_indices[step, : len(fitting)] = fitting.to(kv_indices)
            kv_indptr[step, 1 : len(boundaries[step])] = boundaries[step][1:].to(kv_indptr)

    return write
