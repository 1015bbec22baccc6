"""Kernels under test: FlashInfer's (`trtllm`), portable Triton kernels (`portable`) and other projects' kernels (`peers`).

The functions of these three packages have the names and arguments of FlashInfer's functions. `serving` has Triton kernels that
write page tables, lengths and K/V lists. Importing `lab.kernels` imports none of these packages, because each has its own heavy
dependency.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from lab.calls import CALL_TYPES, AttentionCall
from lab.extras import require
from lab.gpus import capability_of, family_of

_METADATA_KERNELS = {
    "generate_draft_decode_kv_indices": "lab.kernels.serving.draft_decode_kv_indices",
    "write_forward_metadata": "lab.kernels.serving.forward_metadata",
}


def __getattr__(name: str) -> Any:
    if name in _METADATA_KERNELS:
        require(f"lab.kernels.{name}", "triton")
        return getattr(importlib.import_module(_METADATA_KERNELS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def default_implementation(device: torch.device | str | None = None) -> ModuleType:
    """Return `lab.kernels.trtllm` if FlashInfer has TRT-LLM kernels for the device (None: the GPU, if any), else `portable`."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    family = family_of(capability_of(where))
    runs_flashinfer = family is not None and family.trtllm_backend is not None
    return importlib.import_module("lab.kernels.trtllm" if runs_flashinfer else "lab.kernels.portable")


class PlannedOnce:
    """Wrap an implementation that has functions `plan_<name>`: `lab.kernels.prepare` then reads lengths once, not in each run.

    `plan_<name>` takes the arguments of `<name>`, reads lengths and page tables on the host, and returns a function that runs
    the call. The wrapper's `prepare_<name>` is `plan_<name>`. Lengths, numbers of rows and page ids must not change between
    runs of the returned function; they do not change between the layers of one forward pass.
    """

    def __init__(self, implementation: Any) -> None:
        self._implementation = implementation

    def plans(self, name: str) -> bool:
        return hasattr(self._implementation, f"plan_{name}")

    def __getattr__(self, name: str) -> Any:
        function = name.removeprefix("prepare_")
        is_planned = name.startswith("prepare_") and self.plans(function)
        return getattr(self._implementation, f"plan_{function}" if is_planned else name)


def prepare(implementation: Any, name: str, /, **arguments: Any) -> Callable[[], Any]:
    """Return a function that runs one call of an implementation, such as `lab.kernels.portable`, any number of times.

    If the implementation has `prepare_<name>`, that function checks the arguments and allocates memory once, and a run only
    launches kernels. Otherwise each run does the whole work of `<name>`.

    The returned function keeps the given tensors, not copies. The contents of the tensors may change from run to run.
    Addresses, shapes, strides and numbers on the host, such as `max_seq_len`, are read at the preparation only. Scratch memory,
    workspaces and page tables that the preparation allocates belong to the stream on which the call was prepared: run the call
    on that stream. A CUDA graph that captured the call uses this memory: keep the returned function as long as the graph. A
    call that was prepared during a capture may run only inside that graph.

    Raises:
        AttributeError: the implementation has no such function.
        NotImplementedError: an argument that the function does not take differs from FlashInfer's default.
        Exception: any error that the implementation raises for these arguments; without `prepare_<name>`, the first run raises
            it.
    """
    prepare_it = getattr(implementation, f"prepare_{name}", None)
    if prepare_it is not None:
        return prepare_it(**_taken(prepare_it, name, arguments))
    function = getattr(implementation, name)
    return functools.partial(function, **_taken(function, name, arguments))


def _taken(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a compiled function may have no signature
        return arguments
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return arguments
    is_known = name in {call.value for call in CALL_TYPES}
    defaults = inspect.signature(CALL_TYPES[AttentionCall(name)]).parameters if is_known else {}
    taken = {each: value for each, value in arguments.items() if each in parameters}
    for each in arguments.keys() - taken.keys():
        value = arguments[each]
        if value is not None and not (each in defaults and value == defaults[each].default):
            raise NotImplementedError(f"{getattr(function, '__name__', name)} takes no {each}, here {value!r}")
    return taken
