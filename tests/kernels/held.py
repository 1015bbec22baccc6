"""Results of a kernel held to the float64 references, whichever of FlashInfer's calls: shared by the tests of this room."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.gpus import capability_of
from lab.kernels import portable
from lab.kernels.support import Kernel, why_not

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Unit roundoff: as far as one right rounding may move an element, and so a vector.
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, E4M3: 2.0**-4, FP32: 2.0**-24}
# float32 sums of a kernel and float64 ones of the reference, over at most 576 products and 400 keys.
FLOAT32_SUMS = 1e-5

Arguments = dict[str, Any]


def on(device: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on(device, each) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def sinks_of(num_heads: int) -> Tensor:
    """A distinct logit per head, around the size of the largest scores."""
    return torch.linspace(-2.0, 6.0, num_heads)


def assert_as_right_as_the_control(arguments: Arguments, out: Tensor, lse: Tensor) -> None:
    """Hold each vector and its LSE to float64, by the judge's bound; a kernel rounds e4m3 operands to 16 bits."""
    arithmetic = FP16 if arguments["query"].dtype == FP16 else BF16
    references.assert_close_to_reference((out, lse), arithmetic=arithmetic, **arguments)


def assert_declined(call_type: Any, kernel: Kernel, arguments: Arguments) -> None:
    """A portable kernel raises `why_not`'s sentence and writes nothing."""
    arguments["out"].fill_(77.0)
    problem = call_type(**arguments).problem()
    reason = why_not(kernel, capability_of(problem.query.device), problem)
    assert reason is not None
    with pytest.raises(NotImplementedError) as error:
        getattr(portable, call_type.function.value)(**arguments)
    assert str(error.value) == reason
    assert bool((arguments["out"] == 77.0).all())


def assert_rounded(implementation: Any, name: str, arguments: Arguments, roundings: int = 1) -> None:
    """Hold a simulation, which computes in float64, to the reference but for its roundings of the output."""
    result, expected = (getattr(module, name)(**arguments) for module in (implementation, references))
    if arguments["return_lse"]:
        torch.testing.assert_close(result[1], expected[1], rtol=1e-6, atol=1e-6)
        result, expected = result[0], expected[0]
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    flat = (side.reshape(-1, *side.shape[-2:]) for side in (result, expected))
    assert float(references.relative_l2(*flat).max()) <= roundings * ROUNDOFF[result.dtype]
