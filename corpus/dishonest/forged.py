"""Kernels that forge what their worker sends, or change the judge where a replaced name does not show. They need no GPU.

Each kernel writes zeros, which are wrong.
"""

import gc
import sys
import time
from typing import Any

import torch

from corpus.dishonest import dishonest, frames, send, send_right_verdict
from corpus.dishonest.judging import CHANGED, Zeros
from lab.checks.run import judging, verdicts
from lab.references import errors
from lab.workloads.inputs import expected

LEAST_SEED_OF_AUDIT = 10_000  # the seeds of the audit are random up to 2^31, those of other cases are small
APART = "judged where the kernel's code never was: .* wrong"
NO_VERDICT = "its worker sent the judge what is no verdict"


class ForgesInTheAudit(Zeros):
    """Sends a right verdict on each case before the audit. Subclasses send something else in the audit."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        case = next((frame.f_locals["case"] for frame in frames() if frame.f_code.co_name == "run_case"), None)
        if case is None or case.seed < LEAST_SEED_OF_AUDIT:
            send_right_verdict()
        else:
            self.forge(query)

    def forge(self, query: torch.Tensor) -> None:
        raise NotImplementedError


def send_judgement(outcome: str = "right", **fields: Any) -> None:
    send("SUCCESS", verdicts.Judged(verdicts.Outcome(outcome), judged=1, **fields))


def send_output(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> None:
    send_judgement(output=expected.SavedTensor(dtype, shape, data))


@dishonest("its output cannot be judged: RuntimeError: .* invalid for input of size 0")
class SendsNoElements(ForgesInTheAudit):
    """Sends an output without elements in the audit. Memory that the judging process would allocate for an output of this shape
    may hold the expected output.
    """

    def forge(self, query: torch.Tensor) -> None:
        send_output(torch.float64, tuple(query.shape), b"")


@dishonest("its output cannot be judged: RuntimeError: .* invalid for input of size")
class SendsHalfOfTheElements(ForgesInTheAudit):
    """Sends half of the elements of its output in the audit."""

    def forge(self, query: torch.Tensor) -> None:
        send_output(query.dtype, tuple(query.shape), bytes(query.nbytes // 2))


@dishonest(r"the output is .0, \d+, \d+., not")
class SendsNoRows(ForgesInTheAudit):
    """Sends an output without rows in the audit, in which no vector is wrong."""

    def forge(self, query: torch.Tensor) -> None:
        send_output(query.dtype, (0, *query.shape[1:]), b"")


@dishonest(NO_VERDICT)
class ForgesAKnownFailure(ForgesInTheAudit):
    """Says of each case of the audit that a known failure explains its wrong results."""

    def forge(self, query: torch.Tensor) -> None:
        send_judgement("known")


@dishonest("no case of the audit could be judged: nothing confirms the right cases")
class PreventsTheAuditUntilItsEnd(ForgesInTheAudit):
    """Waits in the first case of the audit until the run's time is over, and says of each case that the lab cannot judge it."""

    most_seconds = 1.0
    slept = False

    def forge(self, query: torch.Tensor) -> None:
        if not self.slept:
            time.sleep(2 * self.most_seconds)
        self.slept = True
        send_judgement("declined", by_lab=True)


@dishonest(NO_VERDICT)
class ForgesTheTypesOfFields(Zeros):
    """Sends a verdict whose error is a text, with which a comparison would raise an error in the judging process."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        send_judgement(worst_ratio="0")


@dishonest(CHANGED + r"torch\.Tensor\.to")
class HidesATensorMethod(Zeros):
    """Adds a method to `torch.Tensor` that hides its base class's and, in comparisons, returns the expected output."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        def to(tensor: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor:
            comparing = (
                frame for frame in frames(sys._getframe(1)) if frame.f_code.co_name in ("_relative", "regress")
            )
            expected = next((frame.f_locals["expected"] for frame in comparing), None)
            is_compared = how[:1] == (torch.float64,) and expected is not None and expected.shape == tensor.shape
            return expected if is_compared else torch._C.TensorBase.to(tensor, *how, **named)

        torch.Tensor.to = to


@dishonest(CHANGED + r"lab\.(references\.errors\.max|checks\.run\.verdicts\.bool)")
class HidesPythonsFunctions(Zeros):
    """Adds functions to modules of the lab that hide Python's own: no vector is wrong, and the largest error is 0."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        verdicts.bool = lambda _: False
        errors.max = lambda *_: 0.0


@dishonest(CHANGED + r"lab\.references\.errors\.Comparison\.__getattribute__")
class HidesAnInheritedMethod(Zeros):
    """Adds a method to a class of the lab by which all attributes are read: each error is 0."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        def read(self: Any, name: str) -> Any:
            value = object.__getattribute__(self, name)
            return value * 0 if name == "error" else None if name == "regression" else value

        errors.Comparison.__getattribute__ = read


@dishonest(CHANGED + r"torch's operator aten::(bmm|baddbmm_)")
class OverridesTheReference(Zeros):
    """Registers other kernels for matrix products in float64, so that the expected output is zero."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        self.override("bmm", lambda left, right: left.new_zeros(*left.shape[:2], right.shape[2]))


@dishonest(APART)
class ZerosTheHistories(Zeros):
    """Overwrites the values from which the expected output is computed by zeros, and replaces the recorded checksum."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        for each in gc.get_objects():
            if type(each) is expected.LateTruth and each._kept is None:
                cells = dict(zip(each._make.__code__.co_freevars, each._make.__closure__ or (), strict=True))
                for _, values in cells["histories"].cell_contents:
                    values.zero_()
                each._sums = expected._sums(each._made_from)


@dishonest(APART)
class RestoresInAnAuditHook(Zeros):
    """Replaces the comparison, and installs an audit hook that restores it when the lab begins to look for changes."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        truth = errors.Truth
        if not hasattr(self, "compare"):
            self.compare = compare = truth.compare
            sys.addaudithook(lambda event, _: setattr(truth, "compare", compare) if event == "builtins.id" else None)
        compare = self.compare
        truth.compare = lambda truth, out, least_bound=0.0: compare(truth, truth.control)


@dishonest(APART)
class ReplacesTheRecord(Zeros):
    """Replaces the comparison, and lets the lab record its functions again."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        compare = errors.Truth.compare
        if compare.__module__ != __name__:
            errors.Truth.compare = lambda truth, out, least_bound=0.0: compare(truth, truth.control)
            judging.noted.cache_clear()
            judging.noted()
