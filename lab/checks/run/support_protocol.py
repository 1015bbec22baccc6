"""The support protocol: which errors of an implementation are refusals of a call, and which are failures.

A call that is refused is made again in equivalent forms with the same meaning, such as without `out`.
"""

import builtins
import dis
import functools
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES
from lab.calls.problem import AttentionCall
from lab.interpreter import limit_of
from lab.loading import LoadError, is_interruption, is_same_module, load, message_of, name_of
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.masks import packed_mask

TENSORS = (Tensor, torch.nn.Parameter)  # a subclass of torch.Tensor may answer what it likes when it is compared

OUTPUTS = ("out", "lse")  # arguments that a call writes
FRAMEWORKS = ("numpy", "torch", "triton")  # whose errors are no refusals: they know no attention call
LIBRARY = sysconfig.get_path("stdlib")
# A function with *args and **kwargs refuses an argument in words of its own.
_UNKNOWN = re.compile(
    r"(unexpected|unknown|unrecogni[sz]ed|unsupported|invalid|extra)\W+((keyword|named)\W+)?(arg|kwarg|keyword|param|option)"
    r"|(does not|doesn't|cannot) (take|accept|support)",
    re.IGNORECASE,
)
_MISSING = re.compile(r"missing (a|\d+) required (positional |keyword-only )?arguments?")


class Refusals(tuple[type[BaseException], ...]):
    """The exceptions that count as refusals. A worker finds them by `names`, which `lab.loading.load` reads, so that they may
    be in a file that is in no package.
    """

    names: tuple[str, ...]

    def __new__(cls, classes: Iterable[type[BaseException]], names: Iterable[str] = ()) -> "Refusals":
        made = super().__new__(cls, classes)
        made.names = tuple(names) or tuple(map(name_of, made))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_refusals, (",".join(self.names),)


class Unsupported(NotImplementedError):  # noqa: N818 - not an error of anybody's
    """The implementation refused a call, or does not have a parameter of the call.

    Attributes:
        late: True if the implementation refused too late: after writing to its output or, by a torch operation, to an argument
            other than the workspace.
    """

    def __init__(self, sentence: str, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class Unjudgeable(Unsupported):
    """The lab cannot judge the case, or not on this machine, whatever the implementation does."""


class KernelError(Exception):
    """The implementation raised an error that is not a refusal, or returned no result."""


def raised(error: BaseException) -> KernelError:
    """Return a KernelError for an error of the implementation; of a CUDA error it has only the first line."""
    message = message_of(error)
    sentence = message.split("\n", 1)[0] if isinstance(error, torch.AcceleratorError) else message
    return KernelError(f"it raised {type(error).__name__}: {sentence}")


def invoke(
    function: Callable[..., Any],
    args: Sequence[Any],
    arguments: dict[str, Any],
    refusals: Refusals | None = None,
) -> Any:
    """Call a function of an implementation. Raise Unsupported if it refuses the call, and KernelError if it fails.

    These errors are refusals: a NotImplementedError or ValueError that the implementation's own statement raised, such an
    AssertionError before a launch, and a TypeError that names an unknown or missing argument. "Before a launch" means: no given
    output was written, torch wrote to no argument except the workspace, no kernel was being launched, and the GPU reports no
    error. A call with a parameter that the signature does not have is always refused. A call that Triton's interpreter cannot
    make counts as refused.

    Args:
        function, args, arguments: the function, and its positional and keyword arguments.
        refusals: the exceptions that count as refusals, instead of those above.

    Raises:
        Unsupported: the function refused the call.
        KernelError: the function raised another error.
        KeyboardInterrupt: after Ctrl-C.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have none
        signature = None
    if signature is not None:
        try:
            signature.bind(*args, **arguments)
        except TypeError as error:
            raise Unsupported(_of_arguments(error)) from error
    outputs = {name: arguments[name] for name in OUTPUTS if isinstance(arguments.get(name), Tensor)}
    before = {} if is_capturing() else {name: output.clone() for name, output in outputs.items()}
    versions = _versions(arguments)
    try:
        return function(*args, **arguments)
    except BaseException as error:  # somebody else's code may raise anything
        if is_interruption(error):
            raise
        _check_gpu(error)
        if limit := limit_of(error):
            raise Unjudgeable(limit) from error
        wrote = any(not same_bits(arguments[name], held) for name, held in before.items())
        late = wrote or _versions(arguments) != versions
        if not _is_refusal(error, refusals, signature, arguments, late):
            raise raised(error) from error
        raise Unsupported(_sentence(error), late) from error


def output_and_lse(name: str, returned: Any) -> tuple[Tensor, Tensor | None]:
    """Return (output, LSE or None) from a function's return value.

    Raises:
        KernelError: the value is neither a tensor nor a pair (output, LSE) of tensors.
    """
    out, lse = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if type(out) not in TENSORS:
        raise KernelError(f"{name} returned {type(out).__name__}, not a tensor")
    if lse is not None and type(lse) not in TENSORS:
        raise KernelError(f"{name} returned {type(lse).__name__} as its LSE, not a tensor")
    return out, lse


def is_capturing() -> bool:
    """Return True if a CUDA graph is being captured. During a capture the host must not wait for the GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class RefusalNames:
    """The names of exceptions that count as refusals. Only a process that loads the kernel resolves them, since this may import
    the kernel's module.

    Attributes:
        names: names of the form "module:attribute" or "file.py:attribute".
        given: the names as the user wrote them.
    """

    names: tuple[str, ...]
    given: tuple[str, ...]

    @classmethod
    def of(cls, names: str, kernel: str = "") -> "RefusalNames":
        """Read a comma-separated list, such as "NotImplementedError,my/kernel.py:Unsupported".

        Args:
            names: names separated by commas: a built-in exception; or an attribute of a module or file, after a colon or a
                module's last dot; or an attribute of the kernel's own module, alone.
            kernel: name of the kernel. What is in its module is looked up in the module that the judge loads, however it is
                named.
        """
        own, found = kernel.partition(":")[0], dict[str, str]()
        for name in filter(None, map(str.strip, names.split(","))):
            where, _, attribute = name.rpartition(":" if ":" in name else ".")
            if not where:
                where = "builtins" if hasattr(builtins, attribute) or not own else own
            elif is_same_module(where, own):
                where = own
            found[f"{where}:{attribute}"] = name
        return cls(tuple(found), tuple(found.values()))

    def resolve(self) -> Refusals:
        """Return the exception classes, with the same names; raise ValueError if a name is not an exception."""
        found = dict[str, type[BaseException]]()
        for name, given in zip(self.names, self.given, strict=True):
            why, each = "", None
            try:
                each = load(name)
            except LoadError as error:
                why = f" ({error})"
            if not (isinstance(each, type) and issubclass(each, BaseException)):
                raise ValueError(
                    f"{given!r} is no exception: name one of Python's, such as NotImplementedError, one of the kernel's "
                    f"module, such as Unsupported, or one with its module or file, such as my.errors.Refused or "
                    f"my/errors.py:Refused{why}"
                )
            found[name] = each
        return Refusals(found.values(), found)


def resolved(refusals: Refusals | RefusalNames | None) -> Refusals | None:
    """Return the exceptions that count as refusals, with names resolved; None stands for the default list."""
    return refusals.resolve() if isinstance(refusals, RefusalNames) else refusals


def resolve_refusals(names: str, kernel: str = "") -> Refusals:
    """Return the exception classes that a list names, as `RefusalNames.of` reads it; raise ValueError if a name is none."""
    return RefusalNames.of(names, kernel).resolve()


def _versions(arguments: dict[str, Any]) -> list[int]:
    """Return torch's version counter of each tensor among the arguments. A torch operation that writes to the tensor increases
    it, a kernel's write does not.

    The workspace is left out, because it is scratch.
    """
    values = [value for name, value in arguments.items() if name != "workspace_buffer"]
    tensors = [part for value in values for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [part._version for part in tensors if isinstance(part, Tensor) and not part.is_inference()]


def _check_gpu(error: BaseException) -> None:
    """Raise KernelError if the error comes from the GPU, or if waiting for the GPU shows that a launch has failed."""
    if isinstance(error, torch.AcceleratorError):
        raise raised(error) from error
    if torch.cuda.is_initialized() and not is_capturing():
        try:
            torch.cuda.synchronize()
        except RuntimeError as of_launch:
            raise KernelError(f"{raised(error)}; {of_launch}") from error


def _is_refusal(
    error: BaseException,
    refusals: Refusals | None,
    signature: inspect.Signature | None,
    arguments: dict[str, Any],
    late: bool,
) -> bool:
    packages = [_package_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)][1:]  # without `invoke`
    if isinstance(error, AssertionError) and (late or "triton" in packages):  # Triton launches, or interprets
        return False
    if refusals is not None:
        return isinstance(error, refusals)
    if isinstance(error, TypeError):
        return _is_of_an_argument(message_of(error), signature, arguments)
    return isinstance(error, (NotImplementedError, ValueError, AssertionError)) and _has_raised(error, packages)


def _has_raised(error: BaseException, packages: Sequence[str]) -> bool:
    """Return True if a statement of the implementation raised an error: its own code, or a package that this code calls.

    Python raises a ValueError too, such as "too many values to unpack", and so do packages below those that the implementation
    calls, and frameworks and Python's library. These errors are no decisions to refuse a call.
    """
    if not packages:  # a compiled function
        return True
    last: Any = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code, at = last.tb_frame.f_code.co_code, last.tb_lasti
    # Compiled code has no opcodes; Cython's has a few, and is at the first.
    if 0 < at < len(code) and dis.opname[code[at]] != "RAISE_VARARGS":
        return False
    others = [package for package in packages if package not in (*FRAMEWORKS, LIBRARY)]
    return packages[-1] in others and len(set(others) - {"", others[0]}) <= 1


def _package_of(frame: FrameType) -> str:
    """Return the name of the installed package that a frame's code is from; `LIBRARY` for Python's own, "" if not installed."""
    package, file = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
    if package in FRAMEWORKS or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return str(package)
    return LIBRARY if file.startswith(LIBRARY) else ""


def _own_name(error: BaseException | None, function: Callable[..., Any]) -> str:
    """Return the name by which --refusals finds an exception of the function's module or package; "" for any other."""
    kind, module = type(error), str(getattr(function, "__module__", ""))
    if getattr(sys.modules.get(module), kind.__name__, None) is kind:
        return kind.__name__
    return name_of(kind) if kind.__module__.partition(".")[0] == module.partition(".")[0] else ""


def _is_of_an_argument(sentence: str, signature: inspect.Signature | None, arguments: dict[str, Any]) -> bool:
    """Return True if a TypeError says that the function lacks a parameter of the call, or the call a required argument."""
    named = set(re.findall(r"\w+", sentence)) & set(arguments)
    if _UNKNOWN.search(sentence):
        return bool(named)
    forwards = signature is None or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    return forwards and not named and _MISSING.search(sentence) is not None


def _sentence(error: BaseException) -> str:
    """Return the message of a refusal; for an assertion without a message, its source line."""
    message = message_of(error)
    if isinstance(error, AssertionError):
        return f"AssertionError: {message or traceback.extract_tb(error.__traceback__)[-1].line}"
    if isinstance(error, TypeError):
        return _of_arguments(error)
    return message or type(error).__name__


def _of_arguments(error: TypeError) -> str:
    """Return the message of a TypeError, preceded by words that say whether an argument is unknown or missing."""
    message = message_of(error)
    is_missing = _MISSING.search(message) is not None
    return f"{'it needs an argument that no call has' if is_missing else 'it does not take these arguments'}: {message}"


Arguments = dict[str, Any]


@dataclass(frozen=True)
class EquivalentForm:
    """A change of a call's arguments that does not change the expected result, such as leaving out the workspace."""

    name: str  # what is different in it, as in "judged with ... instead"
    # Whether a call has that form, given its function, its arguments and the sentence of its refusal.
    applies: Callable[[AttentionCall, Arguments, str], bool]
    change: Callable[[AttentionCall, Arguments], Arguments]  # returns the arguments of that form
    by_engines: bool = False  # an engine alone may take it: a check that gives an argument judges that argument


def _has_no_mask(interface: AttentionCall, arguments: Arguments, refusal: str) -> bool:
    """Return True for a decode call with several rows per request and no mask, which means a causal mask. A block-sparse call
    cannot have a mask.
    """
    several = (arguments.get("q_len_per_req") or 1) > 1
    takes_mask = interface is AttentionCall.DECODE and not arguments.get("enable_block_sparse_attention")
    return takes_mask and several and arguments.get("mask") is None


def _with_causal_mask(interface: AttentionCall, arguments: Arguments) -> Arguments:
    q_len, device = arguments["q_len_per_req"], arguments["query"].device
    return arguments | {"mask": _causal_mask(len(arguments["seq_lens"]), q_len, device)}


@functools.cache  # a graph cannot build a mask, and reads it as long as it is replayed
def _causal_mask(batch_size: int, q_len: int, device: torch.device) -> Tensor:
    """Return a draft's packed causal mask, uint16 [batch_size, q_len, words]: row i sees the draft's tokens 0 to i."""
    causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    return packed_mask(causal.expand(batch_size, -1, -1)).to(device)


def _with_out(interface: AttentionCall, arguments: Arguments) -> Arguments:
    query, problem = arguments["query"], CALL_TYPES[interface](**arguments).problem()
    shape = (*query.shape[:-1], problem.v_head_dim)
    return arguments | {"out": query.new_full(shape, float("nan"), dtype=problem.out_dtype)}


def _names(name: str, refusal: str) -> bool:
    return re.search(rf"\b{name}\b", refusal) is not None


def _left_out(name: str, words: str, by_engines: bool = False) -> EquivalentForm:
    """Return the form that leaves out the argument `name`; it applies if the call has it and the refusal mentions it."""
    return EquivalentForm(
        words,
        lambda interface, arguments, refusal: arguments.get(name) is not None and _names(name, refusal),
        lambda interface, arguments: {other: value for other, value in arguments.items() if other != name},
        by_engines,
    )


FORMS = (
    # What no result depends on.
    *(
        _left_out(name, f"no {name}")
        for name in ("workspace_buffer", "multi_ctas_kv_counter_buffer", "max_seq_len", "max_kv_len")
    ),
    _left_out("out", "its result copied into the output", by_engines=True),
    EquivalentForm(
        "an output handed out",
        lambda interface, arguments, refusal: arguments.get("out") is None and _names("out", refusal),
        _with_out,
    ),
    EquivalentForm("the causal mask of its rows", _has_no_mask, _with_causal_mask),
)


class KernelCalls:
    """Makes the calls of an implementation in one case, and repeats a refused call in equivalent forms (`FORMS`).

    Args:
        note: called with a sentence for each refused call that was accepted in another form.
        refusals: the exceptions that count as refusals, as in `invoke`.

    Attributes:
        count: number of calls so far.
        remarks: a sentence for each exception of the implementation's own that it raised and that is no refusal, so far.
    """

    def __init__(self, note: Callable[[str], None], refusals: Refusals | None = None) -> None:
        self.note, self.refusals, self.count = note, refusals, 0
        self.needed: dict[Any, list[EquivalentForm]] = {}  # by shape of a call
        self.remarks: dict[str, None] = {}

    def once(self, function: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        """Call a function once, in this form. The errors are those of `invoke`."""
        self.count += 1
        try:
            return invoke(function, args, arguments, self.refusals)
        except KernelError as failure:
            if own := _own_name(failure.__cause__, function):
                self.remarks[f"if the kernel refuses a call by raising {own}, say so: --refusals {own}"] = None
            raise

    def prepared(self, prepare: Callable[..., Any], /, **arguments: Any) -> Callable[[], Any]:
        """Call a function that prepares a call, and return a function that makes the prepared call."""
        return functools.partial(self.once, self.once(prepare, **arguments))

    def invoke(
        self, interface: AttentionCall, function: Callable[..., Any], arguments: Arguments, by_engine: bool = False
    ) -> Any:
        """Call a function that raises Unsupported for a refused call, such as `once`; if it does, call it in equivalent forms.

        Args:
            interface: which of FlashInfer's functions `function` makes a call of.
            function, arguments: the function, and the arguments of the call.
            by_engine: the call belongs to an engine's pass. A form may then leave out `out`, and the result is copied into it.

        Raises:
            Unsupported: the function refused the call and all equivalent forms that apply. The message is that of the first
                refusal. A refusal after a write, or while a CUDA graph is captured, is not repeated in other forms.
        """
        key = (interface, tuple(arguments), arguments["query"].shape, arguments.get("q_len_per_req"))
        if is_capturing() and key in self.needed:
            return _made(interface, function, arguments, self.needed[key])
        try:
            return function(**arguments)
        except Unsupported as refused:
            if refused.late or is_capturing():
                raise
            forms = [each for each in FORMS if by_engine or not each.by_engines]
            used: list[EquivalentForm] = []
            sentence = str(refused)
            while left := [each for each in forms if each not in used and each.applies(interface, arguments, sentence)]:
                used.append(left[0])
                try:
                    returned = _made(interface, function, arguments, used)
                except Unsupported as again:
                    sentence = str(again)
                else:
                    self.needed[key] = used
                    self.note(f"{refused}: judged with {' and '.join(each.name for each in used)} instead")
                    return returned
            raise


def _made(
    interface: AttentionCall, function: Callable[..., Any], arguments: Arguments, used: Sequence[EquivalentForm]
) -> Any:
    """Make a call in the given forms, and return its result; copy it into the caller's `out` if a form leaves that out."""
    changed = arguments
    for form in used:
        changed = form.change(interface, changed)
    returned = function(**changed)
    if returned is None:  # as of one that writes its result into an output alone
        returned = changed.get("out")
    if arguments.get("out") is not None and "out" not in changed:
        arguments["out"].copy_(output_and_lse(interface.value, returned)[0].view(arguments["out"].shape))
    return returned
