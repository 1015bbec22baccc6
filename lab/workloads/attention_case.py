"""One attention call as data: its function, the lengths of its requests, and the contents and storage of its tensors."""

import operator
import random
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from lab.calls.problem import E4M3, NVFP4, AttentionCall
from lab.named_enum import NamedEnum
from lab.workloads.interfaces import PAGED_CALLS


def short_repr(case: Any) -> str:
    """Return Python source that creates a dataclass instance equal to `case`. Fields with their default value are left out."""
    shown = []
    for each in fields(case):
        value = getattr(case, each.name)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if value != usual:
            shown.append(f"{each.name}={value!r}")
    return f"{type(case).__name__}({', '.join(shown)})"


class Contents(NamedEnum):
    """The numbers in a test case's query, keys and values. A member's text describes them, and often what errors they show."""

    RANDOM = "N(0, 1): the output shows errors of rounding"
    NEEDLES = "a few keys outweigh all other keys: the keys at each row's limits, and the keys next to them"
    COUNTED = "zero queries, values that encode the key's position: the output counts the keys that a row sees"
    LOW = "all logits about -200,000, equal in a request: the output is a mean, unless a masked logit is finite"
    LOUD = "values of tens of thousands, whose sum overflows in float16"
    FAINT = "values below the normal numbers of a smaller format, or of the cache's own format if it is small"
    OVERSHADOWED = "one key, whose value is zero, has nearly all the weight: the output shows keys of weight e**-20"
    SHADED = "one key, whose value is zero, has most of the weight: the output shows keys of weight e**-9"
    TALL = "logits that rise with the position, to hundreds in long requests: the maxima of splits differ"


class Dead(NamedEnum):
    """The numbers in cache cells that no query row may read: cells after a request's last key, and cells of unused pages."""

    ZERO = "zeros"
    HUGE = "the largest finite values, positive: one of them in a product shows"
    NAN = "NaN, which a zero weight does not remove"


class HeadPages(NamedEnum):
    """Which pages of a request each K/V head selects in a block-sparse call. The case's seed draws them."""

    HALF = "each page before the last with a probability of one half, and the last"
    NOT_LAST = "each page before the last with a probability of one half"
    LAST = "the last page alone"
    ALL = "all pages"
    SOME_NONE = "as HALF for some heads, and no page for the other heads"


class TableTail(NamedEnum):
    """Which page ids stand in a page table's columns after a request's last page. No kernel may read these columns."""

    FOREIGN = "live pages of other requests, as a replayed table's stale columns do"
    NEGATIVE = "-1"
    FAR = "2**30, far outside the pool"


class Entries(NamedEnum):
    """Which keys each query row of a sparse MLA call selects, and in which of its `top_k` columns. Other columns contain -1."""

    MIXED = "some keys in any order, with -1 between them"
    ORDERED = "as many keys as there are columns, in ascending order"
    SHUFFLED = "as many keys as there are columns, in any order"
    EDGES = "the first and last keys of pages, with -1 between them"
    ONE = "one key, in any column"
    NONE = "no key in every second row, in the other rows some keys with -1 between them"
    LATE = "some keys after 128 columns of -1, or in the last column"
    TWICE = "half as many keys as there are columns, in two columns each, in any order"

    @property
    def has_gaps(self) -> bool:
        """Return True if a row may select no key, or have -1 before its first key. Calls with `top_k_lens` forbid such rows."""
        return self in (Entries.NONE, Entries.LATE)


@dataclass(frozen=True)
class Storage:
    """How K and V are stored in memory. The storage does not change the expected results, apart from rounding."""

    page_size: int = 16  #: tokens per page, a power of two
    kv_layout: str = "HND"  #: "HND" or "NHD", the order of a page's axes; not used for MLA
    dead: Dead = Dead.HUGE  #: the numbers in cells that no row may read
    #: the page ids in the page table's columns after a request's last page; with `top_k` the entries after a row's last column
    table_tail: TableTail = TableTail.FOREIGN
    spare_columns: int = 3  #: columns of the page table after the longest request's pages
    page_seed: int = 0  #: seed with which the pages are shuffled
    gaps_in_scale_factors: bool = False  #: the pages of an NVFP4 cache's scale factors are twice as large as needed
    stacked: bool = False  #: K and V are one tensor [num_pages, 2, ...], with V's page after K's; otherwise two tensors
    first_page: int = 0  #: unused pages at the start of the pool, so that the used pages lie far from its start
    one_far: bool = False  #: one used page lies after the `first_page` unused pages, all other used pages before them

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size} must be a power of two")
        if self.kv_layout not in ("HND", "NHD"):
            raise ValueError(f"kv_layout={self.kv_layout!r} must be 'HND' or 'NHD'")

    __repr__ = short_repr


@dataclass(frozen=True)
class AttentionCase:
    """One attention call as data, without tensors. Evaluating its `repr` creates an equal case."""

    interface: AttentionCall  #: DECODE, CONTEXT or MLA_DECODE
    kv_lens: tuple[int, ...]  #: number of keys of each request, its query tokens included; may be less than q_lens
    q_lens: tuple[int, ...]  #: number of query rows of each request; equal in DECODE and MLA_DECODE without `offsets`
    num_kv_heads: int = 2
    group: int = 4  #: query heads per K/V head
    head_dim: int = 64  #: of queries and keys
    v_head_dim: int | None = None  #: of values and outputs, for MLA: V is the first elements of K. None: `head_dim`
    dtype: torch.dtype = torch.bfloat16  #: of query and output
    kv_dtype: torch.dtype = torch.bfloat16  #: of the cache; uint8 is NVFP4
    #: the dtype to which the kernel is known to round the operands of Q·K^T and P·V. The control, whose error bounds the
    #: kernel's error, rounds them too. None: `dtype`
    arithmetic: torch.dtype | None = None
    window_left: int = -1  #: number of keys before its own position that a row sees; -1 for all
    sinks: bool = False  #: each head has a sink, a further logit in the softmax's denominator
    #: a decode call has `cum_seq_lens_q`, the offsets of the requests' rows, as context calls have
    offsets: bool = False
    #: columns of the entries that each row of an MLA call selects (`sparse_mla_top_k`); 0: rows see all keys
    top_k: int = 0
    entries: Entries | None = None  #: the keys that rows select; None without top_k
    #: the call has `sparse_mla_top_k_lens`: each row selects a key or more, in its first columns, as FlashInfer 0.7.2 requires
    top_k_lens: bool = False
    head_pages: HeadPages | None = None  #: the pages that K/V heads select in a block-sparse DECODE; None: all pages
    rank: tuple[int, int] | None = None  #: (rank, ranks) with context parallelism: `kv_lens` are then the rank's keys
    contents: Contents = Contents.RANDOM  #: the kind of numbers in the tensors
    seed: int = 0  #: seed of these numbers
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self) -> None:
        if self.interface not in PAGED_CALLS:
            raise ValueError(f"{self.interface!r} is no attention call: one of {PAGED_CALLS}")
        if not self.kv_lens or len(self.kv_lens) != len(self.q_lens):
            raise ValueError(f"kv_lens {self.kv_lens} and q_lens {self.q_lens}: one each per request, at least one")
        if min(self.kv_lens) < 0 or min(self.q_lens) < (not self.has_offsets):
            raise ValueError(f"kv_lens {self.kv_lens} must be >= 0 and q_lens {self.q_lens} >= 1, or 0 with offsets")
        if not self.has_offsets and len(set(self.q_lens)) > 1:
            raise ValueError(f"q_lens {self.q_lens} must be equal in a decode call without offsets")
        if self.is_mla and (self.num_kv_heads != 1 or self.v_head_dim is None):
            raise ValueError("an MLA call has one K/V head and a v_head_dim")
        if self.window_left >= 0 and not self.has_window_argument:
            raise ValueError(
                f"window_left={self.window_left} must be -1 in an MLA call, with head_pages and with a rank"
            )
        if not self.is_mla and (self.v_head_dim is not None or self.top_k):
            raise ValueError(
                f"v_head_dim={self.v_head_dim} and top_k={self.top_k} belong to MLA_DECODE; leave them out"
            )
        if self.top_k < 0 or (self.entries is None) != (self.top_k == 0) or (self.top_k_lens and not self.top_k):
            raise ValueError(
                f"top_k={self.top_k} must be at least 0, and above it with entries={self.entries} and "
                f"top_k_lens={self.top_k_lens}"
            )
        if (
            self.entries
            and self.top_k_lens
            and (self.entries.has_gaps or any(map(operator.lt, self.kv_lens, self.q_lens)))
        ):
            raise ValueError(
                f"top_k_lens counts a row's entries, at least one: {self.entries!r} and kv_lens {self.kv_lens} for q_lens "
                f"{self.q_lens} leave rows without one"
            )
        if self.head_pages is not None and self.interface is not AttentionCall.DECODE:
            raise ValueError(f"head_pages={self.head_pages!r} belongs to DECODE; leave it None")
        rank, world = self.rank or (0, 1)
        if self.rank and tuple(len(range(rank, end, world)) for end in self.all_kv_lens) != self.kv_lens:
            raise ValueError(
                f"kv_lens {self.kv_lens} cannot be the keys of rank {rank} of {world}, for q_lens {self.q_lens}"
            )

    @cached_property
    def is_mla(self) -> bool:
        return self.interface is AttentionCall.MLA_DECODE

    @cached_property
    def has_window_argument(self) -> bool:
        """Return True if FlashInfer supports a sliding window in this call."""
        return not self.is_mla and self.head_pages is None and self.rank is None

    @cached_property
    def has_offsets(self) -> bool:
        return self.offsets or self.interface is AttentionCall.CONTEXT

    @cached_property
    def all_kv_lens(self) -> tuple[int, ...]:
        """Return each request's number of keys on all context-parallel ranks together. `kv_lens` counts those of one rank."""
        rank, world = self.rank or (0, 1)
        return tuple(
            max(world * (kv_len - 1) + rank + 1 + (request + self.seed) % world if kv_len else min(rank, q_len), q_len)
            for request, (kv_len, q_len) in enumerate(zip(self.kv_lens, self.q_lens, strict=True))
        )

    @cached_property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    @cached_property
    def out_head_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @cached_property
    def page_size(self) -> int:
        return self.storage.page_size

    def selected_pages(self, request: int, kv_head: int) -> list[int]:
        """Return the numbers, from 0, of the pages of a request that a K/V head selects in a block-sparse call."""
        last = -(-self.kv_lens[request] // self.page_size) - 1
        if last < 0 or (self.head_pages is HeadPages.SOME_NONE and (request + kv_head) % 2 == 0):
            return []
        if self.head_pages in (None, HeadPages.ALL):
            return [*range(last + 1)]
        rng = random.Random(f"{self.seed} {request} {kv_head}")
        drawn = [page for page in range(last) if rng.random() < 0.5 and self.head_pages is not HeadPages.LAST]
        return drawn if self.head_pages is HeadPages.NOT_LAST else [*drawn, last]

    def with_rows(self, *q_lens: int) -> "AttentionCase":
        """Return the case with other numbers of query rows. A request with fewer keys than rows gets as many keys as rows."""
        return replace(self, kv_lens=tuple(map(max, self.kv_lens, q_lens)), q_lens=q_lens)

    @cached_property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @cached_property
    def is_quantised(self) -> bool:
        return self.kv_dtype in (E4M3, NVFP4)

    __repr__ = short_repr
