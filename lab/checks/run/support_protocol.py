"""The support protocol: which errors of an implementation are refusals of a call, and which are failures."""

import builtins
import dis
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

from lab.interpreter import limit_of
from lab.loading import LoadError, is_interruption, is_same_module, load, message_of, name_of
from lab.workloads.inputs.guards import same_bits

TENSORS = (Tensor, torch.nn.Parameter)  # permitted types of results: another subclass could override comparisons

OUTPUTS = ("out", "lse")  # arguments that a call writes
FRAMEWORKS = (
    "numpy",
    "torch",
    "triton",
)  # packages whose errors are no refusals, because they know nothing of the call
LIBRARY = sysconfig.get_path("stdlib")
# Words with which a function with **kwargs refuses an argument.
_UNKNOWN = re.compile(
    r"(unexpected|unknown|unrecogni[sz]ed|unsupported|invalid|extra)\W+((keyword|named)\W+)?(arg|kwarg|keyword|param|option)"
    r"|(does not|doesn't|cannot) (take|accept|support)",
    re.IGNORECASE,
)
_MISSING = re.compile(r"missing (a|\d+) required (positional |keyword-only )?arguments?")


class Refusals(tuple[type[BaseException], ...]):
    """The exception classes that count as refusals. They are pickled as `names`, which a worker resolves by
    `lab.loading.load`, so that a class may be in a file outside any package.
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
        late: True if the implementation had already written to its output or, by a torch operation, to another argument than
            the workspace.
    """

    def __init__(self, sentence: str, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class Unjudgeable(Unsupported):
    """The lab cannot judge the case on this machine, whatever the implementation does."""


class KernelError(Exception):
    """The implementation raised an error that is not a refusal, or returned no result."""


def raised(error: BaseException) -> KernelError:
    """Return a KernelError with the message of an error that the implementation raised; only the first line of a CUDA error."""
    message = message_of(error)
    sentence = message.split("\n", 1)[0] if isinstance(error, torch.AcceleratorError) else message
    return KernelError(f"it raised {type(error).__name__}: {sentence}")


def invoke(
    function: Callable[..., Any], args: Sequence[Any], arguments: dict[str, Any], refusals: Refusals | None = None
) -> Any:
    """Call a function of an implementation. Raise Unsupported if it refuses the call, and KernelError if it fails.

    By default, three kinds of errors are refusals. First, a NotImplementedError or ValueError that a statement of the
    implementation raised. Second, an AssertionError that a statement of the implementation raised before a launch: no given
    output was written, torch wrote to no argument except the workspace, no kernel was being launched, and the GPU reports no
    error. Third, a TypeError that names an unknown or missing argument. In addition, a call with an argument that is not in the
    signature is always refused.

    Args:
        function, args, arguments: the function, and its positional and keyword arguments.
        refusals: the exceptions that count as refusals instead of these three kinds; None for the three kinds.

    Raises:
        Unsupported: the function refused the call.
        Unjudgeable: Triton's interpreter cannot run the kernel.
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
    """The names of exceptions that count as refusals. `resolve` may import the kernel's module, so that only processes that
    load the kernel call it.
    """

    names: tuple[str, ...]  #: of the form "module:attribute" or "file.py:attribute"
    given: tuple[str, ...]  #: the names as the user wrote them

    @classmethod
    def of(cls, names: str, kernel: str = "") -> "RefusalNames":
        """Return the names in a comma-separated list, such as "NotImplementedError,my/kernel.py:Unsupported".

        Args:
            names: each name is a built-in exception ("ValueError"), an attribute of a module ("my.errors.Refused") or file
                ("my/errors.py:Refused"), or an attribute of the kernel's module ("Unsupported").
            kernel: name of the kernel. An exception of the kernel's module gets this name, so that the module is loaded once.
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
        """Import and return the exception classes. Raise ValueError if a name is no exception."""
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
    """Return the exception classes of `refusals`, which may be names. None, the default list, stays None."""
    return refusals.resolve() if isinstance(refusals, RefusalNames) else refusals


def resolve_refusals(names: str, kernel: str = "") -> Refusals:
    """Import and return the exception classes in a list for `RefusalNames.of`. Raise ValueError if a name is no exception."""
    return RefusalNames.of(names, kernel).resolve()


def _versions(arguments: dict[str, Any]) -> list[int]:
    """Return torch's version counter of each tensor among the arguments, except the workspace. A torch operation that writes
    to a tensor increases its counter; a write by a kernel does not.
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
    """Return True if an error is a refusal by the rules of `invoke`. `late`: an output or argument was written before."""
    packages = [_package_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)][1:]  # without `invoke`
    if isinstance(error, AssertionError) and (late or "triton" in packages):  # Triton launches, or interprets
        return False
    if refusals is not None:
        return isinstance(error, refusals)
    if isinstance(error, TypeError):
        return _is_of_an_argument(message_of(error), signature, arguments)
    return isinstance(error, (NotImplementedError, ValueError, AssertionError)) and _has_raised(error, packages)


def _has_raised(error: BaseException, packages: Sequence[str]) -> bool:
    """Return True if a `raise` or `assert` of the implementation, or of a package that it calls directly, raised an error.

    Return False if Python itself raised it ("too many values to unpack"), or a framework, Python's library or a package further
    down: then nobody decided to refuse the call. `packages` has the package of each frame of the traceback.
    """
    if not packages:  # a compiled function
        return True
    last: Any = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code, at = last.tb_frame.f_code.co_code, last.tb_lasti
    # Compiled code has no opcodes. Cython's has a few, and its position is always the first.
    if 0 < at < len(code) and dis.opname[code[at]] != "RAISE_VARARGS":
        return False
    others = [package for package in packages if package not in (*FRAMEWORKS, LIBRARY)]
    return packages[-1] in others and len(set(others) - {"", others[0]}) <= 1


def _package_of(frame: FrameType) -> str:
    """Return the installed package of a frame's code, `LIBRARY` for Python's library, or "" for code that is not installed."""
    package, file = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
    if package in FRAMEWORKS or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return str(package)
    return LIBRARY if file.startswith(LIBRARY) else ""


def own_name(error: BaseException | None, function: Callable[..., Any]) -> str:
    """Return the name of an exception's class for the option --refusals; "" if the class is not from the function's package."""
    kind, module = type(error), str(getattr(function, "__module__", ""))
    if getattr(sys.modules.get(module), kind.__name__, None) is kind:
        return kind.__name__
    return name_of(kind) if kind.__module__.partition(".")[0] == module.partition(".")[0] else ""


def _is_of_an_argument(sentence: str, signature: inspect.Signature | None, arguments: dict[str, Any]) -> bool:
    """Return True if the message of a TypeError says that the function does not have a parameter that the call passes, or that
    the call lacks a required argument.
    """
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
    """Return the message of a TypeError about arguments, after words that say whether an argument is unknown or missing."""
    message = message_of(error)
    is_missing = _MISSING.search(message) is not None
    return f"{'it needs an argument that no call has' if is_missing else 'it does not take these arguments'}: {message}"
