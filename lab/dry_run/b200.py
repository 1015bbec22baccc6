"""Provide FlashInfer's TRT-LLM functions for CPU tensors, as if the tensors were on a B200.

FlashInfer's launcher selects the kernel and fills its parameters, and `lab.dry_run.arithmetic` computes attention from them. So
`lab judge lab.dry_run.b200 --device cpu` judges *the arguments of the launch*: a wrong stride, offset, length, table, window or
scale that the lab passes gives a wrong output. NVIDIA's machine code is not judged: the bugs of a kernel, its rounding and its
writes outside the output show only on a B200. A call is supported if the kernel table of flashinfer-cubin 0.6.13 has a kernel
for it.
"""

import functools
from collections.abc import Callable
from typing import Any

from lab.dry_run.build import NotBuiltError
from lab.dry_run.machine import machine
from lab.dry_run.sweep_points import SWEPT
from lab.kernels import trtllm


@functools.cache
def __getattr__(name: str) -> Callable[..., Any]:
    """Return FlashInfer's attention function `name`, changed to take CPU tensors as if they were on a B200."""
    if name not in {each.value for each in SWEPT}:
        raise AttributeError(name)
    function = getattr(trtllm, name)

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        try:
            with machine("b200", computes=True):
                # The judge's workspaces on a CPU are too small for a B200's call: the lab allocates one.
                return function(**arguments | {"workspace_buffer": None})
        except NotBuiltError as error:
            raise NotImplementedError(str(error)) from error

    return call
