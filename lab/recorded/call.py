"""A recorded attention call: the arguments of an engine's call, and what its kernel returned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls import CALL_TYPES, AttentionCall, Problem

RESULTS = ("out", "lse")  # arguments that a call fills


class RecordingError(ValueError):
    """A file or folder that holds no call that the lab can read; the message names it and says why, in one sentence."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The arguments of one call as its recorder copied them, and the results of the kernel.

    Attributes:
        function: the call.
        given: the arguments by name, with tensors on the CPU. `out` and `lse` count for their dtype, shape and strides only.
        out: the output after the call; None if the call did not end.
        lse: the LSE after the call; None if the call did not end or makes none.
        versions: the version of each package in the engine's process.
        lost: what the recorder did not keep, one sentence each.
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
        """Return keyword arguments for an implementation of the call: without the workspace, with results not yet written."""
        unwritten = {
            name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
            for name in RESULTS
            if isinstance(each := self.given.get(name), torch.Tensor)
        }
        return {**self.given, "workspace_buffer": None, **unwritten}

    def problem(self) -> Problem:
        """Check the arguments and pose the problem.

        Raises:
            TypeError, ValueError: the arguments make no sense, such as a page id outside the pool.
            NotImplementedError: the lab does not model an argument.
        """
        problem: Problem = CALL_TYPES[self.function](**self.arguments()).problem()
        return problem
