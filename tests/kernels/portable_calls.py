"""The calls of the portable kernels as their tests pose them, on a device, with results held to the float64 references."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.kernels import portable
from tests.cases import (
    CONTEXT,
    MLA,
    RAGGED,
    Arguments,
    Batch,
    context_arguments,
    decode_arguments,
    latent_batch,
    mla_arguments,
    ragged_arguments,
    ragged_batch,
    random_batch,
)
from tests.kernels.held import BF16, E4M3, FP16, on

NAN = math.nan
# Of a batch's tensors; all else that a test changes is an argument of the call.
DRAWN = ("heads", "head_dim", "rank", "rope", "dims", "dtype", "kv_dtype", "seed", "magnitude")


def sinks_of(num_heads: int) -> Tensor:
    """A distinct logit per head, around the size of the largest scores."""
    return torch.linspace(-2.0, 6.0, num_heads)


def batch_of(function: str, q_lens: list[int], kv_lens: list[int], *, heads: Any = 2, **options: Any) -> Batch:
    """Return a random batch for a function; a number of `heads` is of query heads, with one K/V head where it may be."""
    if function == MLA:
        return latent_batch(q_lens, kv_lens, heads=heads, **{"rank": 64, "rope": 16} | options)
    if function == RAGGED:
        heads = (heads, heads) if isinstance(heads, int) else heads
        if "kv_dtype" in options:  # the query has it too
            options["dtype"] = options.pop("kv_dtype")
        return ragged_batch(q_lens, kv_lens, heads=heads, **{"dims": (48, 32)} | options)
    heads = (heads, 1) if isinstance(heads, int) else heads
    return random_batch(q_lens, kv_lens, heads=heads, **{"head_dim": 64} | options)


def arguments_of(function: str, batch: Batch, page_size: int = 16, device: str = "cpu", **changes: Any) -> Arguments:
    """Return the call that poses a batch on a device, into an output and an LSE full of NaN unless others are given.

    `sinks` are a ragged call's, too. `out_dtype` is the query's, or bf16 of e4m3. Requests of several widths make a decode
    call with offsets.
    """
    out_dtype = changes.pop("out_dtype", None)
    changes = {"bmm1_scale": 0.125} | changes
    if function == RAGGED:
        arguments = ragged_arguments(batch, attention_sinks=changes.pop("sinks", None), **changes)
    elif function == CONTEXT:
        arguments = context_arguments(batch, page_size, out_dtype=None, **changes)
    else:
        make = mla_arguments if function == MLA else partial(decode_arguments, out_dtype=None)
        arguments = make(batch, page_size, **{"ragged": len(set(batch.q_lens)) > 1 or 0 in batch.q_lens} | changes)
    by_head, own = arguments["query"].shape[:-1], batch.queries[0].dtype
    if "out" not in changes:
        dtype = out_dtype or (BF16 if own == E4M3 else own)
        arguments["out"] = torch.full((*by_head, batch.values[0].shape[2]), NAN).to(dtype)
    elif "out_dtype" in arguments:
        arguments["out_dtype"] = out_dtype
    if "lse" not in changes and arguments["return_lse"]:
        arguments["lse"] = torch.full(by_head, NAN)
    return {name: on(device, value) for name, value in arguments.items()}


def truth_of(function: str, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return the reference's output in float64, and its LSE."""
    query = arguments["query"]
    if function in (MLA, RAGGED):
        size = arguments["kv_lora_rank"] if function == MLA else arguments["value"].shape[2]
        exact: Arguments = {"out": query.new_empty((*query.shape[:-1], size), dtype=torch.float64)}
    else:
        exact = {"out": None, "out_dtype": torch.float64}
    return getattr(references, function)(**arguments | exact | {"lse": None, "return_lse": True})


@dataclass(frozen=True)
class PortableKernel:
    """A function of `lab.kernels.portable`, and the device to run it on."""

    function: str
    device: str = "cpu"

    def pose(self, q_lens: list[int], kv_lens: list[int], page_size: int = 16, **changes: Any) -> Arguments:
        """Return the call of a random batch; `changes` are of the batch (`DRAWN`) and of the arguments."""
        drawn = {name: changes.pop(name) for name in DRAWN if name in changes}
        batch = batch_of(self.function, q_lens, kv_lens, **drawn)
        return arguments_of(self.function, batch, page_size, self.device, **changes)

    def run(self, arguments: Arguments) -> Any:
        """Make a call; earlier ones with other shares than a test has now are forgotten."""
        call = getattr(portable, self.function)
        call.cache_clear()
        return call(**arguments)

    def right(self, *lengths: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        """`hold` the call of a random batch."""
        return self.hold(self.pose(*lengths, **changes))

    def hold(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Run a call, and hold every output vector and LSE to float64 by the judge's bound; return both as rows.

        The kernels round e4m3 operands to 16 bits.
        """
        out, lse = self.run(arguments)
        assert all(
            given is None or given is written for given, written in ((arguments["out"], out), (arguments["lse"], lse))
        )
        arithmetic = FP16 if arguments["query"].dtype == FP16 else BF16
        references.assert_close_to_reference((out, lse), arithmetic=arithmetic, **arguments)
        return out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])


def kernels(*functions: str, counts: tuple[int, ...] = (1, 2)) -> pytest.MarkDecorator:
    """Parametrize `kernel` with functions, each with its keys shared out so often (`split`); a ragged call shares none."""
    params = [(function, count) for function in functions for count in counts if count == 1 or function != RAGGED]
    return pytest.mark.parametrize("kernel", params, indirect=True, ids=map(kernel_id, params))


def kernel_id(param: tuple[str, int]) -> str:
    return f"{param[0]}/{param[1]}"
