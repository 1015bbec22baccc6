"""FlashInfer's ragged kernels by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one row at a time.

trtllm-gen is FlashInfer's own call, on a B200 that is not there. The wrapper plans from the host's
offsets and forgets what it was not told. The real signatures are bound in each.
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

NAME = "trtllm_ragged_attention_deepseek"
WRAPPER = "BatchPrefillWithRaggedKVCacheWrapper"


@dataclass
class SimulatedRagged:
    """Stands in for `lab.kernels.flashinfer_call.installed`; `change` may tamper with the arguments of a call or a plan.

    Attributes:
        change: of a call's or a plan's arguments, before they are used.
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
        if name == WRAPPER:
            return self._wrapper(real), signature
        if name != NAME:
            return real, signature

        def function(**arguments: Any) -> Any:
            self.calls.append(arguments)
            return on_a_b200(real, self.change(arguments))

        return function, signature

    def _wrapper(self, real: Any) -> Any:
        def make(workspace: Tensor, **how: Any) -> Any:
            inspect.signature(real).bind(workspace, **how)
            assert how["kv_layout"] == "NHD"
            state: dict[str, Any] = {}

            def plan(**arguments: Any) -> None:
                inspect.signature(real.plan).bind(None, **arguments)
                self.plans.append(arguments | how)
                state.update(self.change(arguments))

            def run(*qkv: Tensor, **arguments: Any) -> Any:
                inspect.signature(real.run).bind(None, *qkv, **arguments)
                self.runs.append(arguments)
                workspace.fill_(0xFF)
                return _wrapper_run(state, *qkv, **arguments)

            return SimpleNamespace(plan=plan, run=run)

        return make


def _wrapper_run(planned: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
    q_offsets, kv_offsets = planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
    assert planned["qo_indptr"].device.type == "cpu"
    assert len(query) == q_offsets[-1]
    dtypes = tuple(planned[name] for name in ("q_data_type", "kv_data_type", "o_data_type"))
    assert (query.dtype, key.dtype, others["out"].dtype) == dtypes
    sizes = tuple(planned[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"))
    assert (query.shape[1], key.shape[1], query.shape[2], value.shape[2]) == sizes
    assert others["return_lse"] == (others["lse"] is not None)
    for request in range(len(q_offsets) - 1):
        rows, keys = (slice(*offsets[request : request + 2]) for offsets in (q_offsets, kv_offsets))
        _request(
            query,
            rows,
            key[keys],
            value[keys],
            causal=planned["causal"],
            window_left=planned["window_left"],
            scales=(planned["sm_scale"], 1.0),
            sinks=None,
            out=others["out"],
            lse=others["lse"],
            of_nothing=(math.nan, math.nan),
        )
    return (others["out"], others["lse"]) if others["return_lse"] else others["out"]


def _request(
    query: Tensor,
    rows: slice,
    keys: Tensor,
    values: Tensor,
    *,
    causal: bool,
    window_left: int,
    scales: Sequence[float],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    of_nothing: tuple[float, float],
) -> None:
    """Row i of q over L keys sits at L - q + i; one without keys gets `of_nothing`."""
    group = query.shape[1] // keys.shape[1]
    for row in range(rows.start, rows.stop):
        position = len(keys) - (rows.stop - row)
        first = max(0, position - window_left) if causal and window_left >= 0 else 0
        last = max(0, position + 1) if causal else len(keys)
        for head in range(query.shape[1]):
            k, v = (side[first:last, head // group].double() for side in (keys, values))
            if not len(k):
                out[row, head] = of_nothing[0]
                if lse is not None:
                    lse[row, head] = of_nothing[1]
                continue
            logits = (k @ query[row, head].double()) * scales[0]
            sink = torch.empty(0) if sinks is None else sinks[head : head + 1]
            total = torch.cat((logits, sink.double())).logsumexp(0)
            out[row, head] = rounded((torch.exp(logits - total) @ v * scales[1]).float(), out.dtype)
            if lse is not None:
                lse[row, head] = total / math.log(2.0)
