"""The run of one case: it makes the calls of a check, and records every error of their results."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, AttentionCall
from lab.calls.problem import LATENT_CALLS
from lab.checks.explain.call_features import CallFeatures, CallLog, features_of_call, features_of_case
from lab.checks.explain.feature import of_any_request
from lab.checks.oracle import OutputComparison, compare_bits, compare_lse, compare_output
from lab.checks.run.equivalent_calls import KernelCalls
from lab.checks.run.support_protocol import KernelError, Refusals, Unsupported, is_capturing, output_and_lse
from lab.checks.run.verdicts import IT_FAILED, RETURNED, BitDifference, CheckedResult, SavedOutput
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.references.errors import Truth
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, build_attention, new_workspace
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.guards import changed_bits
from lab.workloads.interfaces import PAGED_CALLS, Interface

# Calls that an engine's pass over a paged cache makes.
ENGINE_CALLS = tuple(dict.fromkeys((*PAGED_CALLS, *LATENT_CALLS)))
MOST_SAVED_ELEMENTS = 2**20  # A larger output is neither saved nor audited.
SHOWN_CHARACTERS = 1000


class CallForm(NamedEnum):
    """How a call is made: as a whole, or after it was prepared or planned. The value is the prefix of the function's name."""

    WHOLE = ""
    PREPARED = "prepare_"  # `lab.kernels.prepare`: what does not depend on contents is done once
    PLANNED = "plan_"  # `lab.kernels.PlannedOnce`: for lengths and page ids that stay


class Result(NamedTuple):
    """The results of a call: out [num_rows, num_qo_heads, head_dim], and lse [num_rows, num_qo_heads] or None.

    `call` has the features of the call that returned them; None stands for the last call of the run.
    """

    out: Tensor
    lse: Tensor | None
    call: CallFeatures | None = None

    def leading(self, rows: int) -> "Result":
        """Return the result of the first rows, without the padding rows after them."""
        return self._replace(out=self.out[:rows], lse=None if self.lse is None else self.lse[:rows])


class Inputs(Protocol):
    """A protocol: a function and the arguments of one call of it, as `AttentionInputs` has them."""

    @property
    def interface(self) -> AttentionCall: ...

    def arguments(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class GivenCall:
    """A call with its arguments. The first `rows` rows of its output belong to requests; padding rows may follow."""

    interface: AttentionCall
    given: dict[str, Any]
    rows: int | None = None

    def arguments(self) -> dict[str, Any]:
        return self.given


class CaseRun:
    """A case that is being judged. A check makes calls and states what it expects. A failed expectation is recorded, and the
    check continues.
    """

    def __init__(
        self,
        implementation: Any,
        case: Any,
        device: torch.device,
        ranges: Ranges | None = None,
        refusals: Refusals | None = None,
        saves_output: bool = False,
    ) -> None:
        self.implementation = implementation  #: the implementation that is judged
        self.case = case  #: the case, a frozen dataclass
        self.device = device  #: the device on which the calls run
        self.ranges = ranges or Ranges()  #: the ranges within which a check may vary the case
        self.kernel = KernelCalls(self.decline, refusals)  #: makes the calls of the implementation
        self.wrongs: list[str] = []  #: sentences about wrong results
        self.failures: list[str] = []  #: sentences about failed calls
        #: sentences about variations of the check that were refused, or judged in an equivalent form
        self.declines: list[str] = []
        self.remarks: list[str] = []  #: sentences that a reader of the verdict should know, right or wrong
        self.suspicions: list[str] = []  #: such sentences, which say that the case's inputs may be wrong
        #: calls of a case of `lab.checks.invariance` with other bits than its base call
        self.differences: list[BitDifference] = []
        self.worst_ratio = 0.0  #: the largest ratio of an error to its bound
        self.is_misshapen = False  #: a result has another shape or dtype than expected
        self.judged = 0  #: number of results that were compared
        self.results: list[CheckedResult] = []  #: the results that were compared
        self.saves_output = saves_output  #: whether the first output is saved before it is compared
        self.output: SavedOutput | None = None  #: the saved output
        self.called = self._of_case = features_of_case(case)  #: the features of the last call
        self._log = CallLog()

    def build(self, case: AttentionCase | None = None, **storage: Any) -> AttentionInputs:
        """Build the inputs of a case, by default the run's own. `storage` replaces fields of the case's `Storage`."""
        chosen = self.case if case is None else case
        if storage:
            chosen = replace(chosen, storage=replace(chosen.storage, **storage))
        return build_attention(chosen, self.device)

    def call(self, inputs: Inputs, /, **changes: Any) -> Result:
        """Make the call of `inputs` with the arguments in `changes` replaced. Return its results without padding rows.

        A refused call is made again in each equivalent form (`KernelCalls`).

        Raises:
            Unsupported: the implementation refused every form.
            KernelError: the call failed.
        """
        interface, arguments = inputs.interface, inputs.arguments() | changes
        call = self.note_call(interface, arguments, inputs.case if isinstance(inputs, AttentionInputs) else None)
        returned = self._make("", interface, arguments)
        self._wait()
        if interface in LATENT_CALLS:
            self._expect_shape_of(interface, returned, arguments)
        result = as_result(returned, interface)._replace(call=call)
        rows = inputs.rows if isinstance(inputs, GivenCall) else None
        return result if rows is None else result.leading(rows)

    def _make(self, prefix: str, interface: AttentionCall, arguments: Any, workspace: Tensor | None = None) -> Any:
        """Make a call, or with a form's prefix prepare it; a refused one in equivalent forms. An engine has a `workspace`."""
        function = self._offered(prefix + interface.value, KernelError if workspace is None else Unsupported)
        once = functools.partial(self.kernel.prepared if prefix else self.kernel.once, function)
        if workspace is not None:
            arguments = _without_defaults(interface, arguments) | {"workspace_buffer": workspace}
        return self.kernel.invoke(interface, once, arguments, by_engine=workspace is not None and not prefix)

    def _offered(self, name: str, missing: type[Exception] = KernelError) -> Callable[..., Any]:
        """Return a function of the implementation; raise the error `missing` if the implementation does not have it."""
        function: Callable[..., Any] | None = getattr(self.implementation, name, None)
        if function is None:
            raise missing(f"it has no {name}")
        return function

    def again(self, inputs: Inputs, /, **changes: Any) -> Result:
        """Repeat a call that was accepted before. A refusal now counts as a failure and raises KernelError."""
        try:
            return self.call(inputs, **changes)
        except Unsupported as refusal:
            raise KernelError(f"it refused a call that it had taken before: {refusal}") from refusal

    def vary(
        self, what: str, inputs: Inputs, expected: Truth | Result | None = None, needed: bool = False, /, **changes: Any
    ) -> Result | None:
        """Make a call that the check does not require. If it is refused or fails, record this and return None.

        `what` names the call. If `expected` is given, compare the result with it: with the expected output (`Truth`), or with
        another result whose bits must be equal. If the call is `needed`, its refusal is raised. Otherwise a call that
        FlashInfer excludes is not made if the case has selected pages or entries, or one rank's keys, which exclude many
        arguments.
        """
        case, result = self.case, None
        is_special = isinstance(case, AttentionCase) and (case.head_pages or case.rank or case.top_k)
        if is_special and not needed and _is_excluded(inputs, changes):
            return None
        with self.noting(what, needed):
            result = self.call(inputs, **changes)
        if isinstance(expected, Result):
            self.expect_equal_bits(what, result, expected)
        elif expected is not None:
            self.expect_close(what, result, expected)
        return result

    def expect_call(self, what: str, inputs: Inputs, expected: Truth | None = None) -> Result | None:
        """Make a call like `vary`, but raise Unsupported if it is refused: the case is then declined."""
        return self.vary(what, inputs, expected, True)

    @contextmanager
    def noting(self, what: str, needed: bool = False) -> Iterator[None]:
        """While the context is open, record a failed call instead of raising its error; a refused call too, unless `needed`.

        If the GPU's context is lost, the failure is raised, because no later call can be right.
        """
        try:
            yield
        except Unsupported as refusal:
            if needed:
                raise
            self.decline(f"{what}: {refusal}")
        except KernelError as failure:
            try:
                self._wait()
            except torch.AcceleratorError:
                raise failure from None
            self.fail(str(failure), what)

    def _expect_shape_of(self, interface: AttentionCall, returned: Any, arguments: dict[str, Any]) -> None:
        """Expect that an output has the query's leading axes, because `as_result` accepts rows in another shape."""
        out, _ = output_and_lse(interface.value, returned)
        query = arguments["query"]
        shape = (*query.shape[:-1], arguments.get("kv_lora_rank", query.shape[-1]))
        if tuple(out.shape) != shape:
            self.wrong(f"it returned an output of {list(out.shape)}, not {list(shape)}")

    def _wait(self) -> None:
        """Wait for the GPU, so that errors of earlier launches are raised."""
        if self.device.type == "cuda" and not is_capturing():
            torch.cuda.synchronize()

    @property
    def forms(self) -> tuple[CallForm, ...]:
        """Return WHOLE, and the other forms (prepared, planned) that the implementation has for at least one function."""
        offered = {
            form for form in CallForm for each in ENGINE_CALLS if hasattr(self.implementation, form.value + each.value)
        }
        return tuple(form for form in CallForm if form is CallForm.WHOLE or form in offered)

    def prepare(self, form: CallForm, interface: AttentionCall, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Prepare or plan a call, and return the function that makes it. The errors are those of `call`."""
        self.note_call(interface, arguments)
        return cast("Callable[[], Any]", self._make(form.value, interface, arguments))

    def function(self, interface: Interface) -> Callable[..., Any]:
        """Return the implementation's function, wrapped so that it raises Unsupported for a refused call."""
        function = self._offered(interface.value)
        return functools.update_wrapper(functools.partial(self.kernel.once, function), function)

    def engine(self, form: CallForm = CallForm.PREPARED) -> SimpleNamespace:
        """Return an object whose methods are the attention functions as an engine calls them.

        If `form` is PREPARED or PLANNED, the object has a method `prepare_...` for each function that has this form. All
        calls share one workspace, and arguments at their default are left out.
        """
        workspace = new_workspace(self.device, of_engine=True)
        found: dict[str, Callable[..., Any]] = {}
        for interface in ENGINE_CALLS:
            found[interface.value] = functools.partial(self._of_engine, "", interface, workspace)
            if form.value and hasattr(self.implementation, form.value + interface.value):
                prepare = functools.partial(self._of_engine, form.value, interface, workspace)
                found[f"prepare_{interface.value}"] = prepare
        return SimpleNamespace(**found)

    def _of_engine(self, prefix: str, interface: AttentionCall, workspace: Tensor, /, **arguments: Any) -> Any:
        """Make one call of an engine's pass, or with the prefix of a form prepare it. The features of a call have the case's
        lengths, because a pass may have two calls.
        """
        if not prefix:
            of_call = self.note_call(interface, arguments)
            lengths = self._of_case if self._of_case.of_requests else of_call
            self.called = replace(lengths, features={**of_call.features, **self._of_case.features})
        return self._make(prefix, interface, arguments, workspace)

    def note_call(self, interface: AttentionCall, arguments: dict[str, Any], case: Any = None) -> CallFeatures:
        """Record and return the features of a call before it is made. `case` gives its contents, by default the run's."""
        if not is_capturing():
            around: dict[str, Any] = dict(self._of_case.features)
            if isinstance(self.case, AttentionCase):
                of_tensors = case or self.case
                storage = of_tensors.storage
                around = {"contents": of_tensors.contents, "dead": storage.dead, "table_tail": storage.table_tail}
            self.called = features_of_call(interface, arguments, self._log, around)
        return self.called

    def expect(self, what: str, wrongs: Iterable[str], kind: str = "memory", call: CallFeatures | None = None) -> None:
        """Record an error for each sentence in `wrongs`. `kind` is a key of `explain.diagnosis.HELD`."""
        found = list(wrongs)
        self.wrongs += found
        self._note(what, kind, OutputComparison("; ".join(found)), call)

    def wrong(self, sentence: str) -> None:
        """Record a sentence about an error of the last call."""
        self.expect(RETURNED, [sentence], kind="other")

    def expect_unchanged(self, what: str, tensors: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        """Expect that tensors have the same bits as their copies in `before`."""
        self.expect(what, changed_bits(tensors, before))

    def expect_readable(self, what: str, read: Callable[[], None]) -> bool:
        """Call `read`, in which a reference reads the implementation's metadata. Return True, or record its error."""
        try:
            read()
        except (IndexError, TypeError, ValueError) as error:
            self.expect(what, [f"{what} is refused: {error}"], kind="invariants")
            return False
        self.expect(what, (), kind="invariants")
        return True

    def expect_close(
        self, what: str, result: Result | None, truth: Truth, least_bound: float = 0.0, kind: str = "output"
    ) -> None:
        """Expect the truth's output, and its LSE in base 2 if the result has one. `least_bound` is as in `compare_output`.
        `kind` is "merged" for what the lab has merged from several results.
        """
        if result is None:
            return
        self.judged += 1
        if self.saves_output and self.output is None and result.out.numel() <= MOST_SAVED_ELEMENTS:
            self.output = SavedOutput.of(result.out)
        truth = made(truth)
        self._compared(what, kind, compare_output(result.out, truth, least_bound), result.call)
        if result.lse is not None and result.out.shape == truth.expected.shape:
            self._compared(what, "LSE" if kind == "output" else kind, compare_lse(result.lse, truth), result.call)

    def expect_lse(self, what: str, lse: Tensor, truth: Truth, call: CallFeatures | None = None) -> None:
        """Expect that an LSE is log2 of the softmax's denominator, which includes the sink; -inf where a row sees no key."""
        self._compared(what, "LSE", compare_lse(lse, made(truth)), call)

    def expect_equal_bits(self, what: str, result: Result | None, other: Result) -> None:
        """Expect that the output of a result has the same bits as the output of another result."""
        if result is not None:
            self.judged += 1
            self._compared(what, "bits", compare_bits(result.out, other.out), result.call)

    def _compared(self, what: str, kind: str, found: OutputComparison, call: CallFeatures | None) -> None:
        if found.failure:
            self.wrongs.append(f"{what}: {found.failure}")
            self.is_misshapen |= found.wrong_rows is None
        self.worst_ratio = max(self.worst_ratio, found.worst_ratio)
        self._note(what, kind, found, call)

    def _note(self, what: str, kind: str, found: OutputComparison, call: CallFeatures | None = None) -> None:
        """Record one comparison and the requests with wrong rows. `call` is by default the last call."""
        call, rows = call or self.called, found.wrong_rows
        requests: tuple[Any, ...] = ()
        if rows is not None and len(rows) == sum(call.q_lens):
            parts = [bool(part.any()) for part in rows.cpu().split(list(call.q_lens))]
            requests = tuple(zip(call.of_requests, parts, strict=True))
        alone = kind in ("output", "return", "other") and not requests  # they are compared with results of requests
        features = of_any_request(call.features, call.of_requests) if alone else call.features
        self.results.append(CheckedResult(what, kind, features, bool(found.failure), requests, found.example))

    def fail(self, failure: str, what: str = "") -> None:
        """Record that the last call failed. The same sentence is recorded only once."""
        failure = failure if len(failure) <= SHOWN_CHARACTERS else f"{failure[: SHOWN_CHARACTERS - 1]}…"
        if not any(noted.endswith(failure) for noted in self.failures):
            self.failures.append(f"{what}: {failure}" if what else failure)
        self._note(what or IT_FAILED, "return", OutputComparison(failure))

    def decline(self, sentence: str) -> None:
        """Record a sentence about a refusal, unless it is recorded already."""
        if sentence not in self.declines:
            self.declines.append(sentence)


def _without_defaults(interface: AttentionCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without `window_left=-1`, and without those that are None as FlashInfer's default is."""
    fields = CALL_TYPES[interface].__dataclass_fields__
    return {
        name: value
        for name, value in arguments.items()
        if not (name == "window_left" and value == -1) and not (value is None and fields[name].default is None)
    }


def as_result(returned: Any, interface: AttentionCall) -> Result:
    """Return the output and LSE that a function returned, one row per query row. Raise KernelError if one is no tensor."""
    out, lse = output_and_lse(interface.value, returned)
    if interface in LATENT_CALLS:
        out = out.flatten(0, 1) if out.dim() == 4 else out
        lse = lse.flatten(0, 1) if lse is not None and lse.dim() == 3 else lse
    return Result(out.detach(), None if lse is None else lse.detach())


def _is_excluded(inputs: Inputs, changes: dict[str, Any]) -> bool:
    """Return True if a call is one that FlashInfer excludes, or that the lab does not take (`lab.calls`). On a CPU the contents
    of tensors are read too, as they are now.
    """
    try:
        CALL_TYPES[inputs.interface](**(inputs.arguments() | changes)).problem()
    except (ValueError, NotImplementedError):
        return True
    return False
