"""The support protocol: which errors of an implementation are refusals of a call, and which are failures."""

import importlib
import inspect
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.workloads.inputs.guards import same_bits

TENSORS = (Tensor, torch.nn.Parameter)  # a subclass of torch.Tensor may answer what it likes when it is compared
Refusals = tuple[type[BaseException], ...]

OUTPUTS = ("out", "lse")  # arguments that a call writes
# A function with *args and **kwargs refuses an argument in words of its own.
_UNKNOWN = re.compile(
    r"(unexpected|unknown|unrecogni[sz]ed|unsupported|invalid|extra)\W+((keyword|named)\W+)?(arg|kwarg|keyword|param|option)"
    r"|(does not|doesn't|cannot) (take|accept|support)",
    re.IGNORECASE,
)
_MISSING = re.compile(r"missing (a|\d+) required (positional |keyword-only )?arguments?")


class Unsupported(NotImplementedError):  # noqa: N818 - not an error of anybody's
    """The implementation refused a call, or does not have a parameter of the call.

    Attributes:
        late: True if the implementation refused too late: after writing to its output or, by a torch operation, to an argument
            other than the workspace.
    """

    def __init__(self, sentence: str, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class KernelError(Exception):
    """The implementation raised an error that is not a refusal, or returned no result."""


def raised(error: BaseException) -> KernelError:
    """Return a KernelError for an error of the implementation; of a CUDA error it has only the first line."""
    sentence = str(error).split("\n", 1)[0] if isinstance(error, torch.AcceleratorError) else error
    return KernelError(f"it raised {type(error).__name__}: {sentence}")


def invoke(
    function: Callable[..., Any],
    args: Sequence[Any],
    arguments: dict[str, Any],
    refusals: Refusals | None = None,
) -> Any:
    """Call a function of an implementation. Raise Unsupported if it refuses the call, and KernelError if it fails.

    These errors are refusals: NotImplementedError, ValueError, a TypeError that names an unknown or missing argument, and an
    AssertionError before a launch. "Before a launch" means: no given output was written, torch wrote to no argument except the
    workspace, no kernel was being launched, and the GPU reports no error. A call with a parameter that the signature does not
    have is always refused.

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
        # Workers ignore Ctrl-C: there a KeyboardInterrupt is the implementation's own.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            raise
        _check_gpu(error)
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


def resolve_refusals(names: str) -> Refusals:
    """Return the exception classes that a comma-separated list names, such as "NotImplementedError,my.kernel.Unsupported".

    Args:
        names: names separated by commas: a built-in exception, or a dotted name with its module.

    Raises:
        ValueError: a name is not an exception.
    """
    found = []
    for name in filter(None, map(str.strip, names.split(","))):
        module, _, attribute = name.rpartition(".")
        try:
            each = getattr(importlib.import_module(module or "builtins"), attribute, None)
        except ImportError as error:
            raise ValueError(f"{name!r} is no exception: {error}") from error
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise ValueError(
                f"{name!r} is no exception: name one of Python's, such as NotImplementedError, or one with its module, such "
                "as my.kernel.Unsupported"
            )
        found.append(each)
    return tuple(found)


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
    if isinstance(error, AssertionError) and (late or _is_of_a_launch(error)):
        return False
    if refusals is not None:
        return isinstance(error, refusals)
    if isinstance(error, TypeError):
        return _is_of_an_argument(str(error), signature, arguments)
    return isinstance(error, (NotImplementedError, ValueError, AssertionError))


def _is_of_a_launch(error: BaseException) -> bool:
    """Return True if an AssertionError comes from Triton (for instance from a kernel in its interpreter) or from a comparison
    function of torch or numpy. It is then no refusal.
    """
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(module.startswith(("triton.", "torch.testing", "numpy.testing")) for module in modules)


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
    message = str(error)
    if isinstance(error, AssertionError):
        return f"AssertionError: {message or traceback.extract_tb(error.__traceback__)[-1].line}"
    if isinstance(error, TypeError):
        return _of_arguments(error)
    return message or type(error).__name__


def _of_arguments(error: TypeError) -> str:
    """Return the message of a TypeError, preceded by words that say whether an argument is unknown or missing."""
    is_missing = _MISSING.search(str(error)) is not None
    return f"{'it needs an argument that no call has' if is_missing else 'it does not take these arguments'}: {error}"
