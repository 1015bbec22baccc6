"""Define the parameters (axes) of the functions that build attention metadata, and of `generate_draft_decode_kv_indices`, which
lists the K/V pool slots that each draft step reads: their values, and rules between values.
"""

from collections.abc import Callable, Mapping
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

import torch

from lab.checks.parameters.covering import Model, constraints
from lab.checks.parameters.values import BatchPadding, Later, Prefixes
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.workloads.inputs.draft_lists import TENSORS, DraftListsCase
from lab.workloads.interfaces import Interface, MetadataFunction

MOST_CELLS = 3_000_000  # in req_to_token; in the kv_indices of a draft
MOST_SLOTS = 5_000_000  # in req_to_token of a draft
MOST_LISTS = 41_000  # in all steps of a draft together
TWICE = "the first one's twice"  # the last request of the batch has the same row of req_to_token as the first
ONE_ROW = tuple(mode.name for mode in ForwardMode if mode.query_rows is QueryRows.ONE)
AS_MANY = tuple(mode.name for mode in ForwardMode if mode.query_rows is QueryRows.DRAFT_TOKENS)
FIXED = tuple(mode.name for mode in ForwardMode if mode.query_rows is QueryRows.FIXED)
ON_DECODE = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2", "IDLE", "RAGGED_VERIFY")
PREFILLS = tuple(mode.name for mode in ForwardMode if mode.is_prefill)

DIVISIBLE = "unequal, as many as equal"
# Numbers of query rows of the requests in turn. The mean of the DIVISIBLE ones is 3.
ROWS: dict[Any, tuple[int, ...]] = {
    "unequal": (5, 1, 2, 4, 3, 1),
    DIVISIBLE: (2, 4, 3, 3, 1, 5),
    "long": (70, 1, 130, 33, 5, 2),
}
# For each value of the axis "dtypes": the dtypes of batch tensors that differ from those of SGLang.
DTYPES: dict[str, dict[str, torch.dtype]] = {
    "int64": {},
    "int32": dict.fromkeys(("seq_lens", "req_pool_indices", "extend_prefix_lens"), torch.int32),
    "int32 lens": {"seq_lens": torch.int32},
    "int32 rows": {"req_pool_indices": torch.int32},
    "int64 new lens": {"extend_seq_lens": torch.int64},
}
VIRTUAL_WITH_HOLES = "virtual, some -1 or without a page"
WITH_HOLES = ("where they lie, some -1", VIRTUAL_WITH_HOLES)
SHARED: dict[str, tuple[Any, ...]] = {
    "draft_step": ("none", 0, 1, 2, 3, 4, 7),
    "rows": (1, 4, 2, 3, 5, 6, 7, 8, 11, "unequal", DIVISIBLE),
    "requests": (6, 1, 2, 33, 64, 96, 130, 257, 1025, 0),
    "padding": tuple(BatchPadding),
    "dtypes": tuple(DTYPES),
    "slots": ("where they lie", "virtual", *WITH_HOLES),
    "context": ("some more", "exact", "a whole page more"),
    "table_rows": ("of each request", TWICE),
    "spec_info": ("as the rows", "of a graph"),
    "spare_pages": (5, 70_000),  # the second: page ids beyond 16 bits
    "host_lens": ("none", "given"),
    "later": tuple(Later),
}
PREFIXES = (
    *(Prefixes.UNEQUAL, Prefixes.NONE, Prefixes.SOME_NONE, Prefixes.EQUAL, Prefixes.AT_PAGE_EDGES),
    *(4_300, 9_000, 70_000),
)
AXES: dict[Interface, dict[str, tuple[Any, ...]]] = {
    MetadataFunction.MHA_METADATA: {
        "mode": (*ON_DECODE, *PREFILLS),
        **SHARED,
        "draft_step": (*SHARED["draft_step"], FROZEN_KV_STEP),
        "rows": (*SHARED["rows"], "long"),
        "prefixes": (*PREFIXES, Prefixes.NO_LIST),
        "page_size": (16, 32, 64, 128, 256, 1),
        "window": ("none", "kept", "evicted", "evicted as -1"),
        "host_rows": ("given", "none"),
        "context": (*SHARED["context"], "exceeded"),
        "encoder_only": ("not asked for", "asked for"),
    },
    MetadataFunction.MLA_METADATA: {
        "mode": ON_DECODE,
        "attention": ("mla with offset", "mla"),
        **SHARED,
        # A table row is rounded up to 4,096 tokens: with these prefixes, rows, a draft or only padding cross this edge.
        "prefixes": (*PREFIXES, 4_090, 4_095, 4_096, 8_191),
        "page_size": (64, 32),
    },
    MetadataFunction.MLA_PREFILL: {
        "mode": PREFILLS,
        **SHARED,
        "draft_step": ("none",),
        "rows": (*SHARED["rows"], "long"),
        "requests": tuple(requests for requests in SHARED["requests"] if requests),
        "padding": (BatchPadding.NONE, BatchPadding.ROWS),
        "spec_info": ("as the rows",),
        "prefixes": PREFIXES,
        "page_size": (64, 32),
        "prefix_cache": ("in chunks", "not in chunks"),
        "prefill_graph": (False, True),
    },
    MetadataFunction.DSV4_METADATA: {
        "mode": (*(mode for mode in ON_DECODE if mode != "DRAFT_EXTEND"), *PREFILLS),
        **SHARED,
        "prefixes": (*PREFIXES[:-1], 127, 128),  # the edge of the window, and of a compressed entry
        "slots": SHARED["slots"][:1],
        "spare_pages": SHARED["spare_pages"][:1],
        "page_size": (256, 128),
        "context": tuple(each for each in SHARED["context"] if each != "exact"),  # rows of padding see some tokens too
        "window": ("kept", "evicted", "evicted as -1"),
    },
}
TRIPLES = (
    ("mode", "padding", "rows"),
    ("mode", "padding", "prefixes"),
    ("mode", "window", "later"),
    ("mode", "attention", "draft_step"),
)
RULES = constraints(
    {
        "a decode has a row each": (
            lambda mode, rows: mode not in ONE_ROW or rows == 1,
            lambda draft_step, later: draft_step == "none" or not later.more_rows,
            lambda mode, later: mode not in ONE_ROW or not later.more_rows,
        ),
        "a verification's rows are as many for each": lambda mode, rows: mode not in AS_MANY or isinstance(rows, int),
        "slots of padding have a number of rows that is fixed": lambda mode, rows, padding: (
            mode not in FIXED or isinstance(rows, int) or padding == BatchPadding.NONE
        ),
        "only prompts have long rows": lambda mode, rows: mode in PREFILLS or rows != "long",
        "a draft step is a decode": lambda mode, draft_step: mode in ONE_ROW or draft_step == "none",
        "a draft step has a row each": lambda draft_step, rows: draft_step == "none" or rows == 1,
        "only extends have new lengths": (
            lambda draft_step, dtypes: draft_step == "none" or dtypes != "int64 new lens",
            lambda mode, dtypes: ForwardMode[mode].query_rows.in_extend_seq_lens or dtypes != "int64 new lens",
        ),
        "only batches of unequal rows are padded by rows alone": (
            lambda draft_step, padding: draft_step == "none" or padding != BatchPadding.ROWS,
            lambda mode, padding: mode in (*PREFILLS, "DRAFT_EXTEND", "RAGGED_VERIFY") or padding != BatchPadding.ROWS,
        ),
        "only modes that run in graphs have padded slots": (
            lambda rows, padding: rows != "long" or padding.slot_length is None,
            lambda mode, padding: mode not in PREFILLS or padding.slot_length is None,
        ),
        "an engine has no empty pass of this mode": lambda mode, requests: (
            requests or mode in ("IDLE", "TARGET_VERIFY")
        ),
        "this needs two requests": (
            lambda requests, rows: requests > 1 or not isinstance(rows, str) or rows == "long",
            lambda requests, table_rows: requests > 1 or table_rows != TWICE,
            lambda requests, later: requests > 1 or later not in (Later.OTHERS, Later.FEWER),
        ),
        "a large batch has no long prompts": lambda requests, rows: requests <= 64 or rows != "long",
        "no request can be another": lambda requests, later: requests or later in (Later.SAME, Later.ANOTHER_POOL),
        "there are no fewer than 1": lambda rows, later: rows != 1 or later != Later.FEWER_ROWS,
        "only an unpadded prefill can lack the list of prefixes": (
            lambda mode, prefixes: prefixes != Prefixes.NO_LIST or mode in PREFILLS,
            lambda draft_step, prefixes: prefixes != Prefixes.NO_LIST or draft_step == "none",
            lambda padding, prefixes: prefixes != Prefixes.NO_LIST or padding.slot_length is None,
        ),
        "no request has no prefix": lambda requests, prefixes: prefixes != Prefixes.NO_LIST or requests > 0,
        "without a list of prefixes, one row for each request tells nothing": lambda rows, prefixes: (
            prefixes != Prefixes.NO_LIST or rows != 1
        ),
        "every other extend has its rows on the host": lambda mode, host_rows: (
            host_rows == "given" or mode == "RAGGED_VERIFY"
        ),
        "an empty batch has no rows on the host to leave out": lambda requests, host_rows: (
            requests or host_rows == "given"
        ),
        "other modes' lengths are those of their rows": lambda mode, context: (
            context != "exceeded" or mode in ("DECODE", "TARGET_VERIFY")
        ),
        "an empty batch has no request that exceeds the context": lambda requests, context: (
            requests or context != "exceeded"
        ),
        "only a draft's modes have a SpecInfo of a graph": lambda mode, spec_info: (
            spec_info == "as the rows" or mode not in (*ONE_ROW, *PREFILLS)
        ),
        "what a test holds in memory": (
            lambda spare_pages, page_size: spare_pages * page_size <= MOST_CELLS,
            lambda requests, prefixes: requests * (prefixes if isinstance(prefixes, int) else 1) <= MOST_CELLS,
        ),
    }
)
METADATA: Mapping[Interface, Model] = MappingProxyType(
    {interface: Model.of(axes, RULES, TRIPLES) for interface, axes in AXES.items()}
)

# For each value of a draft's axis "dtypes": the tensors that are int32. The rest are int64.
NARROW = {
    "int64": (),
    "int32": TENSORS,
    "int32 table": ("req_to_token",),
    "int32 rows": ("req_pool_indices",),
    "int32 lens": ("paged_kernel_lens",),
    "int32 positions": ("positions",),
    "int32 lists": ("kv_indices",),
    "int32 boundaries": ("kv_indptr",),
    "int32 pages": ("v2p",),
    "int32 but the table": tuple(name for name in TENSORS if name != "req_to_token"),
}


def draft_lens(requests: int, prefixes: Any, page_size: int, seed: int) -> tuple[int, ...]:
    in_turn = {
        "some none": (0, 7, 0, 21, 3),
        "all none": (0,),
        "equal": (20,),
        "at page edges": (page_size, page_size - 1, page_size + 1, 2 * page_size, 1),
    }.get(prefixes, (5, 17, 1, 40, 9, 33, 2))
    lens = list(islice(cycle(in_turn), requests))
    if isinstance(prefixes, int):
        lens[seed % requests] = prefixes
    return tuple(lens)


def _within(count: Callable[[DraftListsCase], int], most: int) -> Callable[..., bool]:
    def fits(requests: int, prefixes: Any, page_size: int, topk: int, num_steps: int) -> bool:
        lens = draft_lens(requests, prefixes, page_size, 0)
        return count(DraftListsCase(lens, num_steps, topk, page_size)) <= most

    return fits


LISTS = Model(
    {
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
    },
    constraints(
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
    ),
    (("window_size", "sink_size", "prefixes"), ("entries", "page_size", "num_steps")),
)
