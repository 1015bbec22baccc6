"""One case of one check: what an implementation gives, and everything that is wrong about it."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.checks.explain.reading import (
    CallFeatures,
    features_of_call,
    features_of_case,
    features_of_contents,
    of_any_request,
)
from lab.checks.explain.subjects import CallLog
from lab.checks.run.equivalent_calls import EquivalentCalls
from lab.checks.run.support_protocol import KernelError, Refusals, Unsupported, is_capturing, output_and_lse, refusing
from lab.checks.run.verdicts import IT_FAILED, CheckedResult, SavedOutput, WrongVector
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.references.truth import Truth
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, build_attention, new_workspace
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.guards import as_integers
from lab.workloads.interfaces import ATTENTION, Interface

AUDITED_CHECKS = ("K1", "M1")  # whose cases are one call, or one pass; see `lab.checks.run.audit`
MOST_SAVED_ELEMENTS = 2**20
SHOWN_CHARACTERS = 1000
SHOWN_ELEMENTS = 4


def _as_engines_call(function: Callable[..., Any], workspace: Tensor) -> Callable[..., Any]:
    """Return a function that is called without what an engine has nothing to say for, and with the engine's workspace."""

    def call(**arguments: Any) -> Any:
        said = {name: value for name, value in arguments.items() if not _is_default(name, value)}
        return function(**said | {"workspace_buffer": workspace})

    return call


def _is_default(name: str, value: Any) -> bool:
    """Tell whether an argument says what FlashInfer's default says: no window, no sinks."""
    return (name == "window_left" and value == -1) or (name == "sinks" and value is None)


def _missing(interface: Interface) -> Callable[..., Any]:
    def decline(**arguments: Any) -> None:
        raise Unsupported(f"it has no {interface.value}")

    return decline


class CallForm(NamedEnum):
    """How a function's calls are made; the value goes before its name."""

    WHOLE = ""
    PREPARED = "prepare_"  # `lab.kernels.prepare`: what does not depend on contents is done once
    PLANNED = "plan_"  # `lab.kernels.PlannedOnce`: for lengths and page ids that stay


class Result(NamedTuple):
    """The results of a call: out [num_rows, num_qo_heads, head_dim], and lse [num_rows, num_qo_heads] or None.

    `call` is what the call was; None stands for the last call of the run.
    """

    out: Tensor
    lse: Tensor | None
    call: CallFeatures | None = None


class CaseRun:
    """A case being judged. A check calls, and holds results against truths; what fails is noted and the check goes on.

    Attributes:
        implementation: what is judged.
        case: of what; a frozen dataclass.
        device: where.
        ranges: the axes within which a check may vary the case.
        refusals: exceptions that are refusals, as in `lab.checks.run.support_protocol.refusing`.
        calls: calls of the implementation so far.
        wrongs: what was wrong, a sentence each.
        failures: calls that failed, a sentence each.
        declines: what was refused of the check's variations, or judged in another spelling, a sentence each.
        worst_ratio: the largest error over its bound.
        judged: results that were held against something.
        results: these results.
        saves_output, output: whether the first output is kept as it was before it was held to anything, and that.
        called: the last call that was made.
    """

    def __init__(
        self,
        implementation: Any,
        case: Any,
        device: torch.device,
        ranges: Ranges | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        self.implementation, self.case, self.device = implementation, case, device
        self.ranges = ranges or Ranges()
        self.refusals = refusals
        self.calls = 0
        self.wrongs: list[str] = []
        self.failures: list[str] = []
        self.declines: list[str] = []
        self.worst_ratio = 0.0
        self.judged = 0
        self.results: list[CheckedResult] = []
        self.saves_output = False
        self.output: SavedOutput | None = None
        self.called = self._of_case = features_of_case(case)
        self._calls = CallLog()
        self._speller = EquivalentCalls(self.decline)

    def wrong(self, sentence: str) -> None:
        """Note a sentence of what is wrong, of the last call."""
        self.hold_nothing_wrong("what it returned", [sentence], held="other")

    def hold_nothing_wrong(
        self, what: str, sentences: Iterable[str], held: str = "memory", call: CallFeatures | None = None
    ) -> None:
        """Hold something that says itself what is wrong of it, a sentence each; it is right where there is none."""
        found = list(sentences)
        self.wrongs += found
        self._note(what, held, bool(found), call or self.called)

    def note_call(self, interface: Interface, arguments: dict[str, Any], case: Any = None) -> CallFeatures:
        """Note an attention call that is about to be made, of the case's contents or another's, and return its features."""
        if not is_capturing():
            of_call = features_of_call(interface, arguments, self._calls)
            is_call = isinstance(self.case, AttentionCase)
            around = features_of_contents(case or self.case) if is_call else self._of_case.features
            self.called = replace(of_call, features={**around, **of_call.features})
        return self.called

    def _by_engine(self, interface: Interface, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an engine's function that notes its calls: the lengths stay those of the case, which may take two calls."""

        def noting(**arguments: Any) -> Any:
            of_call = self.note_call(interface, arguments)
            lengths = self._of_case if self._of_case.of_requests else of_call
            self.called = replace(lengths, features={**of_call.features, **self._of_case.features})
            return function(**arguments)

        return noting

    def _note(
        self, what: str, held: str, wrong: bool, call: CallFeatures, rows: Tensor | None = None, example: Any = None
    ) -> None:
        """Note a result; `rows` says which rows are wrong."""
        requests: tuple[Any, ...] = ()
        if rows is not None and len(rows) == sum(call.q_lens):
            parts = [bool(part.any()) for part in rows.cpu().split(list(call.q_lens))]
            requests = tuple(zip(call.of_requests, parts, strict=True))
        alone = held in ("output", "return") and not requests
        features = of_any_request(call.features, call.of_requests) if alone else call.features
        self.results.append(CheckedResult(what, held, features, wrong, requests, example))

    def fail(self, failure: str, what: str = "", held: str = "return") -> None:
        """Note a failure, of the last call or of the lab, and once in words however many calls share it."""
        failure = failure if len(failure) <= SHOWN_CHARACTERS else f"{failure[: SHOWN_CHARACTERS - 1]}…"
        if not any(noted.endswith(failure) for noted in self.failures):
            self.failures.append(f"{what}: {failure}" if what else failure)
        self._note(what or IT_FAILED, held, True, self.called)

    def decline(self, sentence: str) -> None:
        """Note a refusal, once."""
        if sentence not in self.declines:
            self.declines.append(sentence)

    def function(self, interface: Interface) -> Callable[..., Any]:
        """Return the implementation's function, which raises Unsupported for what it does not take."""
        return self._refusing(getattr(self.implementation, interface.value))

    @property
    def forms(self) -> tuple[CallForm, ...]:
        """Return the forms that the implementation has of any attention call."""
        names = [interface.value for interface in ATTENTION]
        has = [form for form in CallForm if any(hasattr(self.implementation, form.value + name) for name in names)]
        return (CallForm.WHOLE, *(form for form in has if form is not CallForm.WHOLE))

    def made(self, form: CallForm, interface: Interface, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Prepare or plan a call; raises as `run`."""
        make = getattr(self.implementation, form.value + interface.value)
        self.note_call(interface, arguments)
        call: Callable[[], Any] = self._speller.spelled(interface, self._preparing(make))(**arguments)
        return call

    def engine(self, form: CallForm = CallForm.PREPARED) -> SimpleNamespace:
        """Return the attention functions as an engine finds them; one that is missing declines calls.

        An engine has one workspace for all its calls, and leaves out what it has nothing to say for.

        Args:
            form: of the calls of functions that have it; the others are whole.
        """
        workspace = new_workspace(self.device, of_engine=True)
        found: dict[str, Callable[..., Any]] = {}
        for interface in ATTENTION:
            given = getattr(self.implementation, interface.value, None)
            prepared = getattr(self.implementation, form.value + interface.value, None) if form.value else None
            function = _missing(interface) if given is None else self._refusing(given)
            spelled = self._speller.spelled(interface, function, by_engine=True)
            found[interface.value] = self._by_engine(interface, _as_engines_call(spelled, workspace))
            if prepared is not None:
                spelled = self._speller.spelled(interface, self._preparing(prepared))
                found[f"prepare_{interface.value}"] = _as_engines_call(spelled, workspace)
        return SimpleNamespace(**found)

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        refuse = refusing(function, self.refusals)

        @functools.wraps(function)
        def counted(*args: Any, **arguments: Any) -> Any:
            self.calls += 1
            return refuse(*args, **arguments)

        return counted

    def _preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that prepares a call, with its refusals and the prepared call's as Unsupported."""
        return lambda **arguments: self._refusing(self._refusing(prepare)(**arguments))

    def build(self, case: AttentionCase | None = None, **storage: Any) -> AttentionInputs:
        """Build the case's inputs, or another case's, or the case's stored in another way."""
        chosen = self.case if case is None else case
        if storage:
            chosen = replace(chosen, storage=replace(chosen.storage, **storage))
        return build_attention(chosen, self.device)

    def run(self, interface: Interface, arguments: dict[str, Any], case: AttentionCase | None = None) -> Result:
        """Call the implementation with the tensors of the run's case or of another.

        What it refuses is called again in each equal spelling (`lab.checks.run.equivalent_calls`).

        Raises:
            Unsupported: it refused every spelling.
            KernelError: it failed.
        """
        call = self.note_call(interface, arguments, case)
        returned = self._speller.spelled(interface, self.function(interface))(**arguments)
        self._wait()
        if interface is Interface.MLA_DECODE:
            self._hold_shape_of_mla(returned, arguments)
        return as_result(returned, interface)._replace(call=call)

    def _hold_shape_of_mla(self, returned: Any, arguments: dict[str, Any]) -> None:
        """Hold an output to the query's shape, before its rows are taken as they come."""
        out, _ = output_and_lse(Interface.MLA_DECODE.value, returned)
        shape = (*arguments["query"].shape[:-1], arguments["kv_lora_rank"])
        if tuple(out.shape) != shape:
            self.wrong(f"it returned an output of {list(out.shape)}, not {list(shape)}")

    def _wait(self) -> None:
        """Wait for the GPU, whose errors show there."""
        if self.device.type == "cuda" and not is_capturing():
            torch.cuda.synchronize()

    def call(self, inputs: AttentionInputs, **changes: Any) -> Result:
        """Call with the inputs' arguments, some changed or added; raises as `run`."""
        return self.run(inputs.case.interface, inputs.arguments() | changes, inputs.case)

    def repeat(self, inputs: AttentionInputs, **changes: Any) -> Result:
        """Make a call that was taken before, so that a refusal is a failure: something was left that is in its way."""
        return self.run_again(inputs.case.interface, inputs.arguments() | changes, inputs.case)

    def run_again(self, interface: Interface, arguments: dict[str, Any], case: AttentionCase | None = None) -> Result:
        """Run a call that was taken before, with the same tensors or equal ones; raises as `repeat`."""
        try:
            return self.run(interface, arguments, case)
        except Unsupported as declined:
            raise KernelError(f"it refused a call that it had taken before: {declined}") from declined

    def hold_call(self, what: str, truth: Truth, inputs: AttentionInputs) -> None:
        """Call, and hold the result to the truth: a failure is noted, and the check goes on.

        Raises:
            Unsupported: as `run`; nothing of the case can be judged.
        """
        with self.noting_failures(what):
            self.hold(what, self.call(inputs), truth)

    @contextmanager
    def noting_failures(self, what: str) -> Iterator[None]:
        """Note a failure of the implementation's and go on, unless the GPU's context is lost.

        Raises:
            KernelError: no call can be right after it.
        """
        try:
            yield
        except KernelError as failure:
            try:
                self._wait()
            except torch.AcceleratorError:
                raise failure from None
            self.fail(str(failure), what)

    def attempt(self, what: str, inputs: AttentionInputs, **changes: Any) -> Result | None:
        """Call as a variation of the check: a refusal or a failure is noted and gives None."""
        return self.attempt_call(what, inputs.case.interface, inputs.arguments() | changes, inputs.case)

    def vary(self, what: str, truth: Truth, inputs: AttentionInputs, **changes: Any) -> Result | None:
        """Attempt a variation, hold its result to the truth, and return it."""
        result = self.attempt(what, inputs, **changes)
        self.hold(what, result, truth)
        return result

    def attempt_call(
        self, what: str, interface: Interface, arguments: dict[str, Any], case: AttentionCase | None = None
    ) -> Result | None:
        """Run as a variation of the check: a refusal or a failure is noted and gives None."""
        return self.attempted(what, lambda: self.run(interface, arguments, case))

    def attempted(self, what: str, call: Callable[[], Result]) -> Result | None:
        """Make a call: a refusal or a failure is noted and gives None."""
        with self.noting_failures(what):
            try:
                return call()
            except Unsupported as declined:
                self.decline(f"{what}: {declined}")
        return None

    def reads(self, what: str, attention: Callable[[], None]) -> bool:
        """Run a reference over what the implementation built; arguments that a reference refuses are wrong ones."""
        try:
            attention()
        except (IndexError, TypeError, ValueError) as error:
            self.hold_nothing_wrong(what, [f"{what} is refused: {error}"], held="invariants")
            return False
        self.hold_nothing_wrong(what, (), held="invariants")
        return True

    def hold(self, what: str, result: Result | None, truth: Truth, least_bound: float = 0.0) -> None:
        """Hold the output to the truth, its vectors and its slopes, and the LSE, if there is one, in base 2.

        Args:
            least_bound: relative error that is allowed whatever the control makes.
        """
        if result is None:
            return
        self.judged += 1
        if self.saves_output and self.output is None and result.out.numel() <= MOST_SAVED_ELEMENTS:
            self.output = SavedOutput.of(result.out)
        call, truth = result.call or self.called, made(truth)
        if result.out.shape != truth.expected.shape:
            self.wrongs.append(f"{what}: the output is {list(result.out.shape)}, not {list(truth.expected.shape)}")
            self._note(what, "output", True, call)
            return
        comparison = truth.compare(result.out, least_bound)
        self.worst_ratio = max(self.worst_ratio, comparison.worst_ratio)
        worst = None
        if not comparison.passed:
            self.wrongs.append(f"{what}: {truth.wrong_output(comparison, result.out)}")
            ((row, head),) = comparison.worst(1)
            worst = _vector(truth, row, head, truth.expected, result.out)
        self._note(what, "output", not comparison.passed, call, comparison.faulty.any(dim=1), worst)
        if result.lse is not None:
            self.hold_lse(what, result.lse, truth, call)

    def hold_lse(self, what: str, lse: Tensor, truth: Truth, call: CallFeatures | None = None) -> None:
        """Hold an LSE to log2 of the softmax's denominator, the sink included; -inf where a row sees nothing."""
        truth = made(truth)
        wrong = truth.wrong_lse(lse)
        rows, worst = None, None
        if wrong:
            self.wrongs.append(f"{what}: {wrong}")
        if lse.shape == truth.lse_log2.shape:
            ratio = truth.lse_ratio(lse)
            self.worst_ratio = max(self.worst_ratio, *ratio.flatten().tolist(), 0.0)
            is_wrong = ratio > 1
            rows = is_wrong.any(dim=1)
            if wrong:
                row, head = divmod(int(is_wrong.flatten().to(torch.int8).argmax()), lse.shape[1])
                worst = _vector(truth, row, head, truth.lse_log2.unsqueeze(-1), lse.unsqueeze(-1))
        self._note(what, "LSE", bool(wrong), call or self.called, rows, worst)

    def same_bits(self, what: str, result: Result | None, other: Result) -> None:
        """Hold two outputs to be equal bit for bit."""
        if result is None:
            return
        self.judged += 1
        call = result.call or self.called
        if result.out.shape != other.out.shape:
            self.wrongs.append(f"{what}: the output is {list(result.out.shape)}, not {list(other.out.shape)}")
            self._note(what, "bits", True, call)
            return
        left, right = as_integers(result.out), as_integers(other.out)
        is_wrong = not torch.equal(left, right)
        differ = (left != right).flatten(1).any(dim=1)
        if is_wrong:
            rows = differ.nonzero().flatten().tolist()
            self.wrongs.append(f"{what}: the bits of rows {rows[:8]}{'…' if len(rows) > 8 else ''} differ")
        self._note(what, "bits", is_wrong, call, differ)


def _vector(truth: Truth, row: int, head: int, expected: Tensor, got: Tensor) -> WrongVector:
    first, second = (tuple(side[row, head, :SHOWN_ELEMENTS].double().tolist()) for side in (expected, got))
    return WrongVector(f"row {row} (request {int(truth.request_of_row[row])}), head {head}", first, second)


def as_result(returned: Any, interface: Interface) -> Result:
    """Return the rows of all requests, whatever shape the function returns them in.

    Raises:
        KernelError: it returned no tensor.
    """
    out, lse = output_and_lse(interface.value, returned)
    if interface is Interface.MLA_DECODE:
        out = out.flatten(0, 1) if out.dim() == 4 else out
        lse = lse.flatten(0, 1) if lse is not None and lse.dim() == 3 else lse
    return Result(out, lse)
