"""What features are read from: a batch and each request in it, a call, a case, and what a call shares with earlier ones."""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, AttentionCall, Feature, PagedAttention
from lab.calls.problem import AttentionProblem, shown_draft_tokens
from lab.calls.workspace import counts_in_workspace, semaphores_and_scratch
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, UncountedTokens
from lab.workloads.interfaces import Interface

TILE = 64  # keys that kernels take at a time


@dataclass(frozen=True)
class Batch:
    """The lengths of a batch, and what of a call decides which keys of a request lie on an edge."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int = TILE
    window_left: int = -1

    def requests(self) -> Iterator["Request"]:
        """Yield the requests."""
        last = len(self.kv_lens) - 1
        for place, (kv_len, q_len) in enumerate(zip(self.kv_lens, self.q_lens, strict=True)):
            pages = -(-kv_len // self.page_size)
            last_seen = kv_len - 1 - self.window_left if self.window_left >= 0 else 0
            first_seen = last_seen - q_len + 1 if self.window_left >= 0 else 0
            yield Request(self, place, kv_len, q_len, self.page_size, pages, place == last, first_seen, last_seen)


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    Attributes:
        batch, request: the batch, and the request's place in it.
        kv_len, q_len, page_size, pages, last_request: its lengths, and whether it is the batch's last.
        first_seen: first key in the window of the first row; 0 or less: the window hides none from it.
        last_seen: first key in the window of the last row.
    """

    batch: Batch
    request: int
    kv_len: int
    q_len: int
    page_size: int
    pages: int
    last_request: bool
    first_seen: int
    last_seen: int


class Call:
    """An attention call: its arguments, and the problem that they pose. An attribute of the problem is one of the call.

    Args:
        interface, arguments: of the call.

    Raises:
        TypeError, ValueError, NotImplementedError: `lab.calls` refuses the arguments.
    """

    k_cache: Tensor | None = None
    k_scale_factors: Tensor | None = None
    block_tables: Tensor | None = None
    kv_dtype: torch.dtype | None = None
    kv_layout: str | None = None
    mask_words: int | None = None
    page_size = TILE

    def __init__(self, interface: Interface, arguments: Mapping[str, Any]) -> None:
        self.interface, self.arguments = interface, arguments
        self.problem: AttentionProblem = CALL_TYPES[AttentionCall(interface.value)](**arguments).problem()
        self.dtype, self.has_sinks = self.problem.query.dtype, self.problem.sinks is not None
        self.group = self.problem.num_qo_heads // max(self.problem.num_kv_heads, 1)
        # Of a call without sinks, a logit that none of their features has; without a mask, a causal one of one token.
        self.logits = torch.zeros(1) if self.problem.sinks is None else self.problem.sinks
        self.shown = torch.ones(1, 1, 1, dtype=torch.bool)
        if isinstance(self.problem, PagedAttention):
            self._pose_paged(self.problem)

    def _pose_paged(self, problem: PagedAttention) -> None:
        self.k_cache, self.k_scale_factors = problem.k_cache, problem.k_scale_factors
        self.block_tables, self.page_size, self.kv_dtype = problem.k_block_tables, problem.page_size, problem.kv_dtype
        is_latent = self.interface is Interface.MLA_DECODE
        self.kv_layout = "MLA" if is_latent else str(self.arguments.get("kv_layout", "HND"))
        self.has_one_cache = not is_latent and isinstance(self.arguments["kv_cache"], Tensor)
        self.has_square_page = not is_latent and problem.page_size == problem.num_kv_heads
        self.pool_pages, self.table_columns = len(problem.k_cache), problem.k_block_tables.shape[1]
        self.pool_elements = problem.k_cache.stride(0) * len(problem.k_cache)
        if problem.mask is not None:
            self.shown, self.mask_words = shown_draft_tokens(problem.mask.cpu().to(torch.int32)), problem.mask.shape[2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["problem"], name, None)

    def asks(self, feature: Feature) -> bool:
        """Tell whether the problem has a feature that not every kernel has."""
        return feature in self.problem.features()

    @property
    def batch(self) -> Batch:
        """Return the lengths, which are read from the device, and the window as it was given."""
        q_lens = tuple(after - before for before, after in pairwise(self.problem.row_offsets()))
        kv_lens = tuple(self.problem.seq_lens.tolist())
        return Batch(kv_lens, q_lens, self.page_size, self.arguments.get("window_left", -1))

    @property
    def host_lengths(self) -> torch.dtype | None:
        return getattr(self.arguments.get("q_seq_lens_cpu"), "dtype", None)

    @property
    def used_scratch(self) -> bool:
        """Return True where the workspace's scratch does not begin with zeros."""
        workspace = self.arguments.get("workspace_buffer")
        if workspace is None:
            return False
        semaphores, scratch = semaphores_and_scratch(workspace.flatten())
        is_counted_in = counts_in_workspace(self.arguments.get("backend", "auto"), self.problem.query.device)
        return any(bool(part[:64].any()) for part in ((scratch,) if is_counted_in else (semaphores, scratch)))


class Case:
    """A case of any check: the fields of its dataclass and of those in it, and what it or its model has besides."""

    # Fields that are no features, or whose features are those of the batch and of its requests.
    NO_FEATURES = (
        "interface",
        "arithmetic",
        "values",
        "seed",
        "page_seed",
        "kv_lens",
        "q_lens",
        "prefix_lens",
        "lens",
        "rows",
    )

    def __init__(self, case: Any) -> None:
        self.case, self.fields = case, SimpleNamespace(**dict(_fields(case)))

    def __getattr__(self, name: str) -> Any:
        for each in (self.case, getattr(self.case, "model", None)):
            if hasattr(each, name):
                return getattr(each, name)
        return getattr(self.fields, name, None)

    @property
    def has_sinks(self) -> bool:
        return bool(getattr(self.case, "sinks", getattr(getattr(self.case, "model", None), "has_sinks", False)))

    @property
    def batch(self) -> Batch | None:
        """Return the lengths; None where the case has none."""
        kv_lens = getattr(self.case, "kv_lens", getattr(self.case, "lens", None))
        if kv_lens is None:
            return None
        q_lens = getattr(self.case, "q_lens", (0,) * len(kv_lens))
        page_size, window_left = getattr(self.case, "page_size", TILE), getattr(self.case, "window_left", -1)
        return Batch(tuple(kv_lens), tuple(q_lens), page_size, window_left)

    @property
    def forward_mode(self) -> ForwardMode | None:
        return next((each for each in vars(self.fields).values() if isinstance(each, ForwardMode)), None)

    @property
    def uncounted(self) -> UncountedTokens | None:
        """Return the tokens that seq_lens leaves out: none in a step of a draft whose K and V are frozen."""
        mode = self.forward_mode
        is_frozen = getattr(self.fields, "draft_step", None) in (None, FROZEN_KV_STEP)
        if mode is not None and mode.uncounted is UncountedTokens.DRAFT_STEP and is_frozen:
            return UncountedTokens.NONE
        return None if mode is None else mode.uncounted


def _fields(case: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(case) if is_dataclass(case) else ():
        value = getattr(case, each.name)
        if is_dataclass(value):
            yield from _fields(value)
        elif each.name not in Case.NO_FEATURES:
            yield each.name, value


@dataclass(frozen=True)
class Earlier:
    """What a call has in common with the earlier ones of its case.

    Attributes:
        calls_before: their number.
        changed: arguments whose values are not those of the first call of these shapes.
        written: arguments whose tensors were written since an earlier call.
        is_longer: than the first call of these shapes.
    """

    calls_before: int
    changed: frozenset[str]
    written: frozenset[str]
    is_longer: bool


class CallLog:
    """The attention calls of one case."""

    REMEMBERED = (
        "bmm1_scale",
        "bmm2_scale",
        "window_left",
        "sinks",
        "mask",
        "seq_lens",
        "cum_seq_lens_q",
        "block_tables",
    )
    WATCHED = ("query", "seq_lens", "cum_seq_lens_q", "block_tables", "bmm2_scale", "mask", "workspace_buffer")

    def __init__(self) -> None:
        self._calls = 0
        self._first_of_shapes: dict[Any, dict[str, Any]] = {}
        # Not the tensors themselves: a later call's must be free to get the address of one that is gone, as an engine's do.
        self._versions: dict[tuple[str, int], tuple[weakref.ref[Tensor], int]] = {}

    def earlier(self, arguments: Mapping[str, Any]) -> Earlier:
        """Note a call, and return what it has in common with those that were noted before it."""
        self._calls += 1
        sinks = arguments.get("sinks", arguments.get("attention_sinks"))
        log2 = arguments.get("bmm1_scale_log2")
        now = {name: _comparable(arguments.get(name)) for name in self.REMEMBERED} | {"sinks": _comparable(sinks)}
        if log2 is not None:
            now["bmm1_scale"] = "in bmm1_scale_log2"
        shapes = tuple(tuple(arguments[name].shape) for name in ("query", "seq_lens"))
        first = self._first_of_shapes.setdefault(shapes, now)
        cache = arguments.get("kv_cache", arguments.get("key"))
        watched = {name: arguments.get(name) for name in self.WATCHED} | {
            "kv_cache": cache[0] if isinstance(cache, tuple) else cache,
            "bmm1_scale": arguments.get("bmm1_scale") if log2 is None else log2,
            "sinks": sinks,
        }
        return Earlier(
            calls_before=self._calls - 1,
            changed=frozenset(name for name, value in now.items() if value != first[name]),
            written=frozenset(
                name for name, each in watched.items() if isinstance(each, Tensor) and self._was_written(name, each)
            ),
            is_longer=any(
                later > earlier
                for later, earlier in zip(_listed(now["seq_lens"]), _listed(first["seq_lens"]), strict=True)
            ),
        )

    def _was_written(self, name: str, tensor: Tensor) -> bool:
        key = name, tensor.data_ptr()
        seen, version = self._versions.get(key, (None, tensor._version))
        if seen is None or seen() is None:
            version = tensor._version
            self._versions[key] = weakref.ref(tensor), version
        return tensor._version > version


def _comparable(value: Any) -> Any:
    """Return an argument's value, the same for a number and a tensor of it."""
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(f"{float(value):.5g}")
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value.cpu().to(torch.float64).flatten().tolist() if isinstance(value, Tensor) else value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
