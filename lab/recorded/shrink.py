"""Shrink a recorded call whose result is wrong. A *reduction* is a function that yields smaller or simpler variants of a call.
A variant may be invalid. Its changed tensors are contiguous. If contents are random values, a variant has new random values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, replace
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, AttentionCall, PagedAttention, RaggedAttention
from lab.calls.entries import keys_per_offset, live_cells, places_of_requests
from lab.calls.problem import shown_draft_tokens
from lab.recorded.call import Fault, Reason, RecordedCall, RecordingError, each_tensor, recorded_fault, sides_of
from lab.shrinking import halvings, smallest
from lab.workloads.inputs.masks import packed_mask

CONTENTS = ("query", "kv_cache", "key", "value", "sinks", "attention_sinks")  # data of requests and of the model
HEADS_AXIS = {"query": -2, "out": -2, "lse": -1, "sinks": -1, "attention_sinks": -1}
# Arguments that are not set to their defaults: those that define how other arguments are read; the mask, which XQA needs for
# several rows; and bmm1_scale, because the logits are too large with its default of 1.
LAYOUT = ("kv_layout", "uses_shared_paged_kv_idx", "cum_seq_lens_q", "max_q_len", "sparse_mla_top_k")
KEPT = (*LAYOUT, "mask", "bmm1_scale")
NEUTRAL = {"bmm2_scale": 1.0, "window_left": -1, "return_lse": False}  # used as defaults in calls that define none


def shrunk(
    call: RecordedCall, find: Callable[[RecordedCall], Fault | None], synthetic: bool = False
) -> tuple[RecordedCall, Fault | None]:
    """Search for a smaller call that is wrong for the same reason. Return (smallest one, what is wrong). Ctrl-C ends it early.

    Args:
        find: returns what is wrong with a call, or None. `recorded_fault` judges the recorded output, without a call.
        synthetic: finally replace all contents by random values, even if the call is then right. The second returned value is
            then None if the call is right, or if `find` is `recorded_fault`, because the new contents have no output.

    Raises RecordingError if the call is right or cannot be shrunk.
    """
    call.refuse_unsupported("shrunk")
    try:
        fault = find(call)
        if fault is None:
            engine = f": the engine called {call.module}" if call.module else ""
            raise RecordingError(f"the result of the call is right, so that there is nothing to shrink{engine}")
        if fault.reason is Reason.RAISED and call.out is not None:
            raise RecordingError(f"the recorded call returned, but here it raises {fault.sentence}")
        if fault.reason is Reason.BIAS:
            few = "the call cannot be shrunk, since a smaller one has too few vectors"
            raise RecordingError(f"{few}: {fault.sentence}")
        kind = fault.reason, fault.error

        def stays_wrong(smaller: RecordedCall) -> bool:
            nonlocal call, fault
            try:
                smaller.problem()
            except RecordingError:
                return False
            found = find(smaller)
            if is_same := found is not None and (found.reason, found.error) == kind:
                call, fault = smaller, found
            return is_same

        if find is not recorded_fault or call.out is not None:
            with suppress(KeyboardInterrupt, torch.AcceleratorError):  # then the smallest call so far is returned
                smallest(call, OF_OUTPUTS if find is recorded_fault else REDUCTIONS, stays_wrong)
        if synthetic and not call.drawn >= {*contents_of(call)}:
            call = drawn(call, contents_of(call))
            return call, None if find is recorded_fault else find(call)
    except torch.AcceleratorError as error:
        raise RecordingError(f"the call cannot be shrunk: {error}") from error
    return call, fault


class Part(NamedTuple):  # what a reduced call keeps of a request: some rows, and the first keys
    request: int
    rows: range
    kv_len: int


def parts_of(call: RecordedCall) -> list[Part]:
    problem = call.problem()
    sizes = enumerate(zip(problem.q_lens(), problem.seq_lens.tolist(), strict=True))
    return [Part(request, range(q_len), kv_len) for request, (q_len, kv_len) in sizes]


def cut(call: RecordedCall, parts: Sequence[Part]) -> RecordedCall:
    """Return a call that keeps only these parts of its requests. A part is some rows and the first keys of one request."""
    problem = call.problem()
    offsets, unit = problem.row_offsets(), keys_per_offset(problem)
    sizes = [(part.request, len(part.rows), part.kv_len) for part in parts]
    requests, widths, lengths = map(list, zip(*sizes, strict=True))
    rows = [offsets[part.request] + row for part in parts for row in part.rows]

    def by_row(tensor: Tensor) -> Tensor:
        if len(tensor) == problem.num_rows:
            return tensor[rows]
        return tensor.flatten(0, 1)[rows].unflatten(0, (len(parts), -1))  # MLA's [batch_size, q_len, ...]

    of_draft = slice(parts[0].rows.start, parts[0].rows.stop)
    changes: dict[str, Any] = dict.fromkeys(("query", "out", "lse", "sparse_mla_top_k_lens"), by_row)
    changes |= dict.fromkeys(("causal_seqlens_kv_global", "block_tables"), itemgetter(requests))
    changes["mask"] = lambda mask: packed_mask(shown_draft_tokens(mask[requests].int())[:, of_draft, of_draft])
    if isinstance(problem, PagedAttention) and problem.selected is not None:
        changes["block_tables"] = by_row
    if isinstance(problem, RaggedAttention):
        starts = problem.cu_seqlens_kv.tolist()
        tokens = [starts[part.request] + token for part in parts for token in range(part.kv_len)]
        changes |= dict.fromkeys(("key", "value"), lambda side: side[tokens])
    numbers = {
        "cum_seq_lens_q": [*accumulate(widths, initial=0)],
        "cum_seq_lens_kv": [*accumulate((-(-length // unit) for length in lengths), initial=0)],
        "seq_lens": lengths,
        "kv_seq_lens_cpu": lengths,
        "q_seq_lens_cpu": widths,
    }
    changes |= {name: lambda each, values=values: each.new_tensor(values) for name, values in numbers.items()}
    counts = {"batch_size": len(parts), "q_len_per_req": widths[0]}
    return _changed(call, changes | {name: count for name, count in counts.items() if call.given.get(name) is not None})


def fewer_requests(call: RecordedCall) -> Iterator[RecordedCall]:
    parts = parts_of(call)
    for others in _without_chunks(sorted(parts, key=lambda part: -part.kv_len)):
        yield cut(call, sorted(others))
    if sum(len(part.rows) for part in parts) < call.problem().num_rows:
        yield cut(call, parts)


def fewer_rows(call: RecordedCall) -> Iterator[RecordedCall]:
    parts = parts_of(call)
    for width in _less(max(len(part.rows) for part in parts)):
        kept = [(part, max(part.kv_len - len(part.rows[width:]), 0)) for part in parts]
        yield cut(call, [part._replace(rows=part.rows[:width], kv_len=kv_len) for part, kv_len in kept])
        yield cut(call, [part._replace(rows=part.rows[-width:]) for part in parts])


def fewer_keys(call: RecordedCall) -> Iterator[RecordedCall]:
    parts = parts_of(call)
    for length in _less(max(part.kv_len for part in parts)):
        yield cut(call, [part._replace(kv_len=min(part.kv_len, length)) for part in parts])
    for part in parts:
        for length in _less(part.kv_len):
            yield cut(call, [each._replace(kv_len=length) if each is part else each for each in parts])
    for columns in _less(call.given.get("sparse_mla_top_k") or 1):  # of entries that each row selects
        changes = {"sparse_mla_top_k": columns, "sparse_mla_top_k_lens": partial(torch.clamp, max=columns)}
        yield _changed(call, changes | {"block_tables": itemgetter((..., slice(columns)))})


def fewer_heads(call: RecordedCall) -> Iterator[RecordedCall]:
    problem = call.problem()
    group, kv_axis = problem.group, -2 if "key" in call.given or call.given.get("kv_layout") == "NHD" else -3
    every_kv_head, whole_group = [*range(problem.num_kv_heads)], [*range(group)]
    kept = [(kv_heads, whole_group) for kv_heads in _without_chunks(every_kv_head)]
    kept += [(every_kv_head, of_group) for of_group in _without_chunks(whole_group)]
    for kv_heads, of_group in kept:
        heads = torch.tensor([head * group + place for head in kv_heads for place in of_group])
        changes = {name: partial(torch.index_select, dim=axis, index=heads) for name, axis in HEADS_AXIS.items()}
        if call.function is not AttentionCall.MLA_DECODE:
            taken = partial(torch.index_select, dim=kv_axis, index=torch.tensor(kv_heads))
            changes |= dict.fromkeys(("kv_cache", "key", "value"), taken)
        yield _changed(call, changes)


def fewer_pages(call: RecordedCall) -> Iterator[RecordedCall]:
    """Yield up to two calls whose K/V have only the pages that are read: in page table order, then in the order of the pool."""
    problem = call.problem()
    if isinstance(problem, PagedAttention):
        tables, live, dead, in_page = call.given["block_tables"], live_cells(problem), 0, 1  # a cell names a page
        if problem.selected is not None:  # or an entry of one
            dead, in_page = -1, problem.page_size
        is_live = live.view(tables.shape) if live.numel() == tables.numel() else live[:, None].expand_as(tables)
        of_cells = tables.where(is_live, 0).long() // in_page
        ids = of_cells[is_live].tolist()
        for kept in ([*dict.fromkeys(ids)] or [0], sorted({*ids}) or [0]):
            new = torch.zeros(problem.k_cache.shape[0], dtype=tables.dtype)
            new[kept] = torch.arange(len(kept), dtype=tables.dtype)
            renamed = torch.where(is_live, new[of_cells] * in_page + tables % in_page, dead)
            if len(kept) < len(new) or not torch.equal(renamed, tables):
                yield _changed(call, {"block_tables": renamed, "kv_cache": itemgetter(kept)})


def without_dead_slots(call: RecordedCall, keeps_non_finite: bool = False) -> Iterator[RecordedCall]:
    # Their elements become zeros; `keeps_non_finite` keeps those that are not finite.
    problem = call.problem()
    if not isinstance(problem, PagedAttention) or "kv_cache" in call.drawn:
        return
    is_dead = torch.ones(problem.k_cache.shape[0], problem.page_size, 1, 1, dtype=torch.bool)
    for places in chain.from_iterable(places_of_requests(problem, range(problem.batch_size))):
        is_dead.view(-1)[places] = False
    wiped, is_smaller = _changed(call, {"kv_cache": torch.clone}), False
    for side in sides_of(wiped.problem()):
        wide = side.to(torch.float32)
        is_wiped = is_dead & (wide != 0) & (wide.isfinite() if keeps_non_finite else True)
        side.copy_(wide.masked_fill(is_wiped, 0))
        is_smaller |= bool(is_wiped.any())
    if is_smaller:
        yield wiped


def default_arguments(call: RecordedCall) -> Iterator[RecordedCall]:
    given, parts = call.given, parts_of(call)
    fields = CALL_TYPES[call.function].__dataclass_fields__
    width, longest = max(len(part.rows) for part in parts), max(part.kv_len for part in parts)
    for name, value in given.items():
        default = NEUTRAL.get(name, fields[name].default)
        if name not in KEPT and default is not MISSING and (isinstance(value, Tensor) or value != default):
            yield _changed(call, {name: default})
        if isinstance(value, Tensor) and name.endswith("_scale"):
            yield _changed(call, {name: float(value)})
    for name, bound in {"max_seq_len": longest, "max_kv_len": longest, "max_q_len": width}.items():
        if given.get(name) not in (None, bound):
            yield _changed(call, {name: bound})
    if given.get("cum_seq_lens_q") is not None and "q_len_per_req" in fields:
        yield _changed(call, {"q_len_per_req": width, "cum_seq_lens_q": None, "max_q_len": None})
    if isinstance(problem := call.problem(), PagedAttention):
        columns = max(-(-longest // problem.page_size), 1)
        if columns < problem.k_block_tables.shape[1]:
            yield _changed(call, {"block_tables": itemgetter((..., slice(columns)))})


def drawn_contents(call: RecordedCall) -> Iterator[RecordedCall]:
    names = [name for name in contents_of(call) if name not in call.drawn]
    yield from (drawn(call, some) for some in (names, *([name] for name in names)) if some)


# The reductions that save most are first. Those that make FlashInfer compile another kernel (rows, groups of heads) are last.
# Dead slots are cleared before contents are drawn, because drawn contents keep non-finite elements.
REDUCTIONS = (
    *(fewer_requests, fewer_pages, fewer_keys, without_dead_slots, drawn_contents),
    *(default_arguments, fewer_rows, fewer_heads),
)
# These reductions do not change the outputs of the remaining rows, so they need no call of a kernel.
OF_OUTPUTS = (fewer_requests, fewer_pages, partial(without_dead_slots, keeps_non_finite=True))


def contents_of(call: RecordedCall) -> list[str]:
    return [name for name in CONTENTS if call.given.get(name) is not None]


def drawn(call: RecordedCall, names: Sequence[str]) -> RecordedCall:
    """Replace the contents of the named arguments by normally distributed values. Non-finite elements are not changed."""

    def redrawn(name: str, side: int, tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(name, side))
        values = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        wide = tensor.to(torch.float32)
        return values.to(torch.float32).where(wide.isfinite(), wide).to(tensor.dtype)

    given = {name: each_tensor(call.given[name], partial(redrawn, name)) for name in names}
    return replace(call, given={**call.given, **given}, drawn=call.drawn | {*names})


def seed_of(name: str, side: int) -> int:
    return 10 * CONTENTS.index(name) + side


def _changed(call: RecordedCall, changes: Mapping[str, Any]) -> RecordedCall:
    # A change is a new value, or a function of the argument's tensors (for "out" and "lse" of the recorded results too).

    def changed(name: str, value: Any) -> Any:
        change = changes.get(name)
        return each_tensor(value, lambda _, tensor: change(tensor).contiguous()) if callable(change) else value

    given = {name: changed(name, value) for name, value in call.given.items()}
    given |= {name: value for name, value in changes.items() if not callable(value)}
    smaller = replace(call, given=given, out=changed("out", call.out), lse=changed("lse", call.lse), pages=None)
    return drawn(smaller, [name for name in contents_of(smaller) if name in call.drawn])


def _without_chunks(items: Sequence[Any]) -> Iterator[list[Any]]:
    for size in halvings(len(items) // 2):
        yield from ([*items[:start], *items[start + size :]] for start in range(0, len(items), size))


def _less(number: int) -> Iterator[int]:
    return (number - step for step in halvings(number - 1))  # for 9: 1, 5, 7 and 8
