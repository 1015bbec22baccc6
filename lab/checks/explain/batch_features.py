"""Read the features of a batch and of its requests, such as lengths, pages and windows.

A feature is a named property of a case, a call or a request; rules over features say where results are wrong. Each table here
has the texts of some features; the function after it reads their values. Among features of equal cost that hold for the same
results, a rule has the one that comes first in its table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.checks.explain.feature import CaseFeature, Condition, Cost, Features, Number, Value

TILE = 64  # keys that kernels take at a time
EMPTY_COLUMNS = 128  # columns of selected entries that kernels take at a time
POWER_OF_2 = "{not |}a power of two"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3: "e4m3", NVFP4: "nvfp4"}
Read = dict[str, Any]  # values by the names of features; None, False or nothing where a subject does not have one

OF_REQUEST: dict[str, CaseFeature] = {
    "kv_len": Number("a request has {} keys", Cost.VALUE),
    "q_len": Number("a request has {} query rows", Cost.VALUE, several="a request has several query rows"),
    "pages": Number("a request has {} pages", Cost.DERIVED, several="a request has several pages"),
    "request": Number("a request's place in the batch is {}", Cost.VALUE),
    "first_request": Condition("a request is {|not }the batch's first", Cost.DERIVED),
    "last_request": Condition("a request is {|not }the batch's last", Cost.DERIVED),
    "partial_page": Condition("a request's {last page is partly filled|keys fill its pages}", Cost.VALUE),
    "full_page": Condition("a request's last page is {|not }full", Cost.DERIVED),
    "multiple_of_64_keys": Condition("a request has {a|no} multiple of 64 keys", Cost.DERIVED),
    "multiple_of_512_keys": Condition("a request has {a|no} multiple of 512 keys", Cost.VALUE),
    "no_keys": Condition("a request has {no |}keys", Cost.VALUE),
    "no_rows": Condition("a request has {no |}query rows", Cost.VALUE),
    "fewer_keys": Condition("a request has {fewer|no fewer} keys than query rows", Cost.VALUE),
    "no_prefix": Condition("a request has {no |}keys before its rows", Cost.VALUE),
    "q_len_no_power_of_2": Condition(f"a request's number of query rows is {POWER_OF_2}", Cost.DERIVED),
    "hidden_keys": Condition("{a|no} window hides keys of a request", Cost.VALUE),
    "hidden_page": Condition("{a|no} page of a request is before its window", Cost.POSITION),
    "hidden_tile": Condition("{64|fewer} keys of a request are before its window", Cost.POSITION),
    "window_in_page": Condition("{a|no} window begins within a page", Cost.POSITION),
    "window_with_page": Condition("{a|no} window begins with a page", Cost.POSITION),
    "as_long_as_previous": Condition("a request is {|not }as long as the one before it", Cost.VALUE),
    "after_longer": Condition("a request is {|not }shorter than the one before it", Cost.DERIVED),
    "after_no_keys": Condition("the request before a request has {no |}keys", Cost.DERIVED),
    "before_no_keys": Condition("the request after a request has {no |}keys", Cost.DERIVED),
    "no_entry": Condition("a row of a request selects {no|an} entry", Cost.VALUE),
    "empty_tile": Condition(
        f"the first {EMPTY_COLUMNS} columns of a request's row hold {{-1 alone|an entry}}", Cost.VALUE
    ),
    "gap": Condition("{a|no} column that a request's row uses holds -1", Cost.VALUE),
    "gap_before_entry": Condition("{a|no} column before an entry of a request's row holds -1", Cost.VALUE),
    "unordered_entries": Condition("the entries of a request's row are {not |}in ascending order", Cost.VALUE),
    "num_entries": Number("a row of a request selects {} entries", Cost.DERIVED),
}


def _read_request(request: int, kv_lens: Sequence[int], q_len: int, page_size: int, window_left: int) -> Read:
    """Return the features of one request: its lengths, its pages, its position in the batch, and what its window hides."""
    kv_len = kv_lens[request]
    # The first key in the window of the last row, and of the first; 0 or less: none is hidden
    last_seen = first_seen = 0
    if window_left >= 0:
        last_seen = kv_len - 1 - window_left
        first_seen = last_seen - q_len + 1
    firsts = range(first_seen, first_seen + min(q_len, page_size))
    return {
        "kv_len": kv_len,
        "q_len": q_len,
        "pages": -(-kv_len // page_size),
        "request": request,
        "first_request": request == 0,
        "last_request": request == len(kv_lens) - 1,
        "partial_page": kv_len % page_size > 0,
        "full_page": kv_len > 0 and kv_len % page_size == 0,
        "multiple_of_64_keys": kv_len > 0 and kv_len % 64 == 0,
        "multiple_of_512_keys": kv_len > 0 and kv_len % 512 == 0,
        "no_keys": kv_len == 0,
        "no_rows": q_len == 0,
        "fewer_keys": kv_len < q_len,
        "no_prefix": kv_len == q_len,
        "q_len_no_power_of_2": q_len & (q_len - 1) > 0,
        "hidden_keys": last_seen > 0,
        "hidden_page": first_seen >= page_size,
        "hidden_tile": first_seen >= TILE,
        "window_in_page": last_seen > 0 and any(max(first, 0) % page_size for first in firsts),
        "window_with_page": last_seen // page_size * page_size >= max(first_seen, 1),
        "as_long_as_previous": request > 0 and kv_lens[request - 1] == kv_len,
        "after_longer": request > 0 and kv_lens[request - 1] > kv_len,
        "after_no_keys": request > 0 and kv_lens[request - 1] == 0,
        "before_no_keys": 0 in kv_lens[request + 1 : request + 2],
    }


OF_BATCH: dict[str, CaseFeature] = {
    "page_size": Number("page_size is {}", Cost.VALUE),
    "has_window": Condition("{a|no} window is set"),
    "window_left": Number("window_left is {}", Cost.VALUE),
    "requests": Number("a batch has {} requests", Cost.VALUE, several="a batch has several requests"),
    "rows_of_batch": Number("the number of query rows of a batch is {}", Cost.DERIVED),
    "longest_kv_len": Number("the longest request's number of keys is {}", Cost.VALUE),
    "no_more_rows_than_requests": Condition("a batch has {no more|more} query rows than requests", Cost.DERIVED),
    "unequal_q_lens": Condition("requests have {different numbers|one number} of rows", Cost.VALUE),
    "unequal_kv_lens": Condition("requests have {different lengths|one length}", Cost.DERIVED),
    "some_no_keys": Condition("{a|no} request of the batch has no keys", Cost.DERIVED),
    "all_no_keys": Condition("{no|a} request of the batch has keys", Cost.VALUE),
    "some_no_rows": Condition("{a|no} request of the batch has no rows", Cost.VALUE),
}


def _read_batch(kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int, window_left: int) -> Read:
    """Return the features of a whole batch: page size, window, numbers of requests and rows, unequal and empty requests."""
    return {
        "page_size": page_size,
        "has_window": window_left >= 0,
        "window_left": window_left if window_left >= 0 else None,
        "requests": len(kv_lens),
        "rows_of_batch": sum(q_lens),
        "longest_kv_len": max(kv_lens, default=0),
        "no_more_rows_than_requests": sum(q_lens) <= len(q_lens),
        "unequal_q_lens": len(set(q_lens)) > 1,
        "unequal_kv_lens": len(set(kv_lens)) > 1,
        "some_no_keys": 0 in kv_lens,
        "all_no_keys": not any(kv_lens),
        "some_no_rows": 0 in q_lens and any(q_lens),
    }


@dataclass(frozen=True)
class CallFeatures:
    """The features (named properties) of one call and of each of its requests.

    Attributes:
        features: features of the whole call.
        of_requests: features of each request in the call.
        q_lens: number of query rows of each request.
    """

    features: Features = field(default_factory=dict, hash=False)
    of_requests: tuple[Features, ...] = field(default=(), hash=False)
    q_lens: tuple[int, ...] = ()

    @classmethod
    def of_lengths(
        cls,
        read: Read,
        kv_lens: Sequence[int],
        q_lens: Sequence[int],
        page_size: int = TILE,
        window_left: int = -1,
        around: Read | None = None,
        selections: Sequence[Read] = (),
    ) -> "CallFeatures":
        """Return the features of a call: those in `read`, those of a batch of these lengths, and those of each request. The
        features in `around`, of the case, come before them. `selections` has those of the entries that each request selects.
        """
        of_requests = tuple(
            kept(
                OF_REQUEST,
                _read_request(request, kv_lens, q_len, page_size, window_left)
                | (selections[request] if selections else {}),
            )
            for request, q_len in zip(range(len(kv_lens)), q_lens, strict=True)
        )
        of_batch = kept(OF_BATCH, _read_batch(kv_lens, q_lens, page_size, window_left))
        of_case = kept(around, around) if around else {}
        return cls({**of_case, **kept(read, read), **of_batch}, of_requests, tuple(q_lens))


def of_any_request(shared: Features, of_requests: Iterable[Features]) -> dict[str, Value]:
    """Return one mapping of the features of a call and of its requests. A condition is true if it is true for any request; a
    number is the largest of all requests.
    """
    found = dict(shared)
    for features in of_requests:
        for name, value in features.items():
            found[name] = max(int(value), int(found.get(name, 0))) if type(value) is int else value
    return found


def kept(names: Iterable[str], read: Read) -> dict[str, Value]:
    """Return the features in `names`, in this order, with values that rules can compare: a dtype or enum as its name, a tensor
    of one element as its truth value. None and False are left out.
    """
    found: dict[str, Value] = {}
    for name in names:
        value = read.get(name)
        if value is None or value is False:  # most are
            continue
        plain = value if type(value) in (bool, int, str) else _plain(value)
        if plain is not None and plain is not False:
            found[name] = plain
    return found


def _plain(value: Any) -> Value | None:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value).removeprefix("torch."))
    if isinstance(value, dict):
        held = set(map(_plain, value.values()))
        return held.pop() if len(held) == 1 else "mixed"
    if isinstance(value, Tensor):
        return bool(value)
    return value if isinstance(value, bool | int | str) else None
