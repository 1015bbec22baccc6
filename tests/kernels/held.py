"""What the tests of this room share: dtypes, their roundings, a device, and a simulation held to the float64 references."""

from typing import Any

import torch
from torch import Tensor

from lab import references
from tests.cases import Arguments

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Unit roundoff: as far as one right rounding may move an element, and so a vector.
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, E4M3: 2.0**-4, FP32: 2.0**-24}
# float32 sums of a kernel and float64 ones of the reference, over at most 576 products and 400 keys.
FLOAT32_SUMS = 1e-5


def zeros(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def on(device: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on(device, each) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def assert_rounded(implementation: Any, name: str, arguments: Arguments, roundings: int = 1) -> None:
    """Hold a simulation, which computes in float64, to the reference but for its roundings of the output."""
    given = {each: arguments[each] for each in ("out", "lse") if arguments.get(each) is not None}
    own = {each: torch.empty_like(tensor) for each, tensor in given.items()}  # results of the reference's own
    result, expected = (
        getattr(module, name)(**arguments | results) for module, results in ((implementation, given), (references, own))
    )
    if arguments["return_lse"]:
        torch.testing.assert_close(result[1], expected[1], rtol=1e-6, atol=1e-6)
        result, expected = result[0], expected[0]
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    flat = (side.reshape(-1, *side.shape[-2:]) for side in (result, expected))
    assert float(references.relative_l2(*flat).max()) <= roundings * ROUNDOFF[result.dtype]
