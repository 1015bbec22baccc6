"""FlashInfer's MLA kernels by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one key at a time.

trtllm-gen is FlashInfer's own call, on a B200 that is not there. XQA multiplies its logits by both scales and the output
by the second. The wrapper plans from CSR and forgets what it was not told. The real signatures are bound in each.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.references.quantization import rounded
from tests.dry_run.on_a_b200 import on_a_b200

MEBIBYTE = 2**20
NAME = "trtllm_batch_decode_with_kv_cache_mla"


@dataclass
class SimulatedMLA:
    """Stands in for `lab.kernels.flashinfer_call.installed`; `change` may tamper with the arguments of a call.

    Attributes:
        change: of a call's arguments, before they are used.
        calls: arguments as passed, of every call.
        plans: arguments of every plan, and runs of every run of the wrapper.
    """

    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda arguments: arguments
    calls: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def installed(self, module: str, name: str) -> tuple[Any, inspect.Signature]:
        real = getattr(importlib.import_module(module), name)
        signature = inspect.signature(real)
        if name == "BatchMLAPagedAttentionWrapper":
            return self._wrapper(real), signature
        if name != NAME:
            return real, signature

        def function(**arguments: Any) -> Any:
            self.calls.append(arguments)
            bound = signature.bind(**self.change(arguments))
            bound.apply_defaults()
            if bound.arguments["backend"] == "trtllm-gen":
                return on_a_b200(real, bound.arguments)
            return _xqa(**bound.arguments)

        return function, signature

    def _wrapper(self, real: Any) -> Any:
        def make(workspace: Tensor, **how: Any) -> Any:
            inspect.signature(real).bind(workspace, **how)
            state: dict[str, Any] = {}

            def plan(**arguments: Any) -> None:
                inspect.signature(real.plan).bind(None, **arguments)
                self.plans.append(arguments | how)
                state.update(arguments)

            def run(**arguments: Any) -> Any:
                inspect.signature(real.run).bind(None, **arguments)
                self.runs.append(arguments)
                workspace.fill_(0xFF)
                return _wrapper_run(state, **arguments)

            return SimpleNamespace(plan=plan, run=run)

        return make


def _xqa(
    *, query: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, workspace_buffer: Tensor, **others: Any
) -> Any:
    unsupported = ("sinks", "lse", "cum_seq_lens_q", "max_q_len", "multi_ctas_kv_counter_buffer")
    assert all(others[name] is None for name in unsupported)
    assert query.shape[1] == 1
    assert not others["return_lse"]
    semaphores = workspace_buffer.view(torch.uint8)[: 8 * MEBIBYTE]
    assert not semaphores.any(), "semaphores must be zero at each launch"
    workspace_buffer.view(torch.uint8)[8 * MEBIBYTE :] = 0xFF
    rank, out = others["kv_lora_rank"], others["out"]
    if out is None:
        out = torch.empty(*query.shape[:-1], rank, dtype=torch.bfloat16)
    else:
        assert out.shape == (len(query), query.shape[2], rank)
    q_scale, kv_scale = others["bmm1_scale"], others["bmm2_scale"]
    lse = torch.empty(len(query), query.shape[2])
    for request, kv_len in enumerate(seq_lens.tolist()):
        entries = _entries(kv_cache, block_tables[request], kv_len)
        rows = [request, request + 1]
        _request(
            query.flatten(0, 1),
            rows,
            entries,
            rank,
            q_scale * kv_scale,
            kv_scale,
            None,
            out.view(*lse.shape, rank),
            lse,
        )
    return out


def _wrapper_run(planned: dict[str, Any], *, query: Tensor, kv_cache: Tensor, out: Tensor, **others: Any) -> Any:
    metadata, rank = planned["metadata"], planned["head_dim_ckv"]
    quantised = planned["kv_data_type"] == torch.float8_e4m3fn
    assert (query.dtype, kv_cache.dtype, out.dtype) == tuple(
        planned[name] for name in ("q_data_type", "kv_data_type", "output_dtype")
    )
    assert quantised == (planned["scale_mode"] == "kv-per-tensor") == ("ckv_scale" in others)
    assert others.get("ckv_scale") == others.get("kpe_scale")
    mode = ("basee" if others["return_lse_base_on_e"] else "base2") if others["return_lse"] else "none"
    assert mode == planned["lse_mode"]
    # FA3's kernel multiplies the entries in the query's dtype (`mla_hopper.cuh`, `ckv_scale_packed`).
    scale = float(torch.tensor(others.get("ckv_scale", 1.0)).to(query.dtype))
    lse = torch.empty(query.shape[:2]) if others["lse"] is None else others["lse"]
    starts, pages = metadata.qo_indptr.tolist(), metadata.kv_indptr.tolist()
    for request, kv_len in enumerate(metadata.kv_len_arr.tolist()):
        ids = metadata.kv_indices[pages[request] : pages[request + 1]]
        assert len(ids) == -(-kv_len // planned["page_size"])
        entries = _entries(kv_cache.unsqueeze(1), ids, kv_len)
        rows = starts[request : request + 2]
        _request(query, rows, entries, rank, planned["sm_scale"] * scale, scale, None, out, lse)
    if mode == "basee":
        lse *= math.log(2.0)
    return (out, lse) if others["return_lse"] else out


def _entries(cache: Tensor, ids: Tensor, kv_len: int) -> Tensor:
    """[kv_len, rank + rope] float64."""
    page_size = cache.shape[2]
    entries = [cache[int(ids[key // page_size]), 0, key % page_size].double() for key in range(kv_len)]
    return torch.stack(entries) if entries else torch.empty(0, cache.shape[-1], dtype=torch.float64)


def _request(
    query: Tensor,
    rows: Sequence[int],
    entries: Tensor,
    rank: int,
    scale: float,
    out_scale: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Rows `rows[0]` to `rows[1]`: row i of q sees the keys up to its own, L - q + i."""
    start, end = rows
    for row in range(start, end):
        seen = entries[: max(0, len(entries) - (end - row) + 1)]
        for head in range(query.shape[1]):
            logits = (seen @ query[row, head].double()) * scale
            sink = torch.empty(0) if sinks is None else sinks[head : head + 1]
            total = (
                torch.cat((logits, sink.double())).logsumexp(0) if len(logits) + len(sink) else torch.tensor(-math.inf)
            )
            weights = torch.exp(logits - total) if len(logits) else logits
            out[row, head] = rounded((weights @ seen[:, :rank] * out_scale).float(), out.dtype)
            lse[row, head] = total / math.log(2.0)
