"""The calls of the portable kernels as their tests pose them, on a device, with results held to the float64 references."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.kernels import portable
from tests import cases
from tests.cases import BATCHES, CONTEXT, DECODE, MLA, RAGGED, Arguments, Batch
from tests.kernels.held import BF16, E4M3, FP16, on

NAN = math.nan
# Of a batch's tensors; all else that a test changes is an argument of the call.
DRAWN = ("heads", "head_dim", "rank", "rope", "dims", "dtype", "kv_dtype", "seed", "magnitude")


def sinks_of(num_heads: int) -> Tensor:
    """A distinct logit per head, around the size of the largest scores."""
    return torch.linspace(-2.0, 6.0, num_heads)


SIZES: dict[str, Arguments] = {
    DECODE: {"head_dim": 64},
    CONTEXT: {"head_dim": 64},
    MLA: {"rank": 64, "rope": 16},
    RAGGED: {"dims": (48, 32)},
}


def batch_of(function: str, q_lens: list[int], kv_lens: list[int], *, heads: Any = 2, **options: Any) -> Batch:
    """Return a random batch for a function; a number of `heads` is of query heads, with one K/V head where it may be."""
    if isinstance(heads, int) and function != MLA:
        heads = (heads, heads) if function == RAGGED else (heads, 1)
    if function == RAGGED and "kv_dtype" in options:  # the query has it too
        options["dtype"] = options.pop("kv_dtype")
    return BATCHES[function](q_lens, kv_lens, heads=heads, **SIZES[function] | options)


def arguments_of(function: str, batch: Batch, page_size: int = 16, device: str = "cpu", **changes: Any) -> Arguments:
    """Return the call that poses a batch on a device, into an output and an LSE full of NaN unless others are given.

    `sinks` are a ragged call's, too. `out_dtype` is the query's, or bf16 of e4m3.
    """
    out_dtype = changes.pop("out_dtype", None)
    own: Arguments = {"bmm1_scale": 0.125}
    if function == RAGGED:
        own["attention_sinks"] = changes.pop("sinks", None)
    else:
        own["page_size"] = page_size
    if function in (DECODE, CONTEXT):
        own["out_dtype"] = out_dtype if "out" in changes else None
    arguments = cases.arguments_of(function, batch, **own | changes)
    by_head, dtype = arguments["query"].shape[:-1], batch.queries[0].dtype
    if "out" not in changes:
        dtype = out_dtype or (BF16 if dtype == E4M3 else dtype)
        arguments["out"] = torch.full((*by_head, batch.values[0].shape[2]), NAN).to(dtype)
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


def sizes_on_a_gpu(
    batch_size: int, q_len: int, kv_len: int, *, num_kv_heads: int = 8, head_dim: int = 128, window_left: int = -1
) -> Any:
    """What the host knows of a decode on a GPU with 32 query heads."""
    return SimpleNamespace(
        query=SimpleNamespace(device=torch.device("cuda")),
        group=32 // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        batch_size=batch_size,
        num_rows=batch_size * q_len,
        is_block_sparse=False,
        max_q_len=q_len,
        max_kv_len=kv_len,
        window_left=window_left,
    )


def kernels(*functions: str, counts: tuple[int, ...] = (1, 2)) -> pytest.MarkDecorator:
    """Parametrize `kernel` with functions, each with its keys shared out so often (`split`); a ragged call shares none."""
    params = [(function, count) for function in functions for count in counts if count == 1 or function != RAGGED]
    return pytest.mark.parametrize("kernel", params, indirect=True, ids=map(kernel_id, params))


def kernel_id(param: tuple[str, int]) -> str:
    return f"{param[0]}/{param[1]}"
