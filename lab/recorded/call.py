"""A recorded attention call: the arguments of an engine's call, and the results of its kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls import CALL_TYPES, AttentionCall, Problem

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
    """

    function: AttentionCall
    given: Mapping[str, Any]
    out: torch.Tensor | None
    lse: torch.Tensor | None
    versions: Mapping[str, str]
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.given) - set(CALL_TYPES[self.function].__dataclass_fields__))
        if unknown:
            raise RecordingError(
                f"{self.function.value} was recorded with {', '.join(unknown)}, which FlashInfer 0.7.2 does not have: "
                f"the engine had {self.versions.get('flashinfer', 'an unknown release')}"
            )

    def arguments(self) -> dict[str, Any]:
        """Return the recorded arguments as keyword arguments of a new call: without the workspace, with uninitialised `out` and
        `lse`.
        """
        unwritten = {
            name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
            for name in RESULTS
            if isinstance(each := self.given.get(name), torch.Tensor)
        }
        return {**self.given, "workspace_buffer": None, **unwritten}

    def problem(self) -> Problem:
        """Check the arguments, and return the attention that they define, for the computation of references.

        Raises:
            TypeError, ValueError: the arguments are invalid, such as a page id outside the pool.
            NotImplementedError: the lab does not model an argument.
        """
        problem: Problem = CALL_TYPES[self.function](**self.arguments()).problem()
        return problem
