"""Make the case of a configuration (one call, given by a value for each of its parameters): sizes, lengths and contents.

`lab.checks.parameters.calls` adds the forms of the arguments, such as strides.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.parameters.attention import edge_lengths
from lab.checks.parameters.paged_axes import EQUAL, HEAD_PAGES, NO_SELECTION, RANKS, REQUESTS, SHORT
from lab.checks.parameters.values import (
    Cache,
    Lengths,
    LongestRequest,
    Mask,
    Offsets,
    Pages,
    Rows,
    Sinks,
    Tables,
    empty_requests,
)
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Contents, Entries, Storage, TableTail
from lab.workloads.interfaces import Interface

LONGEST_OF_MANY = 600  # keys of a large batch's longest request: a kernel splits it, unlike the rest
CONTEXT_ROWS = (5, 1, 17, 2, 33)  # of the requests in turn
WIDE = 4200  # columns of a wide table, more than 4,096
_TAILS = {Tables.NEGATIVE_TAIL: TableTail.NEGATIVE, Tables.FAR_TAIL: TableTail.FAR}


@dataclass(frozen=True)
class Lens:
    """The number of keys and the number of query rows of each request in a batch."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]


class Chosen(Protocol):
    """A value for each axis of a function's model, as a `Configuration` has it."""

    @property
    def interface(self) -> Interface: ...

    @property
    def seed(self) -> int: ...

    def __getitem__(self, axis: str) -> Any: ...

    def get(self, axis: str, default: Any = None) -> Any:
        """Return the value of an axis, or `default` if the function's model does not have the axis."""


def attention_case(of: Chosen, ranges: Ranges) -> AttentionCase:
    """Return the attention case of a paged call's configuration: its sizes, dtypes, lengths, contents and storage."""
    interface, page_size, query, cache = (
        AttentionCall(of.interface),
        of["page_size"],
        of["dtypes"].query,
        of["dtypes"].cache,
    )
    q_lens = q_lens_of(of)
    kv_lens = kv_lens_of(of, q_lens)
    width = max(-(-kv_len // page_size) for kv_len in kv_lens)
    return AttentionCase(
        interface,
        kv_lens,
        q_lens,
        dtype=query,
        kv_dtype=cache,
        # A kernel rounds the weights of a query of e4m3 so too.
        arithmetic=E4M3 if query == E4M3 else ranges.arithmetic(cache),
        window_left=of.get("window_left", -1),
        sinks=of["sinks"] != Sinks.NONE,
        head_pages=HEAD_PAGES[of.get("head_pages", NO_SELECTION)],
        rank=RANKS[of.get("rank", "none")],
        offsets=interface is not AttentionCall.CONTEXT and of["offsets"] != Offsets.NONE,
        top_k=of.get("top_k", 0),
        entries=Entries[of["entries"].upper()] if of.get("top_k") else None,
        top_k_lens=of.get("top_k_lens", False),
        contents=Contents[of["contents"].upper()],
        seed=of.seed,
        storage=Storage(
            page_size,
            kv_layout=of.get("kv_layout", "HND"),
            table_tail=_TAILS.get(of["block_tables"], TableTail.FOREIGN),
            spare_columns=max(WIDE - width, 0) if of["block_tables"] == Tables.WIDE else 3,
            page_seed=of.seed,
            stacked=of["cache"].is_one_tensor or of["cache"] == Cache.K_IS_V,
        ),
        **_heads(of),
    )


def _heads(of: Chosen) -> dict[str, Any]:
    if of.interface is not AttentionCall.MLA_DECODE:
        return {name: of[name] for name in ("group", "num_kv_heads", "head_dim")}
    dims = of["head_dims"]
    return {"group": of["heads"], "num_kv_heads": 1, "head_dim": dims.head_dim, "v_head_dim": dims.v_head_dim}


def q_lens_of(of: Chosen) -> tuple[int, ...]:
    """Return the number of query rows of each request in a paged call."""
    if of.interface is AttentionCall.CONTEXT:
        return rows_of_prompts(of)
    count = of["requests"]
    q_lens = [of["q_len"]] * count
    if of["offsets"] == Offsets.UNEQUAL:
        q_lens = [1 + (request + of.seed) % of["q_len"] for request in range(count)]
    return emptied(q_lens, of["offsets"])


def rows_of_prompts(of: Chosen) -> tuple[int, ...]:
    """Return the number of query rows of each request in a call that takes prompts (context or ragged)."""
    count = of["requests"]
    rows = {Rows.UNEQUAL: CONTEXT_ROWS, Rows.ONE_EACH: (1,)}.get(of["rows"], (of["rows"], *CONTEXT_ROWS))
    if count > REQUESTS:
        rows = (1, 2, 3) if of["rows"] == Rows.UNEQUAL else rows
    q_lens = [rows[request % len(rows)] for request in range(count)]
    if isinstance(of["rows"], int):
        of_prompt = next(iter(longest_requests(of)))
        q_lens[0], q_lens[of_prompt] = q_lens[of_prompt], q_lens[0]
    return emptied(q_lens, of["offsets"])


def longest_requests(of: Chosen) -> list[int]:
    """Return the indexes of the longest requests, without those that have no rows or no keys."""
    count = of["requests"]
    empty = {*empty_requests(of["offsets"], count), *empty_requests(of["lengths"], count)}
    places: LongestRequest = of.get("longest_request", LongestRequest.LAST)
    return [request for request in places.requests(count) if request not in empty] or [count - 1]


def emptied(lens: Sequence[int], without: Any) -> tuple[int, ...]:
    """Return the lengths, with 0 for the requests that `without` names. If it is no `Without`, nothing changes."""
    empty = empty_requests(without, len(lens))
    return tuple(0 if request in empty else length for request, length in enumerate(lens))


def with_long(kv_lens: list[int], of: Chosen, longest: Callable[[], int]) -> None:
    """Set the number of keys of each of the longest requests: to one from `longest`, of every second request to half of one."""
    for number, request in enumerate(longest_requests(of)):
        kv_lens[request] = longest() // (1 + number % 2)


def rows_without_keys(q_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """Return bool [num_rows], True for rows whose request has no keys."""
    without = torch.tensor([kv_len == 0 for kv_len in kv_lens], dtype=torch.bool)
    return without.repeat_interleave(torch.tensor(q_lens, dtype=torch.int64))


def fewer_than_rows(q_lens: Sequence[int]) -> list[int]:
    """Return a number of keys for each request: in turn one and two fewer than its rows, but at least 1 for several rows."""
    return [max(rows - 1 - request % 2, rows // 2) for request, rows in enumerate(q_lens)]


def generator(of: Chosen) -> random.Random:
    return random.Random(repr((of.interface.name, of.seed)))


def kv_lens_of(of: Chosen, q_lens: Sequence[int]) -> tuple[int, ...]:
    """Return the number of keys of each request in a paged call, as the axis "lengths" says."""
    lengths, count, page_size, rng = of["lengths"], len(q_lens), of["page_size"], generator(of)
    if count > REQUESTS:
        kv_lens = [8 + 3 * request % 47 for request in range(count)]
    else:
        edges = edge_lengths(page_size, EQUAL)
        kv_lens = [rng.choice(edges) for _ in q_lens]
    if isinstance(lengths, int):
        with_long(kv_lens, of, lambda: lengths + rng.randrange(page_size))
    elif count > REQUESTS:
        with_long(kv_lens, of, lambda: LONGEST_OF_MANY)
    else:
        with_long(kv_lens, of, lambda: SHORT - rng.randrange(20))  # a window hides something of it
        if of.get("pages") == Pages.TWICE:
            kv_lens = [kv_len + page_size for kv_len in kv_lens]
    if of.get("mask") == Mask.OWN_BIT_CLEAR:
        # Of the draft alone, whose first row sees no key.
        kv_lens[min({*range(count)}.difference(longest_requests(of)), default=0)] = 0
    if lengths == Lengths.EQUAL:
        kv_lens = [EQUAL] * count
    kv_lens = [max(kv_len, rows) for kv_len, rows in zip(kv_lens, q_lens, strict=True)]
    if lengths == Lengths.FEWER:
        kv_lens = fewer_than_rows(q_lens)
    return emptied(kv_lens, lengths)
