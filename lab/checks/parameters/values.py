"""The values of a call's parameters that are not numbers. Each value equals a text, which the repr of a case contains."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.calls.problem import E4M3
from lab.named_enum import TextEnum
from lab.ranges import dtypes_of
from lab.workloads.interfaces import Interface


@dataclass(frozen=True)
class Chosen:
    """A value for each axis of a function's model, and a seed."""

    interface: Interface
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of every axis; default values may be left out
    seed: int = 0

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def get(self, axis: str, default: Any = None) -> Any:
        """Return the value of an axis, or `default` if the function's model does not have the axis."""
        return self.values.get(axis, default)


class DtypePair(str):
    """The dtypes of the query and the cache, such as bf16/e4m3."""

    __slots__ = ()

    @property
    def query(self) -> torch.dtype:
        return dtypes_of(self)[0]

    @property
    def cache(self) -> torch.dtype:
        return dtypes_of(self)[1]


class HeadDims(str):
    """The head_dims of keys and of values, such as 576/512."""

    __slots__ = ()

    @property
    def head_dim(self) -> int:
        return int(self.partition("/")[0])

    @property
    def v_head_dim(self) -> int:
        return int(self.partition("/")[2])


class Lengths(TextEnum):
    """How the numbers of keys of the requests are chosen."""

    UNEQUAL = "unequal"
    EQUAL = "equal"
    LONGER = "longer"
    AS_ROWS = "as rows"
    OF_THE_NEXT = "as the next request's rows"  # as many keys as rows in all, but not of each request
    FEWER = "fewer than rows"


class Without(TextEnum):
    """Which requests have no rows, or no keys. `requests` returns their indexes in a batch of a given size."""

    FIRST = "none first", lambda count: range(1)
    MIDDLE = "none in the middle", lambda count: range(count // 2, count // 2 + 1)
    LAST = "none last", lambda count: range(count - 1, count)
    TWICE = "none twice", lambda count: range(max(count - 3, 0), count - 1)  # the two before the last
    ALL_BUT_ONE = "none but the first", lambda count: range(1, count)
    ALL = "none at all", range

    def __init__(self, _: str, requests: Callable[[int], Collection[int]]) -> None:
        self.requests = requests


class LongestRequest(TextEnum):
    """Which requests are the longest of the batch. `requests` returns their indexes in a batch of a given size."""

    LAST = "last", lambda count: (count - 1,)
    FIRST = "first", lambda count: (0,)
    MIDDLE = "in the middle", lambda count: (count // 2,)
    TWO = "first and last", lambda count: (0, count - 1)
    ALL_BUT_ONE = "all but the first", lambda count: range(1, count)

    def __init__(self, _: str, requests: Callable[[int], Collection[int]]) -> None:
        self.requests = requests


@functools.cache
def empty_requests(without: Any, requests: int) -> frozenset[int]:
    """Return the indexes of the requests in a batch that `without` names. If it is no `Without`, there are none."""
    return frozenset(without.requests(requests) if isinstance(without, Without) else ())


@functools.cache
def is_outside(place: LongestRequest, without: Any, requests: int) -> bool:
    """Return True if none of the longest requests is one of those that `without` empties. If it empties all, any place fits."""
    return without == Without.ALL or empty_requests(without, requests).isdisjoint(place.requests(requests))


class Offsets(TextEnum):
    """How row offsets are given, and whether padding rows follow the requests' rows."""

    PLAIN = "plain"
    NONE = "none"
    EQUAL = "equal"
    UNEQUAL = "unequal"
    PADDED = "padding after"
    PADDED_WITH_NAN = "padding of NaN"


class Rows(TextEnum):
    """How the numbers of query rows of the requests are chosen, in a context call or ragged context call."""

    UNEQUAL = "unequal"
    ONE_EACH = "one each"


class Mask(TextEnum):
    """Which draft mask a call has."""

    NONE = "none"
    CAUSAL = "causal", "causal mask"
    FULL = "full", "full mask"
    TREE = "tree", "tree mask"
    BY_REQUEST = "by request", "mask that differs by request"
    OWN_BIT_CLEAR = "own bit clear"  # of each row: it sees the draft's tokens before it, and so the first row none
    BITS_AFTER = "bits after the draft", "tree mask"
    AT_A_WORD = "at a word", "tree mask"  # the mask begins at no multiple of 4 bytes

    def __init__(self, _: str, shown: str | None = None) -> None:
        self.shown = shown  # its name in `draft_masks`; None where it has none


class Sinks(TextEnum):
    """Whether a call has sinks (one number per head), and how it gets them."""

    NONE = "none"
    PER_HEAD = "per head"
    SOME_MINUS_INFINITY = "some minus infinity"
    A_PART = "a part of others"
    LIST = "list"
    TUPLE = "tuple"


class LogitScale(TextEnum):
    """How a call gets `bmm1_scale`: as a number or a tensor, with which sign, and in base e or 2."""

    NUMBER = "number", None, 1.0
    TENSOR_1D = "tensor [1]", (1,)
    TENSOR_0D = "tensor []", ()
    TENSOR_2D = "tensor [1, 1]", (1, 1)
    NEGATIVE = "negative", None, -0.5
    NEGATIVE_TENSOR = "negative tensor [1]", (1,), -0.5
    LOG2 = "log2 tensor [1]", (1,), 0.75, True
    LOG2_BESIDE = "log2 tensor [] beside a tensor", (), 0.75, True, True
    LOG2_BELOW_0 = "log2 tensor below 0", (1,), -0.5, True

    def __init__(
        self,
        _: str,
        shape: tuple[int, ...] | None,  # of a tensor; None for a number
        factor: float = 0.75,  # of the usual scale
        is_log2: bool = False,  # the scale is given as `bmm1_scale_log2`
        is_beside: bool = False,  # `bmm1_scale` is given too, as a tensor; `bmm1_scale_log2` takes precedence
    ) -> None:
        self.shape, self.factor, self.is_log2, self.is_beside = shape, factor, is_log2, is_beside


class ValueScale(TextEnum):
    """How a call gets `bmm2_scale`. 0.9 is not a sum of few powers of two, so that rounding of the scale shows."""

    USUAL = "usual", None, 1.0
    NUMBER = "0.9 as a number", None
    TENSOR_1D = "0.9 as a tensor [1]", (1,)
    TENSOR_0D = "0.9 as a tensor []", ()
    TENSOR_2D = "0.9 as a tensor [1, 1]", (1, 1)
    NEGATIVE = "negative", None, -0.5
    NEGATIVE_TENSOR = "negative tensor [1]", (1,), -0.5
    WHOLE_ONE = "1 as a whole number", None, 1.0

    def __init__(self, _: str, shape: tuple[int, ...] | None, factor: float = 0.9) -> None:
        self.shape, self.factor = shape, factor


class Output(TextEnum):
    """How a call gets its output buffer and dtype: `out` and `out_dtype`."""

    NONE = "none", None, False
    GIVEN = "given"
    VIEW = "a view"
    GIVEN_BF16 = "given bf16", torch.bfloat16
    GIVEN_FP16 = "given fp16", torch.float16
    GIVEN_FP32 = "given fp32", torch.float32
    GIVEN_E4M3 = "given e4m3", E4M3
    BF16 = "dtype bf16", torch.bfloat16, False
    FP16 = "dtype fp16", torch.float16, False
    E4M3 = "dtype e4m3", E4M3, False

    def __init__(self, _: str, dtype: torch.dtype | None = None, is_given: bool = True) -> None:
        self.dtype = dtype  # of the output; None for the call's own
        self.is_given = is_given  # a buffer is passed

    def is_e4m3(self, dtypes: DtypePair) -> bool:
        """Return True if the output of a call with these dtypes is e4m3."""
        return (dtypes.query if self.dtype is None else self.dtype) == E4M3


class Lse(TextEnum):
    """How a call is asked for the LSE: `lse` and `return_lse`."""

    NONE = "none", False
    RETURNED = "returned", False
    GIVEN = "given"
    AS_THE_QUERY = "given as the query"
    ALONE = "given alone"
    STRIDED = "strided"
    ROWS_APART = "rows apart"
    BASE_E = "base e", False

    def __init__(self, _: str, is_given: bool = True) -> None:
        self.is_given = is_given  # a buffer is passed


class SeqLens(TextEnum):
    INT32 = "int32"
    UINT32 = "uint32"
    AMID_OTHERS = "amid others"


class KeyOffsets(TextEnum):
    """What the offsets `cum_seq_lens_kv` of a context call count."""

    KEYS = "keys"
    PAGES = "pages"


class Bound(TextEnum):
    """Which value is passed as an upper bound of the lengths, such as `max_kv_len`."""

    OF_THE_TABLE = "of the table"
    EXACT = "exact"
    LARGER = "larger"
    FOUR_TIMES = "4 times"
    OF_A_MODEL = "262,144"  # as long as a model's requests may become, however short the batch's are
    NONE = "None"


class Tables(TextEnum):
    """How a call gets its block tables."""

    PLAIN = "plain"
    ROWS_APART = "rows apart"
    AT_AN_ELEMENT = "at an element"
    NEGATIVE_TAIL = "tail of -1"
    FAR_TAIL = "tail far outside"
    WIDE = "4,200 columns"
    SEPARATE = "separate", True
    SEPARATE_ROWS_APART = "separate with rows apart", True

    def __init__(self, _: str, is_separate: bool = False) -> None:
        self.is_separate = is_separate  # K and V have tables of their own


class Pages(TextEnum):
    ONCE = "once each"
    TWICE = "the last twice"  # the last page of a request of several is the one before it


class Cache(TextEnum):
    """How the cache is stored and passed."""

    PLAIN = "plain"
    PAGES_APART = "pages apart"
    TOKENS_APART = "tokens apart"
    AT_16_BYTES = "at 16 bytes"
    # An element apart: strides that are no whole loads of 16 bytes, nor of 16 elements, which a kernel may decline.
    PAGES_AN_ELEMENT_APART = "pages an element apart"
    TOKENS_AN_ELEMENT_APART = "tokens an element apart"
    HEADS_APART = "heads apart", False
    ODD_STRIDES = "odd strides", False
    V_OTHERWISE = "V otherwise", False
    V_INSIDE = (
        "V otherwise inside pages",
        False,
    )  # gaps between V's tokens in HND, between its heads in NHD, and none in K
    ONE_TENSOR = "one tensor", False, True  # V's page after K's
    HALVES = "one tensor of two halves", False, True  # all of V after all of K
    K_IS_V = "K is V", False
    FOUR_AXES = "4-D", True
    FOUR_AXES_ODD_STRIDES = "4-D with odd strides", True

    def __init__(self, _: str, is_of_mla: bool | None = None, is_one_tensor: bool = False) -> None:
        self.is_of_mla = is_of_mla  # whether MLA alone has the form, or all but MLA; None: each call has it
        self.is_one_tensor = is_one_tensor  # K and V are passed as one tensor of twice the pages


class KV(TextEnum):
    """How keys and values are stored in a ragged call."""

    V_APART = "V apart"
    V_OF_A_PROJECTION = "V of a projection"
    ONE_TENSOR = "of one tensor"


class RaggedPadding(TextEnum):
    """Which padding follows the requests' rows and keys in a ragged call."""

    NONE = "none"
    ROWS = "rows"
    KEYS = "keys"
    BOTH = "rows and keys"
    NAN = "rows and keys of NaN"


class BatchPadding(TextEnum):
    """How the batch of a metadata builder is padded: not at all, with slots for requests, or with rows."""

    NONE = "none"
    EMPTY_SLOTS = "slots of length 0", 0
    SLOTS = "slots of length 1", 1
    ROWS = "rows"

    def __init__(self, _: str, slot_length: int | None = None) -> None:
        self.slot_length = slot_length  # of each slot of padding; None where there is none


class Later(TextEnum):
    """How the second pass of a metadata builder differs from the first."""

    SAME = "the same"
    LONGER = "longer"
    OTHERS = "others"
    FEWER_ROWS = "fewer rows", -1
    MORE_ROWS = "more rows", 2
    FEWER = "fewer"
    MORE = "more"
    RENUMBERED = "slots renumbered"
    ANOTHER_POOL = "another pool"

    def __init__(self, _: str, more_rows: int = 0) -> None:
        self.more_rows = more_rows  # than each request of the first pass has


class Prefixes(TextEnum):
    """Which prefix lengths the requests of a metadata builder's batch have."""

    UNEQUAL = "unequal"
    NONE = "none"
    SOME_NONE = "some none"
    EQUAL = "equal"
    AT_PAGE_EDGES = "at page edges"
    NO_LIST = "none, and no list of them"
