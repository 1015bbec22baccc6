"""Facts: plain values that say what a result came from, of the case and of the arguments of its call.

A fact that a result does not have is left out. A boolean one is named by what is then true, as `FACTS` says it; it is left out
where it is false. Facts are of a call or of one request in it.
"""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.calls.workspace import counts_in_workspace, semaphores_and_scratch
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, UncountedTokens
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface

Fact = bool | int | str
Facts = Mapping[str, Fact]

TILE = 64  # keys that kernels take at a time
LONG_TILE = 512
LONGER = "a request is longer than in the first call of these shapes"
UNSHOWN = ("seed", "page_seed", "kv_lens", "q_lens", "prefix_lens", "lens")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3: "e4m3", NVFP4: "nvfp4"}


@dataclass(frozen=True)
class CallFacts:
    """The facts of one call.

    Attributes:
        facts: of the call.
        of_requests: of each request in it, which hold beside them.
        q_lens: query rows of each request.
    """

    facts: Facts = field(default_factory=dict, hash=False)
    of_requests: tuple[Facts, ...] = field(default=(), hash=False)
    q_lens: tuple[int, ...] = ()


def together(shared: Facts, of_requests: Iterable[Facts]) -> dict[str, Fact]:
    """Return the facts of a call and those of any of its requests, of numbers the largest."""
    found = dict(shared)
    for facts in of_requests:
        for name, value in facts.items():
            found[name] = max(int(value), int(found.get(name, 0))) if type(value) is int else value
    return found


def facts_of_case(case: Any) -> CallFacts:
    """Return the facts of a case of any check: its dataclass fields, nested ones too, and what follows from its lengths."""
    found = _fields_of(case)
    found |= {f"{axis}: {value}": True for axis, value in getattr(case, "non_default", {}).items()}
    for name in ("interface", "arithmetic", "values"):
        found.pop(name, None)
    if isinstance(getattr(case, "interface", None), Interface):
        found["function"] = case.interface.name.lower()
    model = getattr(case, "model", None)
    counts_all = found.get("draft_step", FROZEN_KV_STEP) == FROZEN_KV_STEP
    if counts_all and found.get("tokens that seq_lens leaves out") == "draft_step":
        found |= {"tokens that seq_lens leaves out": "none", "seq_lens leaves out tokens": False}
    for name in ("head_dim", "group", "num_kv_heads", "num_qo_heads"):
        if isinstance(value := getattr(case, name, getattr(model, name, None)), int):
            found[name] = value
    found |= _of_heads(found)
    if getattr(case, "sinks", getattr(model, "has_sinks", False)):
        found["sinks"] = True
    kv_lens = getattr(case, "kv_lens", getattr(case, "lens", None))
    if kv_lens is None:
        return CallFacts(_shown(found))
    q_lens = getattr(case, "q_lens", (0,) * len(kv_lens))
    page_size, window_left = getattr(case, "page_size", TILE), getattr(case, "window_left", -1)
    return _with_lengths(found, kv_lens, q_lens, page_size, window_left)


def context_of(case: Any) -> Facts:
    """Return what a call's arguments do not say of an attention case: what its tensors hold."""
    if not isinstance(case, AttentionCase):
        return {}
    names = ("contents", "dead", "table_tail")
    return {name: value for name, value in _fields_of(case).items() if name in names}


def _fields_of(case: Any) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    for each in fields(case) if is_dataclass(case) else ():
        value = getattr(case, each.name)
        if is_dataclass(value):
            found |= _fields_of(value)
        elif each.name not in UNSHOWN and (told := _plain(value)) is not None:
            found[each.name] = told
        if isinstance(value, ForwardMode):
            found["tokens that seq_lens leaves out"] = value.uncounted.name.lower()
            found["seq_lens leaves out tokens"] = value.uncounted is not UncountedTokens.NONE
            found["rows of a request"] = value.query_rows.name.lower()
            found["the mode extends a draft"] = value.extends_draft
    return found


def _plain(value: Any) -> Fact | None:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value).removeprefix("torch."))
    if isinstance(value, dict):
        held = set(map(_plain, value.values()))
        return held.pop() if len(held) == 1 else "mixed"
    return value if isinstance(value, bool | int | str) else None


def _shown(found: Mapping[str, Fact]) -> dict[str, Fact]:
    return {name: value for name, value in found.items() if value is not False}


def _of_heads(found: Mapping[str, Fact]) -> dict[str, Fact]:
    group = found.get("group", 1)
    assert isinstance(group, int)
    return {"group is no power of two": bool(group & (group - 1))}


def _with_lengths(
    found: dict[str, Fact], kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int, window_left: int
) -> CallFacts:
    """Add what follows from the lengths of a batch, and from each request's."""
    pairs = list(zip(kv_lens, q_lens, strict=True))
    found |= {
        "page_size": page_size,
        "requests": len(pairs),
        "rows_of_batch": sum(q_lens),
        "unequal q_lens": len(set(q_lens)) > 1,
        "unequal kv_lens": len(set(kv_lens)) > 1,
        "longest kv_len": max(kv_lens, default=0),
        "some kv_len == 0": 0 in kv_lens,
        "every kv_len == 0": not any(kv_lens),
        "some q_len == 0": 0 in q_lens and any(q_lens),
        "window_left >= 0": window_left >= 0,
    }
    if window_left >= 0:
        found["window_left"] = window_left
    of_requests = []
    for place, (kv_len, q_len) in enumerate(pairs):
        first_seen = kv_len - q_len - window_left if window_left >= 0 else 0  # by the request's first row
        last_seen = kv_len - 1 - window_left if window_left >= 0 else 0
        own = {
            "kv_len": kv_len,
            "q_len": q_len,
            "pages": -(-kv_len // page_size),
            "request": place,
            "last request": place == len(pairs) - 1,
            "kv_len % page_size > 0": kv_len % page_size > 0,
            "kv_len % page_size == 0": kv_len > 0 and kv_len % page_size == 0,
            f"kv_len % {TILE} == 0": kv_len > 0 and kv_len % TILE == 0,
            f"kv_len % {LONG_TILE} == 0": kv_len > 0 and kv_len % LONG_TILE == 0,
            "kv_len == 0": kv_len == 0,
            "kv_len < q_len": kv_len < q_len,
            "kv_len == q_len": kv_len == q_len,
            "q_len == 0": q_len == 0,
            "q_len is no power of two": bool(q_len & (q_len - 1)),
            "window_left < kv_len - 1": last_seen > 0,
            "a page lies before the window": first_seen >= page_size,
            "a tile lies before the window": first_seen >= TILE,
            "the window begins in a page": last_seen > 0
            and any(max(first_seen + row, 0) % page_size for row in range(min(q_len, page_size))),
            "the window begins with a page": last_seen > 0
            and any(at > 0 and at % page_size == 0 for at in range(first_seen, last_seen + 1)),
            "kv_len is the neighbour's": place > 0 and kv_lens[place - 1] == kv_len,
        }
        of_requests.append(_shown(own))
    return CallFacts(_shown(found), tuple(of_requests), tuple(q_lens))


class CallLog:
    """The attention calls of one run, so that a call's facts say what it has in common with earlier ones."""

    def __init__(self) -> None:
        self._calls = 0
        self._first_of_shapes: dict[Any, dict[str, Any]] = {}
        # Not the tensors themselves: a later call's must be free to get the address of one that is gone, as an engine's do.
        self._versions: dict[tuple[str, int], tuple[weakref.ref[Tensor], int]] = {}

    def facts(self, interface: Interface, arguments: Mapping[str, Any]) -> CallFacts:
        """Return the facts of a call that is about to be made; its lengths are read from the device."""
        found = _of_arguments(interface, arguments)
        found |= self._of_earlier_calls(arguments)
        query, seq_lens = arguments["query"], arguments["seq_lens"]
        kv_lens = seq_lens.to(torch.int64).tolist()
        offsets = arguments.get("cum_seq_lens_q")
        if offsets is None:
            rows = query.shape[:-2].numel() // max(len(kv_lens), 1)
            q_lens = [rows] * len(kv_lens)
        else:
            q_lens = offsets.diff().tolist()
        page_size = _page_size(arguments)
        return _with_lengths(found, kv_lens, q_lens, page_size, arguments.get("window_left", -1))

    def _of_earlier_calls(self, arguments: Mapping[str, Any]) -> dict[str, Fact]:
        found: dict[str, Fact] = {"calls before": self._calls, "a later call": self._calls > 0}
        self._calls += 1
        shapes = tuple((name, tuple(arguments[name].shape)) for name in ("query", "seq_lens"))
        now = {name: _comparable(arguments.get(name)) for name in _REMEMBERED}
        now["sinks"] = _comparable(arguments.get("sinks", arguments.get("attention_sinks")))
        if arguments.get("bmm1_scale_log2") is not None:
            now["bmm1_scale"] = "in bmm1_scale_log2"
        first = self._first_of_shapes.setdefault(shapes, now)
        for name, value in now.items():
            found[f"another {name} than the first call of these shapes"] = value != first[name]
        lens = (value if isinstance(value, list) else [value] for value in (now["seq_lens"], first["seq_lens"]))
        found[LONGER] = any(later > earlier for later, earlier in zip(*lens, strict=True))
        for name, tensor in _watched(arguments).items():
            if isinstance(tensor, Tensor):
                key = name, tensor.data_ptr()
                seen, version = self._versions.get(key, (None, tensor._version))
                if seen is None or seen() is None:
                    version = tensor._version
                    self._versions[key] = weakref.ref(tensor), version
                found[f"{name} was written since an earlier call"] = tensor._version > version
        return found


_WATCHED = ("query", "seq_lens", "cum_seq_lens_q", "block_tables", "bmm2_scale", "mask", "workspace_buffer")
_REMEMBERED = ("bmm1_scale", "bmm2_scale", "window_left", "sinks", "mask", "seq_lens", "cum_seq_lens_q", "block_tables")


def _watched(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that may be written between two calls, the same under one name whatever the function's is."""
    cache = arguments.get("kv_cache", arguments.get("key"))
    scale = arguments.get("bmm1_scale_log2")
    return {name: arguments.get(name) for name in _WATCHED} | {
        "kv_cache": cache[0] if isinstance(cache, tuple) else cache,
        "bmm1_scale": arguments.get("bmm1_scale") if scale is None else scale,
        "sinks": arguments.get("sinks", arguments.get("attention_sinks")),
    }


def _comparable(value: Any) -> Any:
    """Return an argument's value, alike for a number and a tensor of it."""
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(f"{float(value):.5g}")
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value.cpu().to(torch.float64).flatten().tolist() if isinstance(value, Tensor) else value


def _page_size(arguments: Mapping[str, Any]) -> int:
    cache = arguments.get("kv_cache")
    if cache is None:
        return TILE
    side = cache[0] if isinstance(cache, tuple) else cache
    is_nhd = arguments.get("kv_layout") == "NHD" or side.dim() == 3
    return int(side.shape[-3] if is_nhd and side.dim() > 3 else side.shape[-2])


def _of_arguments(interface: Interface, arguments: Mapping[str, Any]) -> dict[str, Fact]:
    query = arguments["query"]
    heads, head_dim = query.shape[-2:]
    found: dict[str, Fact] = {
        "function": interface.name.lower(),
        "dtype": _name(query.dtype),
        "head_dim": head_dim,
        "num_qo_heads": heads,
        "query is not contiguous": not query.is_contiguous(),
        "return_lse": bool(arguments.get("return_lse")),
        "return_lse_base == 'basee'": arguments.get("return_lse_base") == "basee",
        "lse is given": arguments.get("lse") is not None,
        "out is given": arguments.get("out") is not None,
        "out_dtype": _plain(_out_dtype(arguments)) or False,
        "out_dtype is not the query's": _out_dtype(arguments) not in (None, query.dtype),
        "causal is False": not arguments.get("causal", arguments.get("is_causal", True)),
        "seq_lens is uint32": arguments["seq_lens"].dtype == torch.uint32,
        "cum_seq_lens_q is given": interface in (Interface.DECODE, Interface.MLA_DECODE)
        and arguments.get("cum_seq_lens_q") is not None,
    }
    found |= _of_scales(arguments, head_dim) | _of_sinks(arguments.get("sinks", arguments.get("attention_sinks")))
    found |= _of_mask(arguments.get("mask"))
    workspace = arguments.get("workspace_buffer")
    if workspace is not None:
        semaphores, scratch = semaphores_and_scratch(workspace.flatten())
        is_counted_in = counts_in_workspace(arguments.get("backend", "auto"), query.device)
        parts = (scratch,) if is_counted_in else (semaphores, scratch)
        found["the workspace's scratch is not zero"] = any(bool(part[:64].any()) for part in parts)
    if "kv_cache" in arguments:
        found |= _of_cache(arguments, heads)
    else:
        found |= _of_ragged(arguments, heads)
    return found | _of_heads(found)


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _out_dtype(arguments: Mapping[str, Any]) -> Any:
    out = arguments.get("out")
    return arguments.get("out_dtype") or getattr(out, "dtype", None)


def _of_scales(arguments: Mapping[str, Any], head_dim: int) -> dict[str, Fact]:
    found: dict[str, Fact] = {"bmm1_scale_log2 is given": arguments.get("bmm1_scale_log2") is not None}
    for name in ("bmm1_scale", "bmm2_scale"):
        scale = arguments.get(name, 1.0)
        found[f"{name} is a tensor"] = isinstance(scale, Tensor)
        found[f"{name} < 0"] = float(scale) < 0
        if name == "bmm2_scale":
            found["bmm2_scale != 1"] = float(scale) != 1
            found["bmm2_scale is no power of two"] = math.frexp(float(scale))[0] not in (0.5, -0.5)
        else:
            found["bmm1_scale != 1 / sqrt(head_dim)"] = not math.isclose(float(scale), head_dim**-0.5, rel_tol=1e-6)
    return found


def _of_sinks(sinks: Any) -> dict[str, Fact]:
    if sinks is None:
        return {}
    values = torch.cat(list(sinks)) if isinstance(sinks, list | tuple) else sinks
    none = values == -math.inf
    return {
        "sinks": True,
        "sinks is a list": isinstance(sinks, list | tuple),
        "a sink is -inf": bool(none.any()),
        "every sink is -inf": bool(none.all()),
        "a sink > 8": bool((values > 8).any()),
    }


def _of_mask(mask: Tensor | None) -> dict[str, Fact]:
    if mask is None:
        return {}
    bits = (mask.cpu().to(torch.int32).unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1
    shown = bits.flatten(2)[:, :, : mask.shape[1]].bool()
    causal = torch.ones(shown.shape[1:], dtype=torch.bool).tril()
    return {
        "mask": True,
        "mask is not causal": bool((shown != causal).any()),
        "mask differs by request": bool((shown != shown[:1]).any()),
        "mask_words": mask.shape[2],
    }


def _of_ragged(arguments: Mapping[str, Any], heads: int) -> dict[str, Fact]:
    key, value, mirror = arguments["key"], arguments["value"], arguments.get("q_seq_lens_cpu")
    lse = arguments.get("lse")
    return {
        "v_head_dim": value.shape[2],
        "num_kv_heads": key.shape[1],
        "group": heads // key.shape[1],
        "key is not contiguous": not key.is_contiguous(),
        "value is not contiguous": not value.is_contiguous(),
        "lse is not contiguous": lse is not None and not lse.is_contiguous(),
        "lengths on the host": mirror is not None and _name(mirror.dtype),
    }


def _of_cache(arguments: Mapping[str, Any], heads: int) -> dict[str, Fact]:
    cache, tables = arguments["kv_cache"], arguments["block_tables"]
    is_pair = isinstance(cache, tuple)
    keys, values = cache if is_pair else (cache, cache)
    is_latent = "kv_lora_rank" in arguments
    num_kv_heads = 1 if is_latent else keys.shape[-2 if arguments.get("kv_layout") == "NHD" else -3]
    last = keys.stride(0) * keys.shape[0]
    packed = keys.shape[1:].numel()
    first = tables[:, 0] if tables.dim() == 2 else tables[:, 0, 0]
    factors = arguments.get("kv_cache_sf")
    return {
        "kv_dtype": _name(keys.dtype),
        "kv_layout": arguments.get("kv_layout", "HND") if not is_latent else "MLA",
        "num_kv_heads": num_kv_heads,
        "group": heads // max(num_kv_heads, 1),
        "as many tokens in a page as K/V heads": not is_latent and _page_size(arguments) == num_kv_heads,
        "kv_cache is one tensor": not is_pair and not is_latent,
        "pages lie apart": keys.stride(0) > packed,
        "K and V have other strides": is_pair and keys.stride() != values.stride(),
        "scale factors lie apart": factors is not None and factors[0].stride(0) > factors[0].shape[1:].numel(),
        "uses_shared_paged_kv_idx is False": not arguments.get("uses_shared_paged_kv_idx", True),
        "block_tables is not contiguous": not tables.is_contiguous(),
        "all requests have the same first page": len(first) > 1 and bool((first == first[0]).all()),
        "table_columns": tables.shape[-1],
        "pool_pages": keys.shape[0],
        "pool_elements": last,
    }
