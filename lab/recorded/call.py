"""A recorded attention call: the arguments of an engine's call, and the results of its kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls import CALL_TYPES, AttentionCall, Problem
from lab.calls.ragged_context import MIRRORS

RESULTS = ("out", "lse")  # arguments that a call fills


class RecordingError(ValueError):
    """A file or folder has no call that the lab can read; the message has the path and the reason, in one sentence."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The recorded arguments of one call, and the results of the kernel.

    Attributes:
        function: the function that was called.
        given: the arguments by name, with tensors on the CPU. For `out` and `lse` only dtype, shape and strides matter.
        out: the output after the call; None if the call did not end.
        lse: the LSE after the call; None if the call did not end or returns no LSE.
        versions: the version of each package in the engine's process.
        lost: sentences about data that the recorder did not keep.
        drawn: names of the arguments whose contents were replaced by drawn values.
    """

    function: AttentionCall
    given: Mapping[str, Any]
    out: torch.Tensor | None
    lse: torch.Tensor | None
    versions: Mapping[str, str]
    lost: tuple[str, ...] = ()
    drawn: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.given) - set(CALL_TYPES[self.function].__dataclass_fields__))
        if unknown:
            raise RecordingError(
                f"{self.function.value} was recorded with {', '.join(unknown)}, which FlashInfer 0.7.2 does not have: "
                f"the engine had {self.versions.get('flashinfer', 'an unknown release')}"
            )

    def arguments(self, device: torch.device | None = None) -> dict[str, Any]:
        """Return the recorded arguments as keyword arguments of a new call: without the workspace, with uninitialised `out` and
        `lse`.

        Args:
            device: copy the tensors to this device, with their strides. Lengths that FlashInfer reads on the host are copied to
                the CPU. None: no copies.
        """
        return {
            name: _placed(value, torch.device("cpu") if device and name in MIRRORS else device, name not in RESULTS)
            for name, value in {**self.given, "workspace_buffer": None}.items()
        }

    def problem(self) -> Problem:
        """Check the arguments, and return the attention that they define, for the computation of references.

        Raises:
            TypeError, ValueError: the arguments are invalid, such as a page id outside the pool.
            NotImplementedError: the lab does not model an argument.
        """
        problem: Problem = CALL_TYPES[self.function](**self.arguments()).problem()
        return problem


def _placed(value: Any, device: torch.device | None, has_contents: bool) -> Any:
    """Copy a tensor, or each tensor of a tuple or list, to a device; without its contents, the copy is uninitialised. Return
    other values, and with contents and without a device tensors too, as they are.
    """
    if isinstance(value, tuple | list):
        return type(value)(_placed(each, device, has_contents) for each in value)
    if not isinstance(value, torch.Tensor) or (device is None and has_contents):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return copy.copy_(value) if has_contents else copy
