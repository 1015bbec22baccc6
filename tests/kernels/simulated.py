"""What the simulations of FlashInfer's kernels share: what stands in for the installed package, and one row of attention."""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.references.quantization import rounded

MEBIBYTE = 2**20

Arguments = dict[str, Any]


@dataclass
class Simulated:
    """Stands in for `lab.kernels.flashinfer_call.installed`. The real signatures are bound in each call, plan and run.

    Attributes:
        functions, wrappers: names that are simulated; others are the installed package's own.
        change: tampers with the arguments of a call or a plan before they are used.
        calls: (function, arguments as passed) of every call.
        plans: arguments of every plan with those of its wrapper, whose name is "wrapper"; and runs of every run.
    """

    functions: ClassVar[tuple[str, ...]] = ()
    wrappers: ClassVar[tuple[str, ...]] = ()

    change: Callable[[Arguments], Arguments] = lambda arguments: arguments
    calls: list[tuple[str, Arguments]] = field(default_factory=list)
    plans: list[Arguments] = field(default_factory=list)
    runs: list[Arguments] = field(default_factory=list)

    def installed(self, module: str, name: str) -> tuple[Any, inspect.Signature]:
        real = getattr(importlib.import_module(module), name)
        signature = inspect.signature(real)
        if name in self.wrappers:
            return self._wrapper(real), signature
        if name not in self.functions:
            return real, signature

        def function(**arguments: Any) -> Any:
            self.calls.append((name, arguments))
            bound = signature.bind(**self.change(arguments))
            bound.apply_defaults()
            return self.call(real, bound.arguments)

        return function, signature

    def call(self, real: Callable[..., Any], arguments: Arguments) -> Any:
        raise NotImplementedError

    def run(self, planned: Arguments, **arguments: Any) -> Any:
        """Run a wrapper, which knows what it was planned with and nothing else."""
        raise NotImplementedError

    def _wrapper(self, real: Any) -> Any:
        def make(workspace: Tensor, **how: Any) -> Any:
            inspect.signature(real).bind(workspace, **how)
            state: Arguments = {}

            def plan(*args: Any, **arguments: Any) -> None:
                bound = inspect.signature(getattr(real, "_plan_impl", real.plan)).bind(None, *args, **arguments)
                bound.apply_defaults()
                self.plans.append(dict(bound.arguments) | how | {"wrapper": real.__name__})
                state.update(self.change(self.plans[-1]))

            def run(*args: Any, **arguments: Any) -> Any:
                bound = inspect.signature(real.run).bind(None, *args, **arguments)
                bound.apply_defaults()
                self.runs.append(arguments)
                workspace.fill_(0xFF)
                return self.run(state, **{name: value for name, value in bound.arguments.items() if name != "self"})

            return SimpleNamespace(plan=plan, run=run)

        return make


def write_scratch(workspace: Tensor) -> None:
    """Write a workspace as XQA does: its scratch whole, its semaphores not, which must be zero."""
    semaphores, scratch = workspace.view(torch.uint8).split([8 * MEBIBYTE, workspace.nbytes - 8 * MEBIBYTE])
    assert scratch.numel() > 0
    assert not semaphores.any(), "semaphores must be zero at each launch"
    scratch.fill_(0xFF)


def paged(cache: Tensor, page_ids: Tensor, kv_len: int, strides: Sequence[int] | None = None) -> Tensor:
    """[kv_len, num_kv_heads, head_dim] in float64 of a [pages, heads, tokens, head_dim] cache, read with `strides`."""
    cache = cache if strides is None else torch.as_strided(cache, cache.shape, strides)
    page_size = cache.shape[2]
    tokens = [cache[int(page_ids[key // page_size]), :, key % page_size].to(torch.float64) for key in range(kv_len)]
    return torch.stack(tokens) if tokens else torch.empty(0, *cache.shape[1::2], dtype=torch.float64)


def attend(
    row: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Sequence[int],
    scale: float,
    out_scale: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """One query row, [num_qo_heads, head_dim], over the keys that it sees; keys and values [n, num_kv_heads, size]."""
    group, index = row.shape[0] // keys.shape[1], torch.tensor(list(seen), dtype=torch.int64)
    for head, q in enumerate(row.to(torch.float64)):
        k, v = (side[index, head // group].to(torch.float64) for side in (keys, values))
        logits = k @ q * scale
        everything = logits if sinks is None else torch.cat((logits, sinks[head : head + 1].to(torch.float64)))
        total = everything.logsumexp(0) if len(everything) else torch.tensor(-math.inf, dtype=torch.float64)
        out[head] = rounded(torch.exp(logits - total) @ v * out_scale, out.dtype)
        if lse is not None:
            lse[head] = total / math.log(2.0)
