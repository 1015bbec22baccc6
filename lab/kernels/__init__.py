"""Kernels under test: FlashInfer's (`trtllm`), portable Triton ones (`portable`) and others (`peers`), under the same names.

`serving` has the Triton kernels that write metadata: `generate_draft_decode_kv_indices` and `write_forward_metadata`. Importing
this package imports none of them: each module brings its own heavy dependency.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lab.calls import CALL_TYPES, AttentionCall
from lab.extras import require
from lab.gpus import capability_of, family_of

if TYPE_CHECKING:
    from lab.kernels.serving.draft_decode_kv_indices import (
        generate_draft_decode_kv_indices as generate_draft_decode_kv_indices,
    )
    from lab.kernels.serving.forward_metadata import write_forward_metadata as write_forward_metadata

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
    """Return `lab.kernels.trtllm` where FlashInfer has kernels for the GPU, else `lab.kernels.portable`.

    Args:
        device: where it is to run; the GPU if there is one.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    family = family_of(capability_of(where))
    runs_flashinfer = family is not None and family.trtllm_backend is not None
    return importlib.import_module("lab.kernels.trtllm" if runs_flashinfer else "lab.kernels.portable")


class PlannedOnce:
    """An implementation that plans on the host, wrapped so that `prepare` plans once, for lengths, rows and page ids that stay.

    Such an implementation has `plan_<name>` for `<name>`, which takes the same arguments, does the host's work, reads lengths
    and tables, and returns the ready call; an engine does so once for all layers of a pass. What plans nothing is
    prepared as ever.
    """

    def __init__(self, implementation: Any) -> None:
        self._implementation = implementation

    def plans(self, name: str) -> bool:
        """Tell whether calls of the function with this name are planned."""
        return hasattr(self._implementation, f"plan_{name}")

    def __getattr__(self, name: str) -> Any:
        function = name.removeprefix("prepare_")
        is_planned = name.startswith("prepare_") and self.plans(function)
        return getattr(self._implementation, f"plan_{function}" if is_planned else name)


def prepare(implementation: Any, name: str, /, **arguments: Any) -> Callable[[], Any]:
    """Return a call of an implementation's function, ready to be made any number of times.

    FlashInfer's adapter checks and converts the arguments once; its prepared call is FlashInfer's own. The portable one
    checks and allocates once; its prepared call is launches alone (`lab.kernels.portable.triton_call`). One that prepares
    nothing does its whole work in each call, and is timed with it.

    A ready call holds the tensors that it was prepared with, not copies. Their contents may change from call to call, as an
    engine's CUDA-graph buffers do; addresses, shapes, strides, host numbers and bounds are those of the preparation and are not
    looked at again. What the call adds, such as scratch, a workspace or a derived table, belongs to the stream it was prepared
    on: call it there. A CUDA graph that captured it uses all of those: keep it as long as the graph. Prepared during a capture,
    it is good inside that graph alone.

    Args:
        implementation: any object with the function, such as `lab.kernels.portable` or `lab.references`; it may have
            `prepare_<name>` too, which takes the same arguments and returns the ready call.
        name: the function's, such as "trtllm_batch_decode_with_kv_cache".
        arguments: the function's keyword arguments.

    Raises:
        AttributeError: the implementation has no such function.
        NotImplementedError: it does not have an argument that is not at FlashInfer's default.
        Exception: what `prepare_<name>` raises for arguments that it refuses; without one, the first call raises it.
    """
    prepare_it = getattr(implementation, f"prepare_{name}", None)
    if prepare_it is not None:
        return prepare_it(**_taken(prepare_it, name, arguments))
    function = getattr(implementation, name)
    return functools.partial(function, **_taken(function, name, arguments))


def _taken(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that are at FlashInfer's default and unknown to a function.

    Raises:
        NotImplementedError: the function does not have an argument that says something.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some compiled functions have none
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
