"""FlashInfer's kernels by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one key at a time.

Pointers are followed as the kernels follow them: a page table is read as packed rows whatever its strides, V with K's strides,
fmha_v2's V by its page ids from K's base, XQA's mask bit by bit. A wrapper knows what it was planned with and nothing else.
The real functions' signatures supply the defaults, so an argument left out is what the installed FlashInfer makes of it.
trtllm-gen is not simulated: FlashInfer itself makes the call, on a B200 that is not there.
"""

import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.cases import MLA, RAGGED, Arguments
from tests.dry_run.on_a_b200 import on_a_b200
from tests.kernels.held import E4M3
from tests.kernels.simulated import attend_request, paged, write_scratch

FMHA_V2 = "trtllm_fmha_v2_prefill"
DECODE_WRAPPER, PREFILL_WRAPPER = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
MLA_WRAPPER, RAGGED_WRAPPER = "BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"
WRAPPERS = (DECODE_WRAPPER, PREFILL_WRAPPER, MLA_WRAPPER, RAGGED_WRAPPER)


@dataclass
class SimulatedFlashInfer:
    """Stands in for `lab.kernels.flashinfer_call.installed`. The real signatures are bound in each call, plan and run."""

    major: int = 9  # of the GPU's capability
    calls: list[tuple[str, Arguments]] = field(default_factory=list)  # (function, arguments as passed)
    plans: list[Arguments] = field(default_factory=list)  # with the arguments of the wrapper, whose name is "wrapper"
    runs: list[Arguments] = field(default_factory=list)

    def installed(self, module: str, name: str) -> tuple[Any, inspect.Signature]:
        real = getattr(importlib.import_module(module), name)
        signature = inspect.signature(real)
        if name in WRAPPERS:
            return self._wrapper(real), signature
        if not name.startswith("trtllm_"):
            return real, signature

        def function(**arguments: Any) -> Any:
            self.calls.append((name, arguments))
            bound = signature.bind(**arguments)
            bound.apply_defaults()
            return self.call(real, bound.arguments)

        return function, signature

    def call(self, real: Callable[..., Any], arguments: Arguments) -> Any:
        if self.major == 10 or real.__name__ == RAGGED:
            return on_a_b200(real, arguments)
        if real.__name__ == FMHA_V2:
            return _fmha_v2(SimpleNamespace(**arguments))
        assert arguments["backend"] in ("auto", "xqa")
        return (_xqa_mla if real.__name__ == MLA else _xqa)(SimpleNamespace(**arguments))

    def _wrapper(self, real: Any) -> Any:
        run_planned = {MLA_WRAPPER: _run_mla, RAGGED_WRAPPER: _run_ragged}.get(real.__name__, _run_paged)

        def make(workspace: Tensor, **how: Any) -> Any:
            inspect.signature(real).bind(workspace, **how)
            state: Arguments = {}

            def plan(*args: Any, **arguments: Any) -> None:
                bound = inspect.signature(getattr(real, "_plan_impl", real.plan)).bind(None, *args, **arguments)
                bound.apply_defaults()
                self.plans.append(dict(bound.arguments) | how | {"wrapper": real.__name__})
                state.update(self.plans[-1])

            def run(*args: Any, **arguments: Any) -> Any:
                bound = inspect.signature(real.run).bind(None, *args, **arguments)
                bound.apply_defaults()
                self.runs.append(arguments)
                workspace.fill_(0xFF)
                return run_planned(state, **{name: value for name, value in bound.arguments.items() if name != "self"})

            return SimpleNamespace(plan=plan, run=run)

        return make


# The functions, whose arguments are in a namespace.


def _xqa(a: SimpleNamespace) -> Tensor:
    assert a.max_q_len is a.cum_seq_lens_q is a.bmm1_scale_log2 is a.lse is None
    assert a.uses_shared_paged_kv_idx is True
    write_scratch(a.workspace_buffer)
    k, v = _pair(a.kv_cache)
    if a.kv_layout == "NHD":
        k, v = k.transpose(-3, -2), v.transpose(-3, -2)
    head_dim, quantised = a.query.shape[-1], k.element_size() < 2
    kv_scale = float(a.bmm2_scale * a.o_scale)
    q_scale = float(a.bmm1_scale) / kv_scale * math.sqrt(head_dim)
    scale = q_scale * (kv_scale if quantised else 1.0) / math.sqrt(head_dim)
    scales = (scale, (kv_scale if quantised else 1.0) / a.o_scale)
    table, q_len, out = _packed(a.block_tables), a.q_len_per_req, _output(a)
    sinks = None if a.sinks is None else a.sinks.reshape(k.shape[1], -1).flatten()
    drafts = None if q_len == 1 else _draft_tokens(a.mask, len(a.seq_lens), q_len)
    for request, kv_len in enumerate(a.seq_lens.tolist()):
        rows, start = range(request * q_len, (request + 1) * q_len), kv_len - q_len  # of the draft
        shown = None
        if drafts is not None:
            shown = [{key for key in range(kv_len) if key < start or key - start in drafts[row]} for row in rows]
        keys, values = paged(k, table[request], kv_len), paged(v, table[request], kv_len, k.stride())
        rule = {"sinks": sinks, "window_left": a.window_left, "shown": shown}
        attend_request(a.query, rows, keys, values, scales, out, **rule)
    return out


def _draft_tokens(mask: Tensor | None, batch_size: int, q_len: int) -> list[set[int]]:
    """The draft tokens that each row sees: bit b of its word w is token 16 w + b. Rows are padded to 32 bits."""
    assert mask is not None, "Mask is required for speculative decoding"
    assert mask.dtype == torch.uint16
    words_per_row = 2 * math.ceil(q_len / 32)
    words = torch.as_strided(mask, (batch_size * q_len * words_per_row,), (1,)).tolist()
    rows = [words[start : start + words_per_row] for start in range(0, len(words), words_per_row)]
    return [{token for token in range(16 * words_per_row) if row[token // 16] >> (token % 16) & 1} for row in rows]


def _xqa_mla(a: SimpleNamespace) -> Any:
    """Multiply logits by both scales and the output by the second."""
    assert a.sinks is a.lse is a.cum_seq_lens_q is a.max_q_len is a.multi_ctas_kv_counter_buffer is None
    assert a.query.shape[1] == 1
    assert not a.return_lse
    write_scratch(a.workspace_buffer)
    rank, out = a.kv_lora_rank, a.out
    if out is None:
        out = torch.empty(*a.query.shape[:-1], rank, dtype=torch.bfloat16)
    else:
        assert out.shape == (len(a.query), a.query.shape[2], rank)
    scales, rows_out = (a.bmm1_scale * a.bmm2_scale, a.bmm2_scale), out.view(len(a.query), -1, rank)
    for request, kv_len in enumerate(a.seq_lens.tolist()):
        entries = paged(a.kv_cache, a.block_tables[request], kv_len)
        row = range(request, request + 1)
        attend_request(a.query.flatten(0, 1), row, entries, entries[..., :rank], scales, rows_out)
    return out


def _fmha_v2(a: SimpleNamespace) -> Tensor:
    assert a.chunked_attention_size == 0
    assert a.max_kv_len >= a.max_q_len
    assert isinstance(a.bmm1_scale, float)
    assert isinstance(a.bmm2_scale, float)
    a.workspace_buffer.view(torch.uint8).fill_(0xFF)
    a.query, cache = a.qkv
    table = _packed(a.block_tables)
    assert len(table) == a.batch_size
    if isinstance(cache, tuple):
        k, v = cache
        assert k.is_contiguous()
        assert v.is_contiguous()
        assert k.shape == v.shape
        assert table.shape[1] == 2
        block = k[0].numel()
        distance = v.data_ptr() - k.data_ptr()
        assert distance > 0
        assert distance % (block * k.element_size()) == 0
        k_blocks, v_blocks = table.unbind(1)
    else:
        k = cache[:, 0]
        block = k[0].numel()
        k_blocks, v_blocks = table * 2, table * 2 + 1
    num_blocks = (k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()) // block
    pool = torch.as_strided(k, (num_blocks, *k.shape[1:]), (block, *k[0].contiguous().stride()))
    pool = pool.transpose(1, 2) if a.input_layout == "Q_PAGED_KV_NHD" else pool
    scale = a.bmm1_scale or 1.0 / math.sqrt(a.query.shape[-1])
    scales = scale, 1.0 if a.query.element_size() == 2 else a.bmm2_scale
    mode = "sliding_window" if 0 < a.window_left < a.max_kv_len else a.mask_mode
    rule = {"causal": mode != "padding", "window_left": a.window_left if mode == "sliding_window" else -1}
    out = _output(a)
    q_starts, kv_lens = a.cum_seq_lens_q.tolist(), a.cum_seq_lens_kv.diff().tolist()
    assert kv_lens == a.seq_lens.tolist()
    for request, kv_len in enumerate(kv_lens):
        keys, values = (paged(pool, blocks[request], kv_len) for blocks in (k_blocks, v_blocks))
        rows = range(*q_starts[request : request + 2])
        attend_request(a.query, rows, keys, values, scales, out, sinks=a.sinks, **rule)
    return out


def _pair(cache: Any) -> tuple[Tensor, Tensor]:
    if isinstance(cache, tuple):
        return cache
    return (cache, cache) if cache.shape[1] == 1 else tuple(cache.unbind(1))


def _packed(table: Tensor) -> Tensor:
    """The table as a kernel reads it: from its first element on, strides ignored."""
    return torch.as_strided(table, table.shape, torch.empty(table.shape, device="meta").stride()).clone()


def _output(a: SimpleNamespace) -> Tensor:
    return torch.empty(a.query.shape, dtype=a.out_dtype or a.query.dtype) if a.out is None else a.out


# The wrappers.


def _run_ragged(planned: Arguments, *, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    """Plan from the host's offsets; a row without keys gets NaN."""
    assert planned["kv_layout"] == "NHD"
    q_offsets, kv_offsets = planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
    assert planned["qo_indptr"].device.type == "cpu"
    assert len(q) == q_offsets[-1]
    out, lse = others["out"], others["lse"]
    assert (q.dtype, k.dtype, out.dtype) == tuple(planned[f"{name}_data_type"] for name in ("q", "kv", "o"))
    assert out.shape[:2] == q.shape[:2]
    sizes = tuple(planned[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"))
    assert (q.shape[1], k.shape[1], q.shape[2], v.shape[2]) == sizes
    assert others["return_lse"] == (lse is not None)
    rule = {"causal": planned["causal"], "window_left": planned["window_left"] if planned["causal"] else -1}
    for rows, keys in zip(itertools.pairwise(q_offsets), itertools.pairwise(kv_offsets), strict=True):
        of_request = k[slice(*keys)], v[slice(*keys)]
        for row in attend_request(q, range(*rows), *of_request, (planned["sm_scale"], 1.0), out, lse, **rule):
            out[row] = math.nan
            if lse is not None:
                lse[row] = math.nan
    return (out, lse) if others["return_lse"] else out


def _run_mla(planned: Arguments, *, query: Tensor, kv_cache: Tensor, out: Tensor, **others: Any) -> Any:
    """Plan from CSR."""
    metadata, rank = planned["metadata"], planned["head_dim_ckv"]
    quantised = planned["kv_data_type"] == E4M3
    dtypes = tuple(planned[name] for name in ("q_data_type", "kv_data_type", "output_dtype"))
    assert (query.dtype, kv_cache.dtype, out.dtype) == dtypes
    assert quantised == (planned["scale_mode"] == "kv-per-tensor") == (others["ckv_scale"] is not None)
    assert others["ckv_scale"] == others["kpe_scale"]
    mode = ("basee" if others["return_lse_base_on_e"] else "base2") if others["return_lse"] else "none"
    assert mode == planned["lse_mode"]
    # FA3's kernel multiplies the entries in the query's dtype (`mla_hopper.cuh`, `ckv_scale_packed`).
    scale = float(torch.tensor(others["ckv_scale"] if quantised else 1.0).to(query.dtype))
    lse = torch.empty(query.shape[:2]) if others["lse"] is None else others["lse"]
    starts, pages = metadata.qo_indptr.tolist(), metadata.kv_indptr.tolist()
    for request, kv_len in enumerate(metadata.kv_len_arr.tolist()):
        ids = metadata.kv_indices[pages[request] : pages[request + 1]]
        assert len(ids) == -(-kv_len // planned["page_size"])
        entries = paged(kv_cache.unsqueeze(1), ids, kv_len)
        rows, scales = range(*starts[request : request + 2]), (planned["sm_scale"] * scale, scale)
        attend_request(query, rows, entries, entries[..., :rank], scales, out, lse)
    if mode == "basee":
        lse *= math.log(2.0)
    return (out, lse) if others["return_lse"] else out


def _run_paged(planned: Arguments, *, q: Tensor, paged_kv_cache: Any, args: tuple[Any, ...] = (), **others: Any) -> Any:
    """Read lengths from the pages and the last page's tokens, as the kernels do, the mask from FlashInfer's own offsets."""
    decodes = planned["wrapper"] == DECODE_WRAPPER
    assert others["sinks"] is None, "fa2 and fa3 ignore them"
    assert planned["kv_layout"] == "HND"
    k, v = paged_kv_cache
    _check_backend(planned, k.stride() == v.stride(), decodes, q.shape[1] // k.shape[1])
    out, lse = others["out"], others["lse"]
    assert (q.dtype, k.dtype, out.dtype) == tuple(planned[f"{name}_data_type"] for name in ("q", "kv", "o"))
    assert out.shape[:2] == q.shape[:2]
    sizes = ("num_qo_heads", "num_kv_heads", "page_size", "head_dim" if decodes else "head_dim_qk")
    assert (q.shape[1], *k.shape[1:]) == tuple(planned[name] for name in sizes)
    assert others["return_lse"] == (lse is not None)
    sinks, scale = _sinks(planned, args)
    q_offsets, kv_lens, pages = _lengths(planned, decodes)
    assert len(q) == q_offsets[-1]
    shown = _mask(planned, kv_lens, q_offsets)
    rule = {"causal": not decodes and planned["causal"], "window_left": planned["window_left"], "sinks": sinks}
    for request, kv_len in enumerate(kv_lens):
        keys, values = (paged(cache, pages[request], kv_len) for cache in (k, v))
        rows, own = range(*q_offsets[request : request + 2]), None if shown is None else shown[request]
        attend_request(q, rows, keys, values, (scale, 1.0), out, lse, shown=own, **rule)
    if others["v_scale"] is not None:
        out.mul_(others["v_scale"])
    return (out, lse) if others["return_lse"] else out


def _check_backend(planned: Arguments, same_strides: bool, decodes: bool, group: int) -> None:
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


def _sinks(planned: Arguments, args: tuple[Any, ...]) -> tuple[Tensor | None, float]:
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


def _lengths(planned: Arguments, decodes: bool) -> tuple[list[int], list[int], list[Tensor]]:
    """Offsets of rows, keys of each request and its pages, as the kernels read them."""
    prefix = "" if decodes else "paged_kv_"
    indptr, ids, last = (planned[f"{prefix}{name}"] for name in ("indptr", "indices", "last_page_len"))
    assert {each.dtype for each in (indptr, ids, last)} == {torch.int32}
    counts = indptr.diff().tolist()
    kv_lens = [
        (count - 1) * planned["page_size"] + tokens if count else 0
        for count, tokens in zip(counts, last.tolist(), strict=True)
    ]
    assert planned["seq_lens"].tolist() == kv_lens, "the planner and the kernels must agree"
    rows = list(range(len(kv_lens) + 1)) if decodes else planned["qo_indptr"].tolist()
    return rows, kv_lens, list(ids.split(counts))


def _mask(planned: Arguments, kv_lens: list[int], q_offsets: list[int]) -> list[list[set[int]]] | None:
    """The keys that each row of each request sees, at FlashInfer's own offset of its mask [q_len, kv_len]."""
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
        [set(row.nonzero().flatten().tolist()) for row in mask[start : start + q_len * kv_len].view(q_len, kv_len)]
        for start, q_len, kv_len in zip(starts, q_lens, kv_lens, strict=False)
    ]
