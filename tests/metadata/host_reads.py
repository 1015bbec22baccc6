"""A detector of operators that make the host wait for the device, which works without one."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ForbidHostReads(TorchDispatchMode):
    """Raises at the operators whose result, or whose result's shape, the host must wait for."""

    FORBIDDEN = (
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.masked_select",
        "aten.repeat_interleave.Tensor",
        "aten.unique",
        "aten._unique",
        "aten.equal",
        "aten.is_nonzero",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = isinstance(args[1], list | tuple) if str(func).startswith("aten.index") else False
        if masks and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            raise AssertionError(f"{func} with a mask reads the device")
        if str(func).startswith(self.FORBIDDEN):
            raise AssertionError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))
