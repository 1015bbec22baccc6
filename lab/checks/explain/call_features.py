"""Read the features (named properties such as `kv_len`, see `lab.checks.explain.features`) of cases, calls and requests."""

import math
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, Feature, PagedAttention, Problem
from lab.calls.mla_decode import lse_is_base_e
from lab.calls.problem import LATENT_CALLS, AttentionCall, shown_draft_tokens
from lab.calls.workspace import SEMAPHORE_BYTES, counts_in_workspace
from lab.checks.explain.feature import DTYPE_NAMES, LENGTHS, NO_FEATURES, SMALL_SCALE, Features, Read, Value
from lab.checks.explain.features import FEATURES, GIVEN, OF_PROBLEM, REMEMBERED, WATCHED, feature_named
from lab.checks.explain.request_features import TILE, read_batch, read_bounds, read_pages, read_requests
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, UncountedTokens
from lab.references.errors import Truth
from lab.workloads.inputs.draft_lists import DraftListsCase
from lab.workloads.inputs.guards import copied_together

# The parameters of each function whose default is None
OPTIONAL = {call: {each.name for each in fields(made) if each.default is None} for call, made in CALL_TYPES.items()}
MOST_VALUE = 2**30  # to which values of an output are limited
FAR_ELEMENTS = 2**31  # the first offset in elements that overflows int32
# Features that are read from a case's field of this name, or else from the case's `model`.
SIZES = ("head_dim", "v_head_dim", "num_kv_heads", "num_qo_heads", "group")  # of a problem, too
COPIED = (*REMEMBERED, "bmm1_scale_log2")  # arguments that are compared with those of earlier calls
OF_TENSORS = ("kv_dtype", "dtype", "kv_layout", *SIZES)


@dataclass(frozen=True)
class CallFeatures:
    """The features (named properties such as `kv_len`) of one call as a whole, and of each of its requests."""

    features: Features = field(default_factory=dict, hash=False)  # of the whole call
    of_requests: tuple[Features, ...] = field(default=(), hash=False)
    q_lens: tuple[int, ...] = ()  # query rows of each request
    # features of the entries that each request selects
    selections: tuple[Features, ...] = field(default=(), hash=False)

    def of_pass(self, of_case: "CallFeatures") -> "CallFeatures":
        """Return these features, updated by those of the forward pass `of_case`. Features of selected K/V entries are kept."""
        lengths = of_case if of_case.of_requests else self
        same = self.q_lens[: len(lengths.q_lens)] == lengths.q_lens
        selections = self.selections if same else ({},) * len(lengths.q_lens)
        of_requests = tuple({**own, **entries} for own, entries in zip(lengths.of_requests, selections, strict=False))
        return replace(lengths, features={**self.features, **of_case.features}, of_requests=of_requests)

    def with_values(self, truth: Truth) -> "CallFeatures":
        """Return these features, with those of each request's expected output, and of its LSE in base 2."""
        if len(truth.expected) != sum(self.q_lens) or len(self.of_requests) != len(self.q_lens):
            return self
        largest, lse = truth.expected.abs().flatten(1).amax(dim=1), truth.lse_log2.nan_to_num(neginf=0.0)
        values = torch.stack([largest, lse.amax(dim=1), -lse.amin(dim=1)]).nan_to_num().clamp(0, MOST_VALUE).ceil()
        names = ("largest_output", "lse_above_zero", "lse_below_zero")
        read = (
            dict(zip(names, of_rows.amax(dim=1).tolist(), strict=True)) if of_rows.numel() else {}
            for of_rows in values.int().cpu().split(list(self.q_lens), dim=1)
        )
        return replace(self, of_requests=tuple(map(operator.or_, self.of_requests, read)))

    @classmethod
    def of_lengths(
        cls,
        features: Features,
        kv_lens: Sequence[int],
        q_lens: Sequence[int],
        window_left: int = -1,
        page_size: int = TILE,
        selections: Sequence[Read] = (),  # the features of the entries that each request selects
    ) -> "CallFeatures":
        """Return `features` plus those that follow from the lengths, such as `kv_len`. Without pages, `page_size` is `TILE`."""
        batch = read_batch(kv_lens, q_lens, page_size, window_left)
        read = read_requests(kv_lens, q_lens, page_size, window_left, features)
        selected = tuple(map(kept, selections)) or ({},) * len(q_lens)
        of_requests = tuple(kept(each | entries) for each, entries in zip(read, selected, strict=True))
        return cls({**features, **kept(batch)}, of_requests, tuple(q_lens), selected)


def kept(read: Read) -> dict[str, Value]:
    """Convert the values of features to bool, int or str. Features that are None or False are left out."""
    return {name: plain for name, value in read.items() if (plain := _plain(value)) is not None and plain is not False}


def _plain(value: Any) -> Value | None:
    if type(value) in (bool, int, str):  # the usual case, first for speed
        return value
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value).removeprefix("torch."))
    if isinstance(value, dict):
        held = set(map(_plain, value.values()))
        return held.pop() if len(held) == 1 else "mixed"
    return bool(value) if isinstance(value, Tensor) else None


def features_of_case(case: Any) -> CallFeatures:
    """Return the features of a case: of its fields, its forward mode, its batch and each request."""
    given = dict(_fields(case))
    for name in given.keys() - FEATURES.keys():
        feature_named(name)
    model = getattr(case, "model", None)
    read = given | {"function": getattr(case, "interface", None)}
    read |= {name: getattr(case, name, getattr(model, name, given.get(name))) for name in OF_TENSORS}
    read |= {"sinks": bool(getattr(case, "sinks", getattr(model, "has_sinks", False)))}
    read |= _read_mode(given) | {f"{name}={value}": True for name, value in getattr(case, "non_default", {}).items()}
    kv_lens = getattr(case, "kv_lens", getattr(case, "lens", None))
    if kv_lens is None:
        return CallFeatures(kept(read))
    q_lens = getattr(case, "q_lens", (0,) * len(kv_lens))
    of_storage = {name: getattr(case, name) for name in ("page_size", "window_left") if hasattr(case, name)}
    if "num_steps" in given:
        read |= _read_draft(case)
    elif read.get("leaves_out_tokens") and hasattr(case, "prefix_lens"):
        read["uncounted_reach_page"] = _reach_page(case.prefix_lens, kv_lens, case.page_size)
    if "mode" in given and "page_size" in of_storage:
        most = max(q_lens, default=0)
        padded_lens = [kv_len + most - q_len for kv_len, q_len in zip(kv_lens, q_lens, strict=True)]
        read["padding_reaches_page"] = _reach_page(kv_lens, padded_lens, case.page_size)
    return CallFeatures.of_lengths(kept(read), kv_lens, q_lens, **of_storage)


def _reach_page(lens: Sequence[int], longer_lens: Sequence[int], page_size: int) -> bool:
    pairs = zip(lens, longer_lens, strict=True)
    return any(-(-longer // page_size) != -(-length // page_size) for length, longer in pairs)


def _read_draft(case: DraftListsCase) -> Read:
    page_size, steps, kept_tokens = case.page_size, case.num_steps, case.window_size + case.sink_size
    tails = [kv_len % page_size for kv_len in case.lens if page_size > 1]  # tokens in the last page
    return {
        "steps_fill_pages": any((tail + steps) % page_size == 0 for tail in tails),
        "steps_reach_page": any(-(-(tail + steps) // page_size) > -(-steps // page_size) for tail in tails),
        "shorter_than_window": case.window_size > 0 and any(0 < kv_len < kept_tokens for kv_len in case.lens),
        "window_meets_sinks": case.window_size > 0 and any(case.window_size < each < kept_tokens for each in case.lens),
    }


def _fields(case: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(case) if is_dataclass(case) else ():
        value = getattr(case, each.name)
        if is_dataclass(value):
            yield from _fields(value)
        elif each.name not in NO_FEATURES + LENGTHS:
            yield each.name, value


def _read_mode(given: Read) -> Read:
    if (mode := next((each for each in given.values() if isinstance(each, ForwardMode)), None)) is None:
        return {}
    uncounted = mode.uncounted
    if uncounted is UncountedTokens.DRAFT_STEP and given.get("draft_step") in (None, FROZEN_KV_STEP):
        uncounted = UncountedTokens.NONE  # the first token of a draft, or a step whose K and V are frozen
    return {
        "leaves_out_tokens": uncounted is not UncountedTokens.NONE,
        "uncounted": uncounted,
        "query_rows": mode.query_rows,
        "extends_draft": mode.extends_draft,
        "prefill": mode.is_prefill,
    }


def _read_call(
    interface: AttentionCall,
    arguments: Mapping[str, Any],
    problem: Problem,
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
) -> Read:
    query, sinks = problem.query, problem.sinks
    sizes = {name: getattr(problem, name) for name in SIZES}
    padding_rows, required = problem.num_rows - sum(q_lens), problem.features()
    bmm1_scale, bmm2_scale = float(problem.bmm1_scale), float(problem.bmm2_scale)
    share = problem.num_rows / max(len(q_lens), 1)
    read: Read = {
        "function": interface,
        "dtype": query.dtype,
        **sizes,
        "qk_rope_head_dim": arguments.get("qk_rope_head_dim"),
        "padding_rows": padding_rows > 0,
        "padding_fills_bound": padding_rows > 0 and problem.num_rows == problem.batch_size * problem.max_q_len,
        "uneven_shares": share == int(share) > min(q_lens, default=math.inf),
        "sinks": sinks is not None,
        "sinks_list": isinstance(arguments.get("sinks"), list | tuple),
        "bmm1_scale_1": bmm1_scale == 1,
        "bmm1_scale_unusual": not math.isclose(bmm1_scale, sizes["head_dim"] ** -0.5, rel_tol=1e-6),
        "bmm2_scale_not_1": bmm2_scale != 1,
        "bmm2_scale_no_power_of_2": abs(math.frexp(bmm2_scale)[0]) != 0.5,
        "rank": arguments.get("cp_rank"),
        "ranks": arguments.get("cp_world"),
        **{f"{name}_not_1": arguments.get(name) not in (None, 1) for name in ("o_scale", "o_sf_scale")},
        "transform_mode": arguments.get("bf16q_fp8kv_transform_mode"),
        "cute_dsl_impl": arguments.get("cute_dsl_impl"),
        "not_causal": not problem.causal,
        **{f"{name}_given": name in OPTIONAL[interface] and arguments.get(name) is not None for name in GIVEN},
        "return_lse": problem.return_lse,
        "lse_base_e": interface is AttentionCall.MLA_DECODE and lse_is_base_e(arguments),
        "out_dtype": problem.out_dtype,
        "other_out_dtype": problem.out_dtype != (torch.bfloat16 if interface in LATENT_CALLS else query.dtype),
        "seq_lens_uint32": problem.seq_lens.dtype == torch.uint32,
        "lse_of_three_axes": getattr(arguments.get("lse"), "ndim", 0) == 3,
        "sage_rows": arguments.get("num_elts_per_sage_attn_blk", (0,))[0] or None,
        "sage_keys": arguments.get("num_elts_per_sage_attn_blk", (0, 0))[1] or None,
        "host_lengths": getattr(arguments.get("q_seq_lens_cpu"), "dtype", None),
        "used_scratch": _used_scratch(arguments, query.device),
        **{name: Feature[name.upper()] in required for name in OF_PROBLEM},
    }
    for name, scale, large in (("bmm1_scale", bmm1_scale, 1), ("bmm2_scale", bmm2_scale, 100)):
        read[f"{name}_tensor"] = isinstance(arguments.get(name), Tensor)
        read[f"{name}_negative"], read[f"{name}_large"] = scale < 0, abs(scale) > large
        read[f"{name}_small"] = abs(scale) < SMALL_SCALE
    read |= {name: getattr(problem, name) for name in ("max_q_len", "max_kv_len")}
    for name in ("query", "key", "value", "lse", "block_tables"):
        given = arguments.get(name)
        read[f"{name}_gaps"] = given is not None and not given.is_contiguous()
        if name in ("query", "key", "value"):
            read[f"{name}_stride"] = None if given is None else given.stride(0)
            read[f"{name}_heads_apart"] = (
                given is not None and given.shape[-2] > 1 and given.stride(-2) != given.shape[-1]
            )
        read[f"{name}_far"] = given is not None and (len(given) - 1) * given.stride(0) >= FAR_ELEMENTS
    if sinks is not None:
        values = sinks.cpu()  # one wait for a GPU instead of three
        read["some_inf_sink"], read["all_inf_sinks"] = (values == -math.inf).any(), (values == -math.inf).all()
        read["large_sink"] = (values > 8).any()
    if isinstance(problem, PagedAttention):
        read |= _read_pages(interface, arguments, problem)
    return read


def _read_pages(interface: AttentionCall, arguments: Mapping[str, Any], problem: PagedAttention) -> Read:
    is_mla = interface is AttentionCall.MLA_DECODE
    k_cache, table, mask = problem.k_cache, problem.k_block_tables.cpu().flatten(0, -2), problem.mask
    num_pages, _, page_size, _ = k_cache.shape
    read: Read = {
        "kv_dtype": k_cache.dtype,
        "kv_layout": "MLA" if is_mla else arguments.get("kv_layout", "HND"),
        "one_cache_tensor": not is_mla and isinstance(arguments.get("kv_cache"), Tensor),
        "page_gaps": _lie_apart(k_cache),
        "gaps_in_pages": max(map(operator.mul, k_cache.shape[1:], k_cache.stride()[1:])) > k_cache.shape[1:].numel(),
        "scale_factor_gaps": problem.k_scale_factors is not None and _lie_apart(problem.k_scale_factors),
        "other_factor_strides": any(
            sizes is not None and _strides(cache, 1) != _strides(sizes, 8)  # a byte has 2 elements, a factor is of 16
            for cache, sizes in ((k_cache, problem.k_scale_factors), (problem.v_cache, problem.v_scale_factors))
        ),
        "one_factor_tensor": isinstance(arguments.get("kv_cache_sf"), Tensor),
        "one_first_page": len(table) > 1 and table.numel() > 0 and (table[:, 0] == table[0, 0]).all(),
        "one_table": len(table) > 1 and table.numel() > 0 and (table == table[0]).all(),
        "other_page_size": getattr(problem, "window_cache", k_cache).shape[2] != page_size,
        "head_lengths_differ": problem.seq_lens.dim() == 2 and (problem.seq_lens != problem.seq_lens[0]).any(),
        "page_elements": page_size * problem.query.shape[2],
        "table_columns": table.shape[1],
        "table_beyond_bound": table.shape[1] > -(-problem.max_kv_len // page_size),
        "pool_pages": num_pages,
        "pool_elements": k_cache.stride(0) * num_pages,
    }
    if problem.selected is not None:
        read |= {
            "top_k": problem.selected.shape[1] if is_mla else None,
            "selects_entries": True,
            "top_k_lens": is_mla and problem.selected_lens is not None,
            "first_slot": (problem.columns_in_use() & (problem.selected == 0)).any(),
        }
    if mask is not None:
        shown = shown_draft_tokens(mask.cpu().to(torch.int32))
        read |= {
            "mask": True,
            "mask_not_causal": not torch.equal(shown, torch.ones_like(shown).tril()),
            "masks_differ": (shown != shown[:1]).any(),
            "mask_words": mask.shape[2],
            "odd_mask_words": mask.shape[0] * mask.shape[1] > 1 and -(-mask.shape[1] // 16) % 2 == 1,
        }
    return read


def _strides(pool: Tensor, unit: int) -> list[int]:
    return [unit * stride for size, stride in zip(pool.shape[:-1], pool.stride(), strict=False) if size > 1]


def _lie_apart(pool: Tensor) -> bool:
    return pool.stride(0) > pool.shape[1:].numel()


def _used_scratch(arguments: Mapping[str, Any], device: torch.device) -> bool:
    if (workspace := arguments.get("workspace_buffer")) is None:
        return False
    data = workspace.flatten().view(torch.uint8)
    has_counts, is_used = torch.stack([data[:64].any(), data[SEMAPHORE_BYTES:][:64].any()]).bool().tolist()
    return is_used or (has_counts and not counts_in_workspace(arguments.get("backend", "auto"), device))


class CallLog:
    """The earlier attention calls of one case. A new call is compared with these calls."""

    def __init__(self) -> None:
        self._lens: list[list[int]] = []  # seq_lens of each call
        self._first_of_shapes: dict[Any, tuple[dict[str, Any], list[int]]] = {}
        # Weak references: a tensor must be freed as in an engine, so that a later tensor can get its address.
        self._versions: dict[tuple[str, int, torch.Size], tuple[weakref.ref[Tensor], int, list[Any]]] = {}

    def read(self, arguments: Mapping[str, Any]) -> Read:
        """Record a call, and return features that compare it with earlier calls, such as "longer_request"."""
        given = dict(arguments) | {"sinks": arguments.get("sinks", arguments.get("attention_sinks"))}
        on_gpu = {name: given[name] for name in COPIED if getattr(given.get(name), "is_cuda", False)}
        on_host = given | (copied_together(on_gpu) if on_gpu else {})
        now = {name: _comparable(on_host.get(name)) for name in REMEMBERED}
        if (log2 := given.get("bmm1_scale_log2")) is not None:
            given["bmm1_scale"] = log2
            now["bmm1_scale"] = "in bmm1_scale_log2", _comparable(on_host["bmm1_scale_log2"])
        cache = given.get("kv_cache", given.get("key"))
        given["kv_cache"] = cache[0] if isinstance(cache, tuple) else cache
        shapes = tuple(tuple(given[name].shape) for name in ("query", "seq_lens"))
        lens = on_host["seq_lens"].flatten().tolist()
        first, first_lens = self._first_of_shapes.setdefault(shapes, (now, lens))
        read: Read = {
            "later_call": len(self._lens) > 0,
            "fewer_requests": any(len(lens) < len(each) for each in self._lens),
            "same_seq_lens": lens in self._lens[-1:],
            "calls_before": len(self._lens),
            "longer_request": any(map(operator.gt, lens, first_lens)),
            "shorter_request": any(any(map(operator.lt, lens, each)) for each in self._lens),
            **{f"other_{name}": value != first[name] for name, value in now.items()},
            **{f"written_{name}": self._was_written(name, given.get(name), now.get(name)) for name in WATCHED},
        }
        self._lens.append(lens)
        return read

    def _was_written(self, name: str, tensor: Any, values: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        key = name, tensor.data_ptr(), tensor.shape
        if key not in self._versions or self._versions[key][0]() is None:
            self._versions[key] = weakref.ref(tensor), tensor._version, []
        _, version, seen = self._versions[key]
        if values is None:
            return tensor._version > version
        seen += [values] * (values not in seen)
        return len(seen) > 1


def _comparable(value: Any) -> Any:
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(f"{float(value):.5g}")
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value.cpu().to(torch.float64).flatten().tolist() if isinstance(value, Tensor) else value


def features_of_call(
    interface: AttentionCall, arguments: Mapping[str, Any], log: CallLog, around: Read | None = None
) -> CallFeatures:
    """Record a call that is about to be made in `log`, and return its features: named properties, such as `kv_len`, from which
    rules about wrong results are made. Add the features `around`, which the test case of the call has.

    If the arguments are invalid, return only `around` and the features that compare the call with earlier calls of `log`.
    """
    earlier, of_case = log.read(arguments), kept(around or {})
    try:
        problem = CALL_TYPES[interface](**arguments).problem()
    except (TypeError, ValueError, NotImplementedError):
        return CallFeatures({**of_case, **kept(earlier)})
    kv_lens, q_lens = problem.kv_lens(), problem.q_lens()
    page_size, pages = TILE, list[Read]()
    if isinstance(problem, PagedAttention):
        page_size = problem.page_size
        pages = read_pages(problem, kv_lens, page_size)
    bounds = [*read_bounds(problem, kv_lens, q_lens)]
    of_requests = list(map(operator.or_, bounds, pages or [Read()] * len(q_lens)))
    read = _read_call(interface, arguments, problem, kv_lens, q_lens)
    read = {name: read[name] for name in FEATURES if name in read} | earlier
    return CallFeatures.of_lengths(
        of_case | kept(read), kv_lens, q_lens, arguments.get("window_left", -1), page_size, of_requests
    )
