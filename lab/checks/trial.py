"""One case of one check: what an implementation gives, and everything that is wrong about it."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.checks.attention_inputs import AttentionInputs, build_attention
from lab.checks.space import Space
from lab.references.truth import Rules, Truth, truth_of_requests
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import ATTENTION, Interface


class Declined(NotImplementedError):  # noqa: N818 - not an error of anybody's
    """The implementation refused a call, or has no such parameter."""


class Raised(Exception):  # noqa: N818 - the implementation's error, carried past the check
    """The implementation raised what is no refusal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"it raised {type(error).__name__}: {error}")


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its refusals as Declined: NotImplementedError, ValueError, and a missing parameter.

    Whatever else it raises, SystemExit too, is Raised, so that nobody takes an error of the check for one of the function's.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have none
        signature = None

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        if signature is not None:
            try:
                signature.bind(*args, **arguments)
            except TypeError as error:
                raise Declined(f"it does not take these arguments: {error}") from error
        try:
            return function(*args, **arguments)
        except (NotImplementedError, ValueError) as error:
            raise Declined(str(error)) from error
        except (Exception, SystemExit) as error:  # somebody else's code may raise anything
            raise Raised(error) from error

    return call


def _preparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that prepares a call, with its refusals and the prepared call's as Declined."""
    return lambda **arguments: refusing(refusing(prepare)(**arguments))


def _missing(interface: Interface) -> Callable[..., Any]:
    def decline(**arguments: Any) -> None:
        raise Declined(f"it has no {interface.value}")

    return decline


class Result(NamedTuple):
    """The results of a call: out [num_rows, num_qo_heads, head_dim], and lse [num_rows, num_qo_heads] or None."""

    out: Tensor
    lse: Tensor | None


class Trial:
    """A case being judged. A check calls, and holds results against truths; what fails is noted and the check goes on.

    Attributes:
        implementation: what is judged.
        case: of what; a frozen dataclass.
        device: where.
        space: the axes within which a check may vary the case.
        wrongs: what was wrong, a sentence each.
        declines: what was refused of the check's variations, a sentence each.
        worst_ratio: the largest error over its bound.
        judged: results that were held against something.
    """

    def __init__(self, implementation: Any, case: Any, device: torch.device, space: Space | None = None) -> None:
        self.implementation, self.case, self.device = implementation, case, device
        self.space = space or Space()
        self.wrongs: list[str] = []
        self.declines: list[str] = []
        self.worst_ratio = 0.0
        self.judged = 0

    def wrong(self, sentence: str) -> None:
        self.wrongs.append(sentence)

    def function(self, interface: Interface) -> Callable[..., Any]:
        """Return the implementation's function, which raises Declined for what it does not take."""
        return refusing(getattr(self.implementation, interface.value))

    def engine(self) -> SimpleNamespace:
        """Return the attention functions as an engine finds them, prepared forms too; one that is missing declines calls."""
        found: dict[str, Callable[..., Any]] = {}
        for interface in ATTENTION:
            given = getattr(self.implementation, interface.value, None)
            prepared = getattr(self.implementation, f"prepare_{interface.value}", None)
            found[interface.value] = _missing(interface) if given is None else refusing(given)
            if prepared is not None:
                found[f"prepare_{interface.value}"] = _preparing(prepared)
        return SimpleNamespace(**found)

    def build(self, case: AttentionCase | None = None, **storage: Any) -> AttentionInputs:
        """Build the case's inputs, or another case's, or the case's stored in another way."""
        chosen = self.case if case is None else case
        if storage:
            chosen = replace(chosen, storage=replace(chosen.storage, **storage))
        return build_attention(chosen, self.device)

    def run(self, interface: Interface, arguments: dict[str, Any]) -> Result:
        """Call the implementation.

        Raises:
            Declined: it raised NotImplementedError or ValueError, or lacks a parameter.
        """
        returned = self.function(interface)(**arguments)
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return as_result(returned, interface)

    def call(self, inputs: AttentionInputs, **changes: Any) -> Result:
        """Call with the inputs' arguments, some changed or added; raises as `run`."""
        return self.run(inputs.case.interface, inputs.arguments() | changes)

    def attempt(self, what: str, inputs: AttentionInputs, **changes: Any) -> Result | None:
        """Call as a variation of the check: a refusal is noted and gives None."""
        return self.attempt_call(what, inputs.case.interface, inputs.arguments() | changes)

    def vary(self, what: str, truth: Truth, inputs: AttentionInputs, **changes: Any) -> Result | None:
        """Attempt a variation, hold its result to the truth, and return it."""
        result = self.attempt(what, inputs, **changes)
        self.hold(what, result, truth)
        return result

    def attempt_call(self, what: str, interface: Interface, arguments: dict[str, Any]) -> Result | None:
        """Run as a variation of the check: a refusal is noted and gives None."""
        try:
            return self.run(interface, arguments)
        except Declined as declined:
            self.declines.append(f"{what}: {declined}")
            return None

    def reads(self, what: str, attention: Callable[[], None]) -> bool:
        """Run a reference over what the implementation built; arguments that a reference refuses are wrong ones."""
        try:
            attention()
        except (IndexError, TypeError, ValueError) as error:
            self.wrong(f"{what} is refused: {error}")
            return False
        return True

    def hold(self, what: str, result: Result | None, truth: Truth, least_bound: float = 0.0) -> None:
        """Hold the output to the truth, and the LSE, if there is one, in base 2.

        Args:
            least_bound: relative L2 error that is allowed whatever the control makes.
        """
        if result is None:
            return
        self.judged += 1
        if result.out.shape != truth.expected.shape:
            self.wrong(f"{what}: the output is {list(result.out.shape)}, not {list(truth.expected.shape)}")
            return
        comparison = truth.compare(result.out)
        comparison = replace(comparison, bound=comparison.bound.clamp(min=least_bound))
        self.worst_ratio = max(self.worst_ratio, comparison.worst_ratio)
        if not comparison.passed:
            self.wrong(f"{what}: {truth.wrong_vectors(comparison)}")
        if result.lse is not None:
            self.hold_lse(what, result.lse, truth)

    def hold_lse(self, what: str, lse: Tensor, truth: Truth) -> None:
        """Hold an LSE to log2 of the softmax's denominator, the sink included; -inf where a row sees nothing."""
        wrong = truth.wrong_lse(lse)
        if wrong:
            self.wrong(f"{what}: {wrong}")

    def same_bits(self, what: str, result: Result | None, other: Result) -> None:
        """Hold two outputs to be equal bit for bit."""
        if result is None:
            return
        self.judged += 1
        left, right = (side.out.contiguous().view(torch.uint8) for side in (result, other))
        if not torch.equal(left, right):
            rows = (left != right).flatten(1).any(dim=1).nonzero().flatten().tolist()
            self.wrong(f"{what}: the bits of rows {rows[:8]}{'…' if len(rows) > 8 else ''} differ")


def as_result(returned: Any, interface: Interface) -> Result:
    """Return the rows of all requests, whatever shape the function returns them in."""
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    if not isinstance(out, Tensor):
        raise TypeError(f"{interface.value} returned {type(out).__name__}, not a tensor")
    if interface is Interface.MLA_DECODE:
        out = out.flatten(0, 1) if out.dim() == 4 else out
        lse = lse.flatten(0, 1) if lse is not None and lse.dim() == 3 else lse
    return Result(out, lse)


def rules_of(inputs: AttentionInputs, **changes: Any) -> Rules:
    """Return the rules of the inputs' rows; `changes` are fields of `Rules`."""
    case = inputs.case
    given: dict[str, Any] = {
        "bmm1_scale": inputs.bmm1_scale,
        "bmm2_scale": inputs.bmm2_scale,
        "arithmetic": case.dtype if case.arithmetic is None else case.arithmetic,
        "out_dtype": torch.bfloat16 if case.is_mla else case.dtype,  # MLA's function has no other
        "window_left": case.window_left,
        "sinks": inputs.sinks,
    }
    return Rules(**(given | changes))


def truth_of_call(inputs: AttentionInputs, **changes: Any) -> Truth:
    """Return the truth of a call of these inputs; `changes` are fields of `Rules`."""
    return truth_of_requests(
        inputs.query, list(inputs.histories), list(inputs.case.q_lens), rules_of(inputs, **changes)
    )
