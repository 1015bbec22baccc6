"""A B200 that is not there, for tests: its launches, held to what they must say, and the arithmetic that they ask for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from lab.dry_run.build import why_not_built
from lab.dry_run.launches import Launch, TensorMap
from lab.dry_run.machine import machine
from lab.kernels import trtllm

NEEDS_A_LAUNCHER = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))


def launches_of(run: Callable[[Any], object]) -> list[Launch]:
    """Return the attention launches of what is run with `lab.kernels.trtllm`; each is computed too."""
    with machine("b200", computes=True) as gpu:
        run(trtllm)
        return [launch for launch in gpu.launches if launch.name.startswith("fmhaSm")]


def on_a_b200(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function of FlashInfer's there; skip with the reason where its launcher cannot be compiled."""
    if (reason := why_not_built()) is not None:
        pytest.skip(reason)
    with machine("b200", computes=True):
        return function(**arguments)


def told_by(module: str, function: str, folder: str) -> Any:
    """What a function of a test module returns in a fresh Python that finds FlashInfer in a folder, or as it is installed."""
    program = f"import json; from {module} import {function}; print(json.dumps({function}()))"
    path = os.pathsep.join(filter(None, (folder, os.getcwd())))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def tensor_map(launch: Launch, member: str) -> TensorMap:
    return next(each for each in launch.tma if each.member == member)


def hold_params(launch: Launch, **expected: Any) -> None:
    """Hold members of `KernelParams`; numbers with a point to float32's precision."""
    got = {name: getattr(launch.params, name) for name in expected}
    assert got == {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for name, value in expected.items()
    }


def hold_map(launch: Launch, member: str, side: Tensor, dims: Sequence[int]) -> None:
    """Hold a descriptor of K or V to the tensor [pages, heads, tokens, head_dim] that it must describe."""
    held = tensor_map(launch, member)
    strides_bytes = [side.stride(axis) * side.element_size() for axis in (2, 1, 0)]
    if dims[3] == 1:  # K and V that are not paged: one page, whose stride means nothing
        strides_bytes[2] = 0
    assert held.address == side.data_ptr()
    assert held.dims == tuple(dims)
    assert list(held.strides_bytes) == strides_bytes
