"""Define the parameters of `generate_draft_decode_kv_indices`, which lists the K/V pool slots that each draft step reads."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

from lab.checks.parameters.covering import Model, constraints
from lab.workloads.inputs.draft_lists import DTYPES, DraftListsCase

# For each value of the axis "dtypes": the tensors that are int32. The rest are int64.
NARROW = {
    "int64": (),
    "int32": tuple(DTYPES),
    "int32 table": ("req_to_token",),
    "int32 rows": ("req_pool_indices",),
    "int32 lens": ("paged_kernel_lens",),
    "int32 positions": ("positions",),
    "int32 lists": ("kv_indices",),
    "int32 boundaries": ("kv_indptr",),
    "int32 pages": ("v2p",),
    "int32 but the table": tuple(name for name in DTYPES if name != "req_to_token"),
}
SHORT = (5, 17, 1, 40, 9, 33, 2)  # prefix lengths of the requests in turn
MOST_CELLS = 3_000_000  # in kv_indices
MOST_SLOTS = 5_000_000  # in req_to_token
MOST_LISTS = 41_000  # in all steps together

AXES: dict[str, tuple[Any, ...]] = {
    "dtypes": tuple(NARROW),
    "topk": (1, 2, 3, 4, 5, 8, 12, 16, 33),
    "num_steps": (3, 1, 2, 4, 5, 6, 7, 8, 40),
    "page_size": (1, 16, 32, 64, 128, 256),
    "requests": (5, 1, 31, 32, 33, 64, 96, 129, 257, 513, 1025),
    "prefixes": ("short", "some none", "all none", "equal", "at page edges", 4_100, 9_000, 70_000),
    "positions": ("prefix lengths", "others"),
    "rows": ("drawn", "one for all"),
    "spare_columns": (3, 0, -2),
    "spare_capacity": (5, 0, -20),
    "row_gap": (0, 1, 24),
    "far_rows": (False, True),
    "first_cell": (8, 0, 1),
    "window_size": (0, 1, 9, 128, 4_096, 2**31 - 1),
    "sink_size": (0, 1, 64),
    "entries": ("slots", "pages"),
    "translated": (False, True),
}


def lens_of(requests: int, prefixes: Any, page_size: int, seed: int) -> tuple[int, ...]:
    in_turn = {
        "some none": (0, 7, 0, 21, 3),
        "all none": (0,),
        "equal": (20,),
        "at page edges": (page_size, page_size - 1, page_size + 1, 2 * page_size, 1),
    }.get(prefixes, SHORT)
    lens = list(islice(cycle(in_turn), requests))
    if isinstance(prefixes, int):
        lens[seed % requests] = prefixes
    return tuple(lens)


def _within(count: Callable[[DraftListsCase], int], most: int) -> Callable[..., bool]:
    def fits(requests: int, prefixes: Any, page_size: int, topk: int, num_steps: int) -> bool:
        lens = lens_of(requests, prefixes, page_size, 0)
        return count(DraftListsCase(lens, num_steps, topk, page_size)) <= most

    return fits


RULES = constraints(
    {
        "a sink has a window": lambda window_size, sink_size: window_size > 0 or sink_size == 0,
        "a page of one token is a slot": lambda page_size, entries: page_size > 1 or entries == "slots",
        "far rows are several rows of a tensor of their own, and take 8 bytes of a device's memory for each int64": (
            lambda far_rows, requests: not far_rows or requests > 1,
            lambda far_rows, row_gap: not far_rows or row_gap == 0,
            lambda far_rows, first_cell: not far_rows or first_cell == 8,
            lambda far_rows, dtypes: not far_rows or "req_to_token" in NARROW[dtypes],
        ),
        "the reference loops over all lists": lambda requests, topk, num_steps: (
            requests * topk * num_steps <= MOST_LISTS
        ),
        "what a test holds in memory": (
            lambda requests, prefixes: requests * (prefixes if isinstance(prefixes, int) else 1) <= MOST_SLOTS,
            _within(lambda case: case.num_steps * case.most_tokens, MOST_CELLS),
            _within(lambda case: len(case.lens) * case.longest_row, MOST_SLOTS),
        ),
    }
)
TRIPLES = (("window_size", "sink_size", "prefixes"), ("entries", "page_size", "num_steps"))
LISTS = Model(AXES, RULES, TRIPLES)
