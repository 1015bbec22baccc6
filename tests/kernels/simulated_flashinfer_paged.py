"""FlashInfer's paged wrappers by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one key at a time.

A wrapper knows what it was planned with and nothing else: it reads lengths from the pages and the last page's tokens, as its
kernels do, and the mask from where FlashInfer's own offsets put it.
"""

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor

from tests.kernels.simulated import Arguments, Simulated, attend, paged

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
E4M3 = torch.float8_e4m3fn


class SimulatedPaged(Simulated):
    wrappers = (DECODE, PREFILL)

    def run(self, planned: Arguments, **arguments: Any) -> Any:
        return _run(planned, **arguments)


def _run(planned: dict[str, Any], *, q: Tensor, paged_kv_cache: Any, args: tuple[Any, ...] = (), **others: Any) -> Any:
    decodes = planned["wrapper"] == DECODE
    assert others["sinks"] is None, "fa2 and fa3 ignore them"
    assert planned["kv_layout"] == "HND"
    k, v = paged_kv_cache
    _check_backend(planned, k.stride() == v.stride(), decodes, q.shape[1] // k.shape[1])
    out, lse = others["out"], others["lse"]
    dtypes = tuple(planned[name] for name in ("q_data_type", "kv_data_type", "o_data_type"))
    assert (q.dtype, k.dtype, out.dtype) == dtypes
    head_dim = planned["head_dim" if decodes else "head_dim_qk"]
    assert (q.shape[1], *k.shape[1:]) == (
        planned["num_qo_heads"],
        planned["num_kv_heads"],
        planned["page_size"],
        head_dim,
    )
    assert others["return_lse"] == (lse is not None)
    sinks, scale = _sinks(planned, args)
    q_offsets, kv_lens, pages = _lengths(planned, decodes)
    assert len(q) == q_offsets[-1]
    shown = _mask(planned, kv_lens, q_offsets)
    for request, kv_len in enumerate(kv_lens):
        keys, values = (paged(cache, pages[request], kv_len) for cache in (k, v))
        first, last = q_offsets[request : request + 2]
        for row in range(first, last):
            position = kv_len - (last - row)
            seen = [
                key
                for key in range(kv_len)
                if (key <= position or decodes or not planned["causal"])
                and (planned["window_left"] < 0 or key >= position - planned["window_left"])
                and (shown is None or shown[request][row - first, key])
            ]
            attend(q[row], keys, values, seen, scale, 1.0, sinks, out[row], None if lse is None else lse[row])
    if others["v_scale"] is not None:
        out.mul_(others["v_scale"])
    return (out, lse) if others["return_lse"] else out


def _check_backend(planned: dict[str, Any], same_strides: bool, decodes: bool, group: int) -> None:
    """What the modules of each backend raise."""
    e4m3_queries = planned["q_data_type"] == E4M3
    if decodes and not planned["use_tensor_cores"]:
        assert same_strides
        assert group in (1, 2, 3, 4, 6, 8, 16)
    if planned["backend"] == "fa3":
        assert same_strides, "K and V must have same page stride for sparse attention"
        assert planned.get("custom_mask") is None, "cudaErrorNotSupported"
        assert e4m3_queries == (planned["kv_data_type"] == E4M3)
    else:
        assert not e4m3_queries


def _sinks(planned: dict[str, Any], args: tuple[Any, ...]) -> tuple[Tensor | None, float]:
    """The tensor and the scale that the compiled variant reads, if the wrapper has one."""
    if planned.get("jit_args") is None:
        assert not args
        return None, planned["sm_scale"]
    name, *dtypes_and_dims, tensors, _, scalars, _, variant, declaration = planned["jit_args"]
    dtypes = [planned[f"{each}_data_type"] for each in ("q", "kv", "o")]
    assert dtypes_and_dims == [*dtypes, torch.int32, planned["head_dim_qk"], planned["head_dim_qk"]]
    assert (tensors, scalars, variant) == (["sink"], ["sm_scale"], "AttentionSink")
    assert ("OnlineSoftmaxWithSink" in declaration) == (planned["backend"] == "fa3")
    assert planned["jit_kwargs"]["use_sliding_window"] == (planned["window_left"] >= 0) == ("use_swa_True" in name)
    assert planned["custom_mask"] is None, "AttentionSink reads none"
    sinks, scale = args
    return sinks, scale


def _lengths(planned: dict[str, Any], decodes: bool) -> tuple[list[int], list[int], list[Tensor]]:
    """Offsets of rows, keys of each request and its pages, as the kernels read them."""
    prefix = "" if decodes else "paged_kv_"
    indptr, ids, last = (planned[f"{prefix}{name}"] for name in ("indptr", "indices", "last_page_len"))
    assert {each.dtype for each in (indptr, ids, last)} == {torch.int32}
    offsets = indptr.tolist()
    counts = [end - start for start, end in itertools.pairwise(offsets)]
    kv_lens = [
        (count - 1) * planned["page_size"] + tokens if count else 0
        for count, tokens in zip(counts, last.tolist(), strict=True)
    ]
    assert planned["seq_lens"].tolist() == kv_lens, "the planner and the kernels must agree"
    rows = list(range(len(kv_lens) + 1)) if decodes else planned["qo_indptr"].tolist()
    return rows, kv_lens, list(ids.split(counts))


def _mask(planned: dict[str, Any], kv_lens: list[int], q_offsets: list[int]) -> list[Tensor] | None:
    """Each request's mask, [q_len, kv_len], at FlashInfer's own offset."""
    mask = planned.get("custom_mask")
    if mask is None:
        return None
    offsets_of = importlib.import_module("flashinfer.prefill")._compute_page_mask_indptr
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "page_size")
    starts = offsets_of(*(planned[name] for name in names)).tolist()
    assert starts[-1] == len(mask)
    assert mask.dtype == torch.bool
    q_lens = [end - start for start, end in itertools.pairwise(q_offsets)]
    return [
        mask[start : start + q_len * kv_len].view(q_len, kv_len)
        for start, q_len, kv_len in zip(starts, q_lens, kv_lens, strict=False)
    ]
