"""Run one case of a check: call the judged implementation, compare its results with the expected ones, and record errors."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, AttentionCall
from lab.calls.problem import LATENT_CALLS
from lab.checks.explain.call_features import CallFeatures, CallLog, features_of_call, features_of_case
from lab.checks.explain.feature import of_any_request
from lab.checks.run.support_protocol import (
    KernelCalls,
    KernelError,
    Refused,
    Unsupported,
    is_capturing,
    output_and_lse,
)
from lab.checks.run.verdicts import (
    IT_FAILED,
    RETURNED,
    BitDifference,
    CheckedResult,
    OutputComparison,
    compare_bits,
    compare_lse,
    compare_output,
)
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.references.errors import Truth
from lab.wording import shortened
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, build_attention
from lab.workloads.inputs.call import BuiltCall, CallInputs
from lab.workloads.inputs.contents import new_workspace
from lab.workloads.inputs.expected import SavedTensor, made
from lab.workloads.inputs.guards import same_bits
from lab.workloads.interfaces import PAGED_CALLS, Interface

# The attention functions that an engine calls for a paged cache.
ENGINE_CALLS = tuple(dict.fromkeys((*PAGED_CALLS, *LATENT_CALLS)))
USUAL_RANGES = Ranges()
MOST_SAVED_ELEMENTS = 2**20  # A larger output is neither saved nor audited.
SHOWN_CHARACTERS = 1000  # of the sentence about a failed call


class CallForm(NamedEnum):
    """A way to call the attention function `<name>`: directly (WHOLE), or in two steps: the function `prepare_<name>` or
    `plan_<name>` returns a callable, which makes the call. A member's value is the prefix, such as "plan_".
    """

    WHOLE = ""
    PREPARED = "prepare_"  # the callable is valid for any contents of the tensors; see `lab.kernels.prepare`
    PLANNED = "plan_"  # the callable is valid while lengths and page ids are unchanged; see `lab.kernels.PlannedOnce`


class Result(NamedTuple):
    """What an attention call returned: out [num_rows, num_qo_heads, head_dim], and lse [num_rows, num_qo_heads] or None."""

    out: Tensor
    lse: Tensor | None
    call: CallFeatures | None = None  # features of the call, such as `kv_len`; None: those of the run's last call

    def leading(self, rows: int) -> "Result":
        return self._replace(out=self.out[:rows], lse=None if self.lse is None else self.lse[:rows])

    def copied(self) -> "Result":
        return self._replace(out=self.out.clone())


@dataclass(frozen=True)
class GivenCall:
    """An attention call with given keyword arguments. Only the first `rows` rows of its output are judged (None: all rows)."""

    interface: AttentionCall
    given: dict[str, Any]
    rows: int | None = None

    def arguments(self) -> dict[str, Any]:
        return self.given


Inputs = CallInputs | BuiltCall | GivenCall


@dataclass(eq=False)
class CaseRun:
    """Makes the calls of one test case, compares their results with the expected ones, and records the errors."""

    implementation: Any  #: the implementation that is judged
    case: Any  #: the case, a frozen dataclass
    device: torch.device  #: the device on which the calls run
    ranges: Ranges = USUAL_RANGES  #: the ranges within which a check may vary the case
    refusals: Refused | None = None  #: the exceptions that count as refusals; None for the default list
    saves_output: bool = False  #: whether the first output is saved before it is compared
    output: SavedTensor | None = None  #: the saved output
    wrongs: list[str] = field(default_factory=list)  #: sentences about wrong results
    failures: list[str] = field(default_factory=list)  #: sentences about failed calls
    declines: list[str] = field(default_factory=list)  #: sentences about refused calls, even if made in another form
    remarks: list[str] = field(default_factory=list)  #: notes for the reader; they do not make a result wrong
    suspicions: list[str] = field(default_factory=list)  #: notes that say why the inputs of the case may be wrong
    differences: list[BitDifference] = field(default_factory=list)  #: outputs with other bits than the first call's
    worst_ratio: float = 0.0  #: the largest ratio of an error to its bound
    is_misshapen: bool = False  #: a result has another shape or dtype than expected
    judged: int = 0  #: number of results that were compared
    results: list[CheckedResult] = field(default_factory=list)  #: the results that were compared

    def __post_init__(self) -> None:
        self.kernel = KernelCalls(self.implementation, self.decline, self.refusals)  #: makes the calls
        self.called = self._of_case = features_of_case(self.case)  #: the features of the last call
        self._log = CallLog()

    def build(self, case: AttentionCase | None = None, **storage: Any) -> AttentionInputs:
        """Build the tensors of a case (None: `self.case`). `storage` replaces fields of `Storage`, the case's memory layout."""
        chosen = self.case if case is None else case
        if storage:
            chosen = replace(chosen, storage=replace(chosen.storage, **storage))
        return build_attention(chosen, self.device)

    def call(self, inputs: Inputs, /, **changes: Any) -> Result:
        """Make the call of `inputs`, with arguments replaced by those in `changes`. Return its results without padding rows.

        Raises:
            Unsupported: the implementation refused the call, also with equivalent arguments, such as a tensor for `out`.
            KernelError: the call failed.
        """
        interface, arguments = inputs.interface, inputs.arguments() | changes
        call = self.note_call(interface, arguments, inputs.case if isinstance(inputs, AttentionInputs) else None)
        returned = self.kernel.make("", interface, arguments)
        result = Result(*output_and_lse(interface, returned), call)
        is_copied = self._waits and result.out.numel() <= MOST_SAVED_ELEMENTS
        early = result.out.clone() if is_copied else None  # as the current stream sees it
        if self._waits:
            torch.cuda.synchronize()  # raises errors of earlier launches
        if early is not None and not same_bits(early, result.out):
            self.wrong("its output was still written after the call: another stream than the caller's writes it")
        if interface in LATENT_CALLS:
            out, query = returned[0] if isinstance(returned, tuple) else returned, arguments["query"]
            # With an axis of requests if the query has one.
            shape = (*query.shape[:-1], arguments.get("kv_lora_rank", query.shape[-1]))
            if tuple(out.shape) != shape:
                self.wrong(f"it returned an output of {list(out.shape)}, not {list(shape)}")
        rows = inputs.rows if isinstance(inputs, GivenCall) else None
        return result if rows is None else result.leading(rows)

    def base_call(self, what: str, **storage: Any) -> tuple[AttentionInputs, Truth, Result]:
        """Make the call of the case. If its output is wrong, record an error that begins with `what`. Return (inputs, expected
        result, result). `storage` replaces fields of `Storage`, the case's memory layout.
        """
        inputs = self.build(**storage)
        truth, result = inputs.truth(), self.call(inputs)
        self.expect_close(what, result, truth)
        return inputs, truth, result

    def again(self, inputs: Inputs, /, **changes: Any) -> Result:
        """Repeat a call that the implementation accepted before. Raise KernelError if the implementation now refuses it."""
        try:
            return self.call(inputs, **changes)
        except Unsupported as refusal:
            raise KernelError(f"it refused a call that it had taken before: {refusal}") from refusal

    def vary(
        self, what: str, inputs: Inputs, expected: Truth | Result | None = None, needed: bool = False, /, **changes: Any
    ) -> Result | None:
        """Make the call of `inputs`, with arguments replaced by those in `changes`. Record an error that begins with `what` if
        the call fails, or if its result differs from `expected` (if given): by more than the error bound of a `Truth`, or in
        any bit of a `Result`. Return the result; None if the call failed, was refused or was skipped.

        If the implementation refuses the call, record the refusal; raise Unsupported instead if the call is `needed`. Skip a
        call that is not `needed` if FlashInfer does not allow `changes` for the sparse or context-parallel call of the case.
        """
        case, result = self.case, None
        is_special = isinstance(case, AttentionCase) and (case.head_pages or case.rank or case.top_k)
        if is_special and not needed:
            try:
                CALL_TYPES[inputs.interface](**(inputs.arguments() | changes)).problem()
            except (ValueError, NotImplementedError):  # FlashInfer excludes such a call, or the lab does not model it
                return None
        with self.noting(what, needed):
            result = self.call(inputs, **changes)
        if isinstance(expected, Result):
            self.expect_equal_bits(what, result, expected)
        elif expected is not None:
            self.expect_close(what, result, expected)
        return result

    def expect_call(self, what: str, inputs: Inputs, expected: Truth | None = None) -> Result | None:
        """Make a call. Record an error if it fails or differs from `expected`, if given. Raise Unsupported if it is refused."""
        return self.vary(what, inputs, expected, True)

    @contextmanager
    def noting(self, what: str, needed: bool = False) -> Iterator[None]:
        """Record errors that the `with` block raises: KernelError and, unless `needed`, Unsupported. `what` names the call."""
        try:
            yield
        except Unsupported as refusal:
            if needed:
                raise
            self.decline(f"{what}: {refusal}")
        except KernelError as failure:
            try:
                if self._waits:
                    torch.cuda.synchronize()
            except torch.AcceleratorError:
                raise failure from None  # the CUDA context is lost: no later call can succeed
            self.fail(str(failure), what)

    @property
    def _waits(self) -> bool:
        return self.device.type == "cuda" and not is_capturing()

    @property
    def forms(self) -> tuple[CallForm, ...]:
        names = [each.value for each in ENGINE_CALLS]
        offered = [form for form in CallForm if any(hasattr(self.implementation, form.value + each) for each in names)]
        return tuple(dict.fromkeys((CallForm.WHOLE, *offered)))

    def function(self, interface: Interface) -> Callable[..., Any]:
        """Return the implementation's function, wrapped so that a refused call raises Unsupported."""
        function = self.kernel.offered(interface.value)
        return functools.update_wrapper(functools.partial(self.kernel.once, function), function)

    def engine(self, form: CallForm = CallForm.PREPARED) -> SimpleNamespace:
        """Return an object with the implementation's attention functions, for the lab's engine code. With PREPARED and PLANNED,
        it also has `prepare_<name>`, which calls the implementation's `prepare_<name>` or `plan_<name>`, if there is one. The
        functions leave out the argument `window_left=-1`, and arguments that are None and have the default None.
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
        if not prefix:
            self.called = self.note_call(interface, arguments).of_pass(self._of_case)
        return self.kernel.make(prefix, interface, arguments | {"workspace_buffer": workspace}, of_engine=True)

    def note_call(self, interface: AttentionCall, arguments: dict[str, Any], case: Any = None) -> CallFeatures:
        """Return and keep the features, such as `kv_len`, of the next call, whose tensors are of `case` (None: `self.case`)."""
        if self._waits or self.device.type != "cuda":  # a capture leaves the features of the last call
            around: dict[str, Any] = dict(self._of_case.features)
            if isinstance(self.case, AttentionCase):
                of_tensors = case or self.case
                storage = of_tensors.storage
                around = {"contents": of_tensors.contents, "dead": storage.dead, "table_tail": storage.table_tail}
            self.called = features_of_call(interface, arguments, self._log, around)
        return self.called

    def expect(self, what: str, wrongs: Iterable[str], kind: str = "memory", call: CallFeatures | None = None) -> None:
        """Record the comparison `what`. `wrongs`: sentences about its errors. `call`: its features (None: of the last call)."""
        found = list(wrongs)
        self.wrongs += found
        self._note(what, kind, OutputComparison("; ".join(found)), call)

    def wrong(self, sentence: str) -> None:
        self.expect(RETURNED, [sentence], kind="other")

    def expect_unchanged(self, inputs: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        changed = (name for name, tensor in inputs.items() if not same_bits(tensor, before[name]))
        self.expect("the inputs", (f"it changed its {name}" for name in changed))

    def expect_close(
        self, what: str, result: Result | None, truth: Truth, least_bound: float = 0.0, kind: str = "output"
    ) -> None:
        """Record an error unless the output and, if there is one, the LSE in base 2 are within the error bounds of `truth`. A
        relative error up to `least_bound` is allowed. `kind` is "merged" if the lab merged the results of several calls.
        """
        if result is None:
            return
        self.judged += 1
        if self.saves_output and self.output is None and result.out.numel() <= MOST_SAVED_ELEMENTS:
            self.output = SavedTensor.of(result.out)  # before a kernel's timer can find the expected result
        truth = made(truth)
        call = (result.call or self.called).with_values(truth)
        self._compared(what, kind, compare_output(result.out, truth, least_bound), call)
        if result.lse is not None and result.out.shape == truth.expected.shape:
            self._compared(what, "LSE" if kind == "output" else kind, compare_lse(result.lse, truth), result.call)

    def expect_lse(self, what: str, lse: Tensor, truth: Truth) -> None:
        """Record an error unless `lse` is log2 of the softmax's denominator with the sink; -inf for a row that sees no key."""
        self._compared(what, "LSE", compare_lse(lse, made(truth)))

    def expect_equal_bits(self, what: str, result: Result | None, other: Result) -> None:
        """Record an error unless two outputs have the same bits. A `result` of None (its call failed) is not compared."""
        if result is not None:
            self.judged += 1
            self._compared(what, "bits", compare_bits(result.out, other.out), result.call)

    def _compared(self, what: str, kind: str, found: OutputComparison, call: CallFeatures | None = None) -> None:
        if found.failure:
            self.wrongs.append(f"{what}: {found.failure}")
            self.is_misshapen |= found.wrong_rows is None
        self.worst_ratio = max(self.worst_ratio, found.worst_ratio)
        self._note(what, kind, found, call)

    def _note(self, what: str, kind: str, found: OutputComparison, call: CallFeatures | None = None) -> None:
        call, rows = call or self.called, found.wrong_rows
        requests: tuple[Any, ...] = ()
        if rows is not None and len(rows) == sum(call.q_lens):
            parts = [bool(part.any()) for part in rows.split(list(call.q_lens))]
            requests = tuple(zip(call.of_requests, parts, strict=True))
        # The diagnosis compares these results with results of single requests, or finds rules about any request.
        alone = kind in ("output", "return", "other", "lists", "metadata") and not requests
        features = of_any_request(call.features, call.of_requests) if alone else call.features
        self.results.append(CheckedResult(what, kind, features, bool(found.failure), requests, found.example))

    def fail(self, failure: str, what: str = "") -> None:
        failure = shortened(failure, SHOWN_CHARACTERS)
        if not any(noted.endswith(failure) for noted in self.failures):
            self.failures.append(f"{what}: {failure}" if what else failure)
        self._note(what or IT_FAILED, "return", OutputComparison(failure))

    def decline(self, sentence: str) -> None:
        if sentence not in self.declines:
            self.declines.append(sentence)
