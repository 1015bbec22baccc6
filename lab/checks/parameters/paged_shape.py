"""The batch of a paged call's configuration: its sizes, lengths and rows as an `AttentionCase`."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from lab.calls.problem import E4M3
from lab.checks.parameters.attention import edge_lengths
from lab.checks.parameters.configuration import Configuration
from lab.checks.parameters.paged_axes import EQUAL, REQUESTS
from lab.checks.parameters.values import Cache, Lengths, Mask, Offsets, Pages, Rows, Sinks, Tables, Without
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Contents, Storage, TableTail
from lab.workloads.interfaces import Interface

SHORT = 150  # keys of the longest request that is not long
LAST = 600  # keys of a large batch's last request
CONTEXT_ROWS = (5, 1, 17, 2, 33)  # of the requests in turn
WIDE = 4200  # columns of a wide table, more than 4,096
PADDING = 3  # rows after the last request's
_TAILS = {Tables.NEGATIVE_TAIL: TableTail.NEGATIVE, Tables.FAR_TAIL: TableTail.FAR}


def attention_case(configuration: Configuration, ranges: Ranges) -> AttentionCase:
    """Return the sizes, lengths and rows of a configuration; its forms of arguments are left aside."""
    of, interface = configuration, configuration.interface
    rng = random.Random(repr((interface.name, configuration.seed)))
    query, cache = of["dtypes"].query, of["dtypes"].cache
    page_size = of["page_size"]
    count = of["requests"]
    q_lens = _q_lens(of, count)
    kv_lens = _kv_lens(of, q_lens, page_size, rng)
    width = max(-(-kv_len // page_size) for kv_len in kv_lens)
    return AttentionCase(
        interface,
        kv_lens,
        q_lens,
        dtype=query,
        kv_dtype=cache,
        arithmetic=_arithmetic(query, cache, ranges),
        window_left=of.get("window_left", -1),
        sinks=of["sinks"] != Sinks.NONE,
        offsets=interface is not Interface.CONTEXT and of["offsets"] != Offsets.NONE,
        contents=Contents[of["contents"].upper()],
        seed=configuration.seed,
        storage=Storage(
            page_size,
            kv_layout=of.get("kv_layout", "HND"),
            table_tail=_TAILS.get(of["block_tables"], TableTail.FOREIGN),
            spare_columns=max(WIDE - width, 0) if of["block_tables"] == Tables.WIDE else 3,
            page_seed=configuration.seed,
            stacked=of["cache"].is_one_tensor or of["cache"] == Cache.K_IS_V,
        ),
        **_heads(of),
    )


def _heads(of: Configuration) -> dict[str, Any]:
    if of.interface is not Interface.MLA_DECODE:
        return {name: of[name] for name in ("group", "num_kv_heads", "head_dim")}
    dims = of["head_dims"]
    return {"group": of["heads"], "num_kv_heads": 1, "head_dim": dims.head_dim, "v_head_dim": dims.v_head_dim}


def _arithmetic(query: torch.dtype, cache: torch.dtype, ranges: Ranges) -> torch.dtype | None:
    """Return e4m3 for a query of it, whose weights a kernel rounds so too, and what the ranges say of others."""
    return E4M3 if query == E4M3 else ranges.arithmetic(cache)


def _q_lens(of: Configuration, count: int) -> tuple[int, ...]:
    if of.interface is Interface.CONTEXT:
        return rows_of_prompts(of, count)
    q_lens = [of["q_len"]] * count
    if of["offsets"] == Offsets.UNEQUAL:
        q_lens = [1 + (request + of.seed) % of["q_len"] for request in range(count)]
    return _emptied(of, q_lens)


def rows_of_prompts(of: Configuration, count: int) -> tuple[int, ...]:
    """Return the rows of each request of a call that takes prompts."""
    rows = {Rows.UNEQUAL: CONTEXT_ROWS, Rows.ONE_EACH: (1,)}.get(of["rows"], (of["rows"], *CONTEXT_ROWS))
    if count > REQUESTS:
        rows = (1, 2, 3) if of["rows"] == Rows.UNEQUAL else rows
    q_lens = [rows[request % len(rows)] for request in range(count)]
    if isinstance(of["rows"], int):
        of_prompt = longest_request(of)
        q_lens[0], q_lens[of_prompt] = q_lens[of_prompt], q_lens[0]
    return _emptied(of, q_lens)


def longest_request(of: Configuration) -> int:
    """Return the place of the request with the prompt or the long history: the first, or the last where that has no rows."""
    return -1 if of["offsets"] in (Without.FIRST, Without.TWICE) else 0


def _emptied(of: Configuration, q_lens: list[int]) -> tuple[int, ...]:
    empty = empty_requests(of["offsets"], len(q_lens))
    return tuple(0 if request in empty else q_len for request, q_len in enumerate(q_lens))


def empty_requests(lengths: Any, count: int) -> tuple[int, ...]:
    """Return the requests that a value of the lengths leaves without keys, or one of the offsets without rows."""
    empty: dict[Any, Sequence[int]] = {
        Without.FIRST: (0,),
        Without.LAST: (count - 1,),
        Without.TWICE: (count - 3, count - 2),  # which the last one follows
        Without.ALL: range(count),
    }
    return tuple(empty.get(lengths, ()))


def rows_without_keys(q_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """Return bool [num_rows]: whether the request of a row has no keys."""
    without = torch.tensor([kv_len == 0 for kv_len in kv_lens], dtype=torch.bool)
    return without.repeat_interleave(torch.tensor(q_lens, dtype=torch.int64))


def fewer_than_rows(q_lens: Sequence[int]) -> list[int]:
    """Return one key or two fewer than rows for the requests in turn; of several rows, at least one."""
    return [max(rows - 1 - request % 2, rows // 2) for request, rows in enumerate(q_lens)]


def _kv_lens(of: Configuration, q_lens: tuple[int, ...], page_size: int, rng: random.Random) -> tuple[int, ...]:
    lengths, count = of["lengths"], len(q_lens)
    if count > REQUESTS:
        kv_lens = [8 + 3 * request % 47 for request in range(count)]
        kv_lens[-1] = LAST  # cut in parts where the others are not
    else:
        edges = edge_lengths(page_size, SHORT)
        kv_lens = [rng.choice(edges) for _ in q_lens]
        kv_lens[-1] = SHORT - rng.randrange(20)  # a window hides something of it
        if of["pages"] == Pages.TWICE:
            kv_lens = [kv_len + page_size for kv_len in kv_lens]
    if of.get("mask") == Mask.OWN_BIT_CLEAR:
        kv_lens[0] = 0  # of the draft alone, whose first row sees no key
    if lengths == Lengths.EQUAL:
        kv_lens = [EQUAL] * count
    elif isinstance(lengths, int):
        kv_lens[longest_request(of)] = lengths - rng.randrange(page_size)
    kv_lens = [max(kv_len, rows) for kv_len, rows in zip(kv_lens, q_lens, strict=True)]
    if lengths == Lengths.FEWER:
        kv_lens = fewer_than_rows(q_lens)
    for request in empty_requests(lengths, count):
        kv_lens[request] = 0
    return tuple(kv_lens)
