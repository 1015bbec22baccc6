"""Define enums of the values that parameters of a judged call may have, other than numbers. Each member equals a text, such as
"none", which the `repr` of a case contains.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3
from lab.named_enum import TextEnum
from lab.ranges import dtypes_of
from lab.workloads.inputs.views import GAP, Layout, apart, with_odd_strides
from lab.workloads.interfaces import Interface


@dataclass(frozen=True)
class Chosen:
    """One call of a function: a value for each parameter (axis), and the seed of the data."""

    interface: Interface
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)  # by axis; default values may be left out
    seed: int = 0

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def get(self, axis: str, default: Any = None) -> Any:
        return self.values.get(axis, default)


class DtypePair(str):
    """The dtypes of the query and of the cache as a text, such as "bf16/e4m3"."""

    __slots__ = ()

    @property
    def query(self) -> torch.dtype:
        return dtypes_of(self)[0]

    @property
    def cache(self) -> torch.dtype:
        return dtypes_of(self)[1]


class HeadDims(str):
    """The head_dims of keys and of values as a text, such as "576/512"."""

    __slots__ = ()

    @property
    def head_dim(self) -> int:
        return int(self.partition("/")[0])

    @property
    def v_head_dim(self) -> int:
        return int(self.partition("/")[2])


class Lengths(TextEnum):
    """How many keys each request of a batch has."""

    UNEQUAL = "unequal"
    EQUAL = "equal"
    LONGER = "longer"  # than the request's number of query rows; this and the next two are only for ragged calls
    AS_ROWS = "as rows"
    OF_THE_NEXT = "as the next request's rows"  # the whole batch has as many keys as rows, but a request does not
    FEWER = "fewer than rows"


class _Requests(TextEnum):
    def __init__(self, _: str, requests: Callable[[int], Collection[int]]) -> None:
        self.requests = requests  # from the number of requests in a batch to the indexes of some


class Without(_Requests):
    """Which requests of a batch are empty. On the axis "offsets", empty requests have no query rows; on "lengths", no keys."""

    FIRST = "none first", lambda count: range(1)
    MIDDLE = "none in the middle", lambda count: range(count // 2, count // 2 + 1)
    LAST = "none last", lambda count: range(count - 1, count)
    TWICE = "none twice", lambda count: range(max(count - 3, 0), count - 1)  # the two requests before the last one
    ALL_BUT_ONE = "none but the first", lambda count: range(1, count)
    ALL = "none at all", range


class LongestRequest(_Requests):
    LAST = "last", lambda count: (count - 1,)
    FIRST = "first", lambda count: (0,)
    MIDDLE = "in the middle", lambda count: (count // 2,)
    TWO = "first and last", lambda count: (0, count - 1)
    ALL_BUT_ONE = "all but the first", lambda count: range(1, count)


@functools.cache
def empty_requests(without: Any, requests: int) -> frozenset[int]:
    return frozenset(without.requests(requests) if isinstance(without, Without) else ())


@functools.cache
def is_outside(place: LongestRequest, without: Any, requests: int) -> bool:
    # True if all longest requests have rows and keys, or if no request of the batch has.
    return without == Without.ALL or empty_requests(without, requests).isdisjoint(place.requests(requests))


class Offsets(TextEnum):
    """Whether `cum_seq_lens_q` (the row offsets of the requests) is passed, and which numbers of rows the requests have."""

    PLAIN = "plain"
    NONE = "none"  # no offsets: all requests have the same number of rows
    EQUAL = "equal"  # offsets of equal numbers of rows
    UNEQUAL = "unequal"
    PADDED = "padding after"  # padding rows follow the last request
    PADDED_WITH_NAN = "padding of NaN"


class Rows(TextEnum):
    UNEQUAL = "unequal"
    ONE_EACH = "one each"


class Mask(TextEnum):
    NONE = "none"
    CAUSAL = "causal", "causal mask"
    FULL = "full", "full mask"
    TREE = "tree", "tree mask"
    BY_REQUEST = "by request", "mask that differs by request"
    OWN_BIT_CLEAR = "own bit clear"  # a row sees only the draft tokens before its own, so the first row sees none
    BITS_AFTER = "bits after the draft", "tree mask"
    AT_A_WORD = "at a word", "tree mask"  # the mask begins at no multiple of 4 bytes

    def __init__(self, _: str, shown: str | None = None) -> None:
        self.shown = shown  # the key of the mask in `draft_masks`, or None


class Sinks(TextEnum):
    NONE = "none"
    PER_HEAD = "per head"
    SOME_MINUS_INFINITY = "some minus infinity"
    A_PART = "a part of others"  # a view of a larger tensor of wrong sinks
    LIST = "list"
    TUPLE = "tuple"


class LogitScale(TextEnum):
    """How the scale of the logits is passed: its value, as a number or as a tensor, and as `bmm1_scale` (for a softmax with
    base e) or as `bmm1_scale_log2` (with base 2).
    """

    NUMBER = "number", None, 1.0
    TENSOR_1D = "tensor [1]", (1,)
    TENSOR_0D = "tensor []", ()
    TENSOR_2D = "tensor [1, 1]", (1, 1)
    NEGATIVE = "negative", None, -0.5
    NEGATIVE_TENSOR = "negative tensor [1]", (1,), -0.5
    SMALL = "small for a large query", None, 2.0**-12
    LOG2 = "log2 tensor [1]", (1,), 0.75, True
    LOG2_BESIDE = "log2 tensor [] beside a tensor", (), 0.75, True, True
    LOG2_BELOW_0 = "log2 tensor below 0", (1,), -0.5, True

    def __init__(
        self,
        _: str,
        shape: tuple[int, ...] | None,  # shape of the tensor; None for a number
        factor: float = 0.75,  # the scale divided by the usual scale
        is_log2: bool = False,  # the scale is passed as `bmm1_scale_log2`
        is_beside: bool = False,  # `bmm1_scale` is passed too, as a tensor; `bmm1_scale_log2` takes precedence
    ) -> None:
        self.shape, self.factor, self.is_log2, self.is_beside = shape, factor, is_log2, is_beside

    @property
    def query_factor(self) -> float:
        # With SMALL, q·k exceeds float16's largest number, 65,504, and the scaled logit does not.
        return 1.0 / self.factor if self is LogitScale.SMALL else 1.0


class ValueScale(TextEnum):
    """How `bmm2_scale`, the scale of the output, is passed, and its value. 0.9 reveals a kernel that rounds the scale."""

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
        self.dtype = dtype  # dtype of the output; None for the dtype that the call has by default
        self.is_given = is_given  # whether `out` is passed

    def is_e4m3(self, dtypes: DtypePair) -> bool:
        return (dtypes.query if self.dtype is None else self.dtype) == E4M3


class Lse(TextEnum):
    NONE = "none", False
    RETURNED = "returned", False
    GIVEN = "given"
    AS_THE_QUERY = "given as the query"  # with the query's axes except the last
    ALONE = "given alone"  # `lse` without `return_lse`
    STRIDED = "strided"
    ROWS_APART = "rows apart"
    BASE_E = "base e", False

    def __init__(self, _: str, is_given: bool = True) -> None:
        self.is_given = is_given  # whether `lse` is passed


class SeqLens(TextEnum):
    INT32 = "int32"
    UINT32 = "uint32"
    AMID_OTHERS = "amid others"  # int32, a view of a larger tensor of wrong lengths


class KeyOffsets(TextEnum):
    """The unit of the offsets `cum_seq_lens_kv` of a context call."""

    KEYS = "keys"
    PAGES = "pages"


class Bound(TextEnum):
    """The value of an upper bound of the requests' lengths that is passed as a number, such as `max_kv_len`."""

    OF_THE_TABLE = "of the table"  # the tokens in a row of the page table
    EXACT = "exact"  # the longest length
    LARGER = "larger"
    FOUR_TIMES = "4 times"  # OF_THE_TABLE times 4
    OF_A_MODEL = "262,144"  # the longest context of a model
    NONE = "None"


class Tables(TextEnum):
    """The memory layout and width of `block_tables` (the page tables), and the entries after a request's last page."""

    PLAIN = "plain"
    ROWS_APART = "rows apart"
    AT_AN_ELEMENT = "at an element"
    NEGATIVE_TAIL = "tail of -1"
    FAR_TAIL = "tail far outside"
    WIDE = "4,200 columns"
    SEPARATE = "separate", True
    SEPARATE_ROWS_APART = "separate with rows apart", True

    def __init__(self, _: str, is_separate: bool = False) -> None:
        self.is_separate = is_separate  # whether K and V have different tables


class Pages(TextEnum):
    ONCE = "once each"
    TWICE = "the last twice"  # the last table entry of a request with several pages is that of the page before


class Cache(TextEnum):
    """The memory layout of `kv_cache`: its gaps, alignment and number of axes, and whether K and V are one tensor."""

    PLAIN = "plain"
    PAGES_APART = "pages apart", None, False, lambda pages, _: apart(pages, 0, pages[0].numel())
    TOKENS_APART = "tokens apart", None, False, lambda pages, tokens: apart(pages, tokens, GAP)
    AT_16_BYTES = "at 16 bytes", None, False, lambda pages, _: Layout.AT_16_BYTES.of(pages)
    # A gap of one element: the strides are no multiples of 16 bytes, which a kernel may decline.
    PAGES_AN_ELEMENT_APART = "pages an element apart", None, False, lambda pages, _: apart(pages, 0, 1)
    TOKENS_AN_ELEMENT_APART = "tokens an element apart", None, False, lambda pages, tokens: apart(pages, tokens, 1)
    HEADS_APART = "heads apart", False, False, lambda pages, tokens: apart(pages, 3 - tokens, GAP)
    ODD_STRIDES = "odd strides", False, False, lambda pages, _: with_odd_strides(pages)
    V_OTHERWISE = "V otherwise", False  # V's pages as with PAGES_APART
    # Gaps inside V's pages and none in K's: between tokens in HND, between heads in NHD.
    V_INSIDE = "V otherwise inside pages", False
    ONE_TENSOR = "one tensor", False, True  # each page of V follows its page of K
    HALVES = "one tensor of two halves", False, True  # all pages of V follow all pages of K
    K_IS_V = "K is V", False
    FOUR_AXES = "4-D", True
    FOUR_AXES_ODD_STRIDES = "4-D with odd strides", True

    def __init__(
        self,
        _: str,
        is_of_mla: bool | None = None,  # True: only MLA calls have the layout; False: only other calls; None: all calls
        is_one_tensor: bool = False,  # whether K and V are passed as one tensor
        # From pages of K or V, and the number of their token axis (1 or 2), to pages in this layout
        of: Callable[[Tensor, int], Tensor] = lambda pages, _: pages,
    ) -> None:
        self.is_of_mla, self.is_one_tensor, self.of = is_of_mla, is_one_tensor, of


class KV(TextEnum):
    V_APART = "V apart"
    V_OF_A_PROJECTION = "V of a projection"
    ONE_TENSOR = "of one tensor"


class RaggedPadding(TextEnum):
    NONE = "none"
    ROWS = "rows"
    KEYS = "keys"
    BOTH = "rows and keys"
    NAN = "rows and keys of NaN"


class BatchPadding(TextEnum):
    """How the batch of a forward pass is padded: by requests of length 0 or 1, or by query rows that belong to no request."""

    NONE = "none"
    EMPTY_SLOTS = "slots of length 0", 0
    SLOTS = "slots of length 1", 1
    ROWS = "rows"

    def __init__(self, _: str, slot_length: int | None = None) -> None:
        self.slot_length = slot_length  # seq_len of each padding request; None without padding requests


class Later(TextEnum):
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
        self.more_rows = more_rows  # query rows that each request has more than in the first pass


class Prefixes(TextEnum):
    UNEQUAL = "unequal"
    NONE = "none"
    SOME_NONE = "some none"
    EQUAL = "equal"
    AT_PAGE_EDGES = "at page edges"
    NO_LIST = "none, and no list of them"  # `extend_prefix_lens` is None
