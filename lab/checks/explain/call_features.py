"""Read the features of an attention call from its arguments and from the earlier calls of its case."""

import math
import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, Feature, PagedAttention, Problem
from lab.calls.mla_decode import lse_is_base_e
from lab.calls.problem import LATENT_CALLS, AttentionCall, shown_draft_tokens
from lab.calls.workspace import SEMAPHORE_BYTES, counts_in_workspace
from lab.checks.explain.batch_features import EMPTY_COLUMNS, POWER_OF_2, TILE, CallFeatures, Read, kept
from lab.checks.explain.feature import CaseFeature, Choice, Condition, Cost, Number

SMALL_SCALE = 0.001
FAR_ELEMENTS = 2**31  # more than 32 bits with a sign count

# Of a call, and of a case whose tensors have them.
OF_TENSORS: dict[str, CaseFeature] = {
    "function": Choice("the function", Cost.VALUE),
    "kv_dtype": Choice("the cache's dtype", Cost.VALUE),
    "dtype": Choice("the query's dtype", Cost.VALUE),
    "kv_layout": Choice("the cache's layout", Cost.VALUE),
    "head_dim": Number("head_dim is {}", Cost.VALUE),
    "v_head_dim": Number("v_head_dim is {}", Cost.VALUE),
    "num_kv_heads": Number("num_kv_heads is {}", Cost.VALUE, several="there are several K/V heads"),
    "num_qo_heads": Number("num_qo_heads is {}", Cost.DERIVED),
    "group": Number("the number of query heads per K/V head is {}", Cost.VALUE),
    "group_no_power_of_2": Condition(f"the number of query heads per K/V head is {POWER_OF_2}", Cost.VALUE),
    "sinks": Condition("{sinks|no sinks} are given"),
}
OF_CALL: dict[str, CaseFeature] = {
    "mask": Condition("{a|no} draft mask is given"),
    "mask_not_causal": Condition("{a|no} draft mask is given that is not causal", Cost.VALUE),
    "masks_differ": Condition("requests have {different masks|one mask}", Cost.VALUE),
    "mask_words": Number("the number of 16-bit words in a mask's row is {}", Cost.DERIVED),
    "sinks_list": Condition("sinks are {|not }given in a list"),
    "some_inf_sink": Condition("{a|no} sink is minus infinity", Cost.VALUE),
    "all_inf_sinks": Condition("{every|not every} sink is minus infinity", Cost.VALUE),
    "large_sink": Condition("{a|no} sink is larger than 8", Cost.DERIVED),
    "bmm1_scale_tensor": Condition("bmm1_scale is a {tensor|number}"),
    "bmm2_scale_tensor": Condition("bmm2_scale is a {tensor|number}"),
    "bmm1_scale_negative": Condition("bmm1_scale is {|not }negative"),
    "bmm2_scale_negative": Condition("bmm2_scale is {|not }negative"),
    "bmm1_scale_log2_given": Condition("bmm1_scale_log2 is {|not }given"),
    "bmm1_scale_1": Condition("bmm1_scale is {|not }1", Cost.VALUE),
    "bmm1_scale_large": Condition("the absolute value of bmm1_scale is {|not }above 1", Cost.VALUE),
    "bmm2_scale_large": Condition("the absolute value of bmm2_scale is {|not }above 100", Cost.VALUE),
    "bmm1_scale_small": Condition(f"the absolute value of bmm1_scale is {{|not }}below {SMALL_SCALE}", Cost.VALUE),
    "bmm2_scale_small": Condition(f"the absolute value of bmm2_scale is {{|not }}below {SMALL_SCALE}", Cost.VALUE),
    "bmm1_scale_unusual": Condition("bmm1_scale is {not |}1 / sqrt(head_dim)", Cost.VALUE),
    "bmm2_scale_not_1": Condition("bmm2_scale is {not |}1"),
    "bmm2_scale_no_power_of_2": Condition(f"bmm2_scale is {POWER_OF_2}", Cost.VALUE),
    "skip_softmax": Condition("parts of the softmax {may|may not} be left out", Cost.VALUE),
    "rank": Number("cp_rank is {}", Cost.VALUE),
    "ranks": Number("cp_world is {}", Cost.VALUE),
    "rank_keys": Condition("the keys are {one rank's|all keys}"),
    "o_scale_not_1": Condition("o_scale is {not |}1"),
    "transform_mode": Choice("bf16q_fp8kv_transform_mode"),
    "cute_dsl_impl": Choice("cute_dsl_impl"),
    "cum_seq_lens_q_given": Condition("cum_seq_lens_q is {|not }given"),
    "top_k": Number("sparse_mla_top_k is {}", Cost.VALUE),
    "selects_entries": Condition("rows select {entries|no entries}"),
    "top_k_lens": Condition("sparse_mla_top_k_lens is {|not }given"),
    "first_slot": Condition("the pool's first slot is {|not }selected", Cost.VALUE),
    "not_causal": Condition("the call is {not |}causal"),
    "out_given": Condition("out is {|not }given"),
    "lse_given": Condition("lse is {|not }given"),
    "return_lse": Condition("the LSE is {|not }requested"),
    "lse_base_e": Condition("the LSE is {|not }requested in base e"),
    "out_dtype": Choice("the output's dtype", Cost.DERIVED),
    "other_out_dtype": Condition("the output's dtype is {not |}the query's"),
    "seq_lens_uint32": Condition("seq_lens is {uint32|int32}"),
    "host_lengths": Choice("the dtype of the lengths on the host"),
    "one_cache_tensor": Condition("kv_cache is {one tensor|two tensors}"),
    "separate_tables": Condition("V has {a|no} page table of its own"),
    "block_sparse": Condition("K/V heads select {pages of their own|no pages}"),
    "head_lengths_differ": Condition("K/V heads select {different numbers of keys|equally many keys}", Cost.VALUE),
    "other_v_strides": Condition("K and V have {different|equal} strides", Cost.VALUE),
    "value_gaps": Condition("the values {do not |}lie next to each other", Cost.VALUE),
    "lse_gaps": Condition("the rows of the given lse {do not |}lie next to each other", Cost.VALUE),
    "query_gaps": Condition("the query's rows {do not |}lie next to each other", Cost.VALUE),
    "key_gaps": Condition("the keys {do not |}lie next to each other", Cost.VALUE),
    "block_tables_gaps": Condition("the rows of block_tables {do not |}lie next to each other", Cost.VALUE),
    "query_far": Condition(
        "the first and last row of the query lie {2**31 or more|fewer than 2**31} elements apart", Cost.VALUE
    ),
    "lse_far": Condition(
        "the first and last row of the given lse lie {2**31 or more|fewer than 2**31} elements apart", Cost.VALUE
    ),
    "block_tables_far": Condition(
        "the first and last row of block_tables lie {2**31 or more|fewer than 2**31} elements apart", Cost.VALUE
    ),
    "page_gaps": Condition("pages {do not |}lie next to each other", Cost.VALUE),
    "scale_factor_gaps": Condition("pages of scale factors {do not |}lie next to each other", Cost.VALUE),
    "one_first_page": Condition("all requests {|do not }share their first page", Cost.VALUE),
    "page_size_is_num_kv_heads": Condition("a page has {|not }as many tokens as K/V heads", Cost.VALUE),
    "table_columns": Number("the number of columns of the page table is {}", Cost.DERIVED),
    "pool_pages": Number("the number of pages in the pool is {}", Cost.DERIVED),
    "pool_elements": Number("the number of elements in the pool is {}", Cost.DERIVED),
    "used_scratch": Condition("the workspace's scratch is {not |}zero", Cost.DERIVED),
}


def _read_call(interface: AttentionCall, arguments: Mapping[str, Any], problem: Problem) -> Read:
    """Return the features of a call's arguments, such as dtypes and scales; for a paged call also features of its pages."""
    query, sinks, options = problem.query, problem.sinks, problem.features()
    (_, num_qo_heads, head_dim), num_kv_heads, v_head_dim = query.shape, problem.num_kv_heads, problem.v_head_dim
    group = num_qo_heads // max(num_kv_heads, 1)
    bmm1_scale, bmm2_scale = float(problem.bmm1_scale), float(problem.bmm2_scale)
    read: Read = {
        "function": interface,
        "dtype": query.dtype,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "num_kv_heads": num_kv_heads,
        "num_qo_heads": num_qo_heads,
        "group": group,
        "group_no_power_of_2": group & (group - 1) > 0,
        "sinks": sinks is not None,
        "sinks_list": isinstance(arguments.get("sinks"), list | tuple),
        "bmm1_scale_tensor": isinstance(arguments.get("bmm1_scale"), Tensor),
        "bmm2_scale_tensor": isinstance(arguments.get("bmm2_scale"), Tensor),
        "bmm1_scale_negative": bmm1_scale < 0,
        "bmm2_scale_negative": bmm2_scale < 0,
        "bmm1_scale_log2_given": arguments.get("bmm1_scale_log2") is not None,
        "bmm1_scale_1": bmm1_scale == 1,
        "bmm1_scale_large": abs(bmm1_scale) > 1,
        "bmm2_scale_large": abs(bmm2_scale) > 100,
        "bmm1_scale_small": abs(bmm1_scale) < SMALL_SCALE,
        "bmm2_scale_small": abs(bmm2_scale) < SMALL_SCALE,
        "bmm1_scale_unusual": not math.isclose(bmm1_scale, head_dim**-0.5, rel_tol=1e-6),
        "bmm2_scale_not_1": bmm2_scale != 1,
        "bmm2_scale_no_power_of_2": abs(math.frexp(bmm2_scale)[0]) != 0.5,
        "skip_softmax": Feature.SKIP_SOFTMAX in options,
        "rank": arguments.get("cp_rank"),
        "ranks": arguments.get("cp_world"),
        "rank_keys": Feature.RANK_KEYS in options,
        "o_scale_not_1": arguments.get("o_scale") not in (None, 1),
        "transform_mode": arguments.get("bf16q_fp8kv_transform_mode"),
        "cute_dsl_impl": arguments.get("cute_dsl_impl"),
        # Of calls that can do without.
        "cum_seq_lens_q_given": CALL_TYPES[interface].__dataclass_fields__["cum_seq_lens_q"].default is None
        and problem.cu_seqlens_q is not None,
        "not_causal": not problem.causal,
        "out_given": arguments.get("out") is not None,
        "lse_given": arguments.get("lse") is not None,
        "return_lse": problem.return_lse,
        "lse_base_e": interface is AttentionCall.MLA_DECODE and lse_is_base_e(arguments),
        "out_dtype": problem.out_dtype,
        "other_out_dtype": problem.out_dtype != (torch.bfloat16 if interface in LATENT_CALLS else query.dtype),
        "seq_lens_uint32": problem.seq_lens.dtype == torch.uint32,
        "host_lengths": getattr(arguments.get("q_seq_lens_cpu"), "dtype", None),
        "separate_tables": Feature.SEPARATE_TABLES in options,
        "block_sparse": Feature.BLOCK_SPARSE in options,
        "other_v_strides": Feature.OTHER_V_STRIDES in options,
        "used_scratch": _used_scratch(arguments, query.device),
    }
    for name in ("query", "key", "value", "lse", "block_tables"):
        given = arguments.get(name)
        read[f"{name}_gaps"] = given is not None and not given.is_contiguous()
    for name in ("query", "lse", "block_tables"):
        given = arguments.get(name)
        read[f"{name}_far"] = given is not None and (len(given) - 1) * given.stride(0) >= FAR_ELEMENTS
    if sinks is not None:
        read["some_inf_sink"], read["all_inf_sinks"] = (sinks == -math.inf).any(), (sinks == -math.inf).all()
        read["large_sink"] = (sinks > 8).any()
    if isinstance(problem, PagedAttention):
        read |= _read_pages(interface, arguments, problem)
    return read


def _read_pages(interface: AttentionCall, arguments: Mapping[str, Any], problem: PagedAttention) -> Read:
    """Return the features of a paged call's cache (dtype, layout, gaps), page table and draft mask."""
    is_mla = interface is AttentionCall.MLA_DECODE
    k_cache, table, mask = problem.k_cache, problem.k_block_tables.flatten(0, -2), problem.mask
    num_pages, num_kv_heads, page_size, _ = k_cache.shape
    read: Read = {
        "kv_dtype": k_cache.dtype,
        "kv_layout": "MLA" if is_mla else arguments.get("kv_layout", "HND"),
        "one_cache_tensor": not is_mla and isinstance(arguments.get("kv_cache"), Tensor),
        "page_gaps": _lie_apart(k_cache),
        "scale_factor_gaps": problem.k_scale_factors is not None and _lie_apart(problem.k_scale_factors),
        "one_first_page": len(table) > 1 and table.numel() > 0 and (table[:, 0] == table[0, 0]).all(),
        "page_size_is_num_kv_heads": "kv_cache" in arguments and not is_mla and page_size == num_kv_heads,
        "head_lengths_differ": problem.seq_lens.dim() == 2 and (problem.seq_lens != problem.seq_lens[0]).any(),
        "table_columns": table.shape[1],
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
        }
    return read


def _read_selections(problem: PagedAttention) -> list[Read]:
    """Return the features of the entries that each request's rows select."""
    if problem.selected is None:
        return []
    used = problem.columns_in_use().cpu()
    selected = problem.selected.cpu().where(used, 0)
    found: list[Read] = []
    for start, end in pairwise(problem.row_offsets()):
        is_gap, is_used = selected[start:end] < 0, used[start:end]
        is_entry = is_used & ~is_gap
        counts = is_entry.sum(dim=1)
        before = is_entry.flip(1).cumsum(1).flip(1) > 0  # columns before a row's last entry, and the entry itself
        highest = selected[start:end].cummax(1).values
        found.append(
            {
                "no_entry": (counts == 0).any(),
                "empty_tile": (~is_entry[:, :EMPTY_COLUMNS].any(dim=1)).any(),
                "gap": is_gap.any(),
                "gap_before_entry": (is_gap & before).any(),
                "unordered_entries": (is_entry & (selected[start:end] < highest)).any(),
                "num_entries": int(counts.max()) if len(counts) else None,
            }
        )
    return found


def _lie_apart(pool: Tensor) -> bool:
    """Return True if there are gaps between the pages of a pool."""
    return pool.stride(0) > pool.shape[1:].numel()


def _used_scratch(arguments: Mapping[str, Any], device: torch.device) -> bool:
    """Return True if the workspace's scratch does not begin with zeros, so that an earlier call has probably used it."""
    workspace = arguments.get("workspace_buffer")
    if workspace is None:
        return False
    data = workspace.flatten().view(torch.uint8)
    if data[SEMAPHORE_BYTES:][:64].any():
        return True
    return bool(data[:64].any()) and not counts_in_workspace(arguments.get("backend", "auto"), device)


# Arguments whose values are compared with those of the first call of the same shapes, and tensors whose writes are noted: each
# with the beginning of a text.
REMEMBERED = {
    "bmm1_scale": "bmm1_scale was",
    "bmm2_scale": "bmm2_scale was",
    "window_left": "window_left was",
    "sinks": "sinks were",
    "mask": "the mask was",
    "seq_lens": "seq_lens were",
    "cum_seq_lens_q": "cum_seq_lens_q was",
    "block_tables": "the page table was",
}
WATCHED = {
    "query": "the query was",
    "seq_lens": "seq_lens were",
    "block_tables": "the page table was",
    "cum_seq_lens_q": "cum_seq_lens_q was",
    "bmm1_scale": "bmm1_scale was",
    "bmm2_scale": "bmm2_scale was",
    "sinks": "the sinks were",
    "mask": "the mask was",
    "kv_cache": "the cache was",
    "workspace_buffer": "the workspace was",
}
OF_EARLIER: dict[str, CaseFeature] = {
    "later_call": Condition("a call is {not |}the first of its case", Cost.DERIVED),
    "calls_before": Number("the number of earlier calls is {}", Cost.SETTING),
    "longer_request": Condition("{a|no} request is longer than in the first call of these shapes", Cost.DERIVED),
    **{
        f"other_{name}": Condition(f"{text} {{different|the same}} in the first call of these shapes", Cost.DERIVED)
        for name, text in REMEMBERED.items()
    },
    **{
        f"written_{name}": Condition(f"{text} {{|not }}written since an earlier call", Cost.DERIVED)
        for name, text in WATCHED.items()
    },
}


class CallLog:
    """Remembers the attention calls of one case, so that a call can be compared with earlier ones."""

    def __init__(self) -> None:
        self._calls = 0
        self._first_of_shapes: dict[Any, dict[str, Any]] = {}
        # Not the tensors themselves: a later call's must be free to get the address of one that is gone, as an engine's do.
        self._versions: dict[tuple[str, int], tuple[weakref.ref[Tensor], int]] = {}

    def read(self, arguments: Mapping[str, Any]) -> Read:
        """Record a call, and return the features that compare it with earlier calls: which arguments differ from those of the
        first call with these shapes, and which tensors were written since an earlier call.
        """
        given = dict(arguments) | {"sinks": arguments.get("sinks", arguments.get("attention_sinks"))}
        now = {name: _comparable(given.get(name)) for name in REMEMBERED}
        if given.get("bmm1_scale_log2") is not None:
            given["bmm1_scale"], now["bmm1_scale"] = given["bmm1_scale_log2"], "in bmm1_scale_log2"
        cache = given.get("kv_cache", given.get("key"))
        given["kv_cache"] = cache[0] if isinstance(cache, tuple) else cache
        shapes = tuple(tuple(given[name].shape) for name in ("query", "seq_lens"))
        first = self._first_of_shapes.setdefault(shapes, now)
        lengths = [
            each["seq_lens"] if isinstance(each["seq_lens"], list) else [each["seq_lens"]] for each in (now, first)
        ]
        read: Read = {
            "later_call": self._calls > 0,
            "calls_before": self._calls,
            "longer_request": any(later > earlier for later, earlier in zip(*lengths, strict=True)),
            **{f"other_{name}": value != first[name] for name, value in now.items()},
            **{f"written_{name}": self._was_written(name, given.get(name)) for name in WATCHED},
        }
        self._calls += 1
        return read

    def _was_written(self, name: str, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        key = name, tensor.data_ptr()
        seen, version = self._versions.get(key, (None, tensor._version))
        if seen is None or seen() is None:
            version = tensor._version
            self._versions[key] = weakref.ref(tensor), version
        return tensor._version > version


def _comparable(value: Any) -> Any:
    """Return an argument's value as plain numbers, so that values of two calls can be compared. A number, and a tensor with
    only this number, give the same result.
    """
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(f"{float(value):.5g}")
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value.cpu().to(torch.float64).flatten().tolist() if isinstance(value, Tensor) else value


def features_of_call(
    interface: AttentionCall, arguments: Mapping[str, Any], log: CallLog, around: Read | None = None
) -> CallFeatures:
    """Return the features of an attention call that will be made, and record the call in `log`. Lengths are copied from the
    device. The features in `around`, of the case, come first; the call's own replace them.

    If `lab.calls` refuses the arguments, the only features of the call are those that compare it with earlier ones.
    """
    earlier = log.read(arguments)
    try:
        problem = CALL_TYPES[interface](**arguments).problem()
    except (TypeError, ValueError, NotImplementedError):
        read = (around or {}) | earlier
        return CallFeatures(kept(read, read))
    kv_lens, offsets = problem.kv_lens(), problem.row_offsets()
    page_size = problem.page_size if isinstance(problem, PagedAttention) else TILE
    read = _read_call(interface, arguments, problem)
    read = {name: read.get(name) for name in OF_TENSORS | OF_CALL} | earlier
    q_lens = [after - before for before, after in pairwise(offsets)]
    selections = _read_selections(problem) if isinstance(problem, PagedAttention) else []
    window_left = arguments.get("window_left", -1)
    return CallFeatures.of_lengths(read, kv_lens, q_lens, page_size, window_left, around, selections)
