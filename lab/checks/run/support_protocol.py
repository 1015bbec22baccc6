"""Call an implementation, and decide which of its errors are refusals of the call, and which are failures.

A refused call is repeated with equivalent arguments, such as without `out`, so that the kernel can be judged nevertheless.
"""

import dis
import functools
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.calls import CALL_TYPES
from lab.calls.problem import LATENT_CALLS, AttentionCall
from lab.checks.run.verdicts import JUDGED_WITH
from lab.interpreter import limit_of
from lab.loading import is_interruption, message_of, name_of
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.masks import packed_mask

Arguments = dict[str, Any]  # of a call, by name
Refused = tuple[type[BaseException], ...]  # the exceptions that count as refusals of a call

TENSORS = (Tensor, torch.nn.Parameter)  # permitted types of results: another subclass could override comparisons

OUTPUTS = ("out", "lse")  # arguments that a call writes
# Arguments on which no result depends: a refused call is made without them.
OMITTED = ("workspace_buffer", "multi_ctas_kv_counter_buffer", "max_seq_len", "max_kv_len")
# Packages whose errors are no refusals, because they know nothing of the call
FRAMEWORKS = ("numpy", "torch", "triton")
LIBRARY = sysconfig.get_path("stdlib")
# Words with which a function with **kwargs refuses an argument.
_UNKNOWN = re.compile(
    r"(unexpected|unknown|unrecogni[sz]ed|unsupported|invalid|extra)\W+((keyword|named)\W+)?(arg|kwarg|keyword|param|option)"
    r"|(does not|doesn't|cannot) (take|accept|support)",
    re.IGNORECASE,
)
_MISSING = re.compile(r"missing (a|\d+) required (positional |keyword-only )?arguments?")


class Unsupported(NotImplementedError):  # noqa: N818 - not an error of anybody's
    """The implementation refused a call, or has no parameter for an argument of the call. `late` is True if the implementation
    had already written to its output or, by a torch operation, to another argument except the workspace.
    """

    def __init__(self, sentence: str, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class Unjudgeable(Unsupported):
    """The lab cannot judge the case on this machine, for any implementation."""


class KernelError(Exception):
    """The implementation raised an error that is not a refusal, or returned no result."""


def raised(error: BaseException) -> KernelError:
    message = message_of(error)
    sentence = message.split("\n", 1)[0] if isinstance(error, torch.AcceleratorError) else message  # CUDA adds advice
    return KernelError(f"it raised {type(error).__name__}: {sentence}".removesuffix(": "))


def invoke(
    function: Callable[..., Any], args: Sequence[Any], arguments: dict[str, Any], refusals: Refused | None = None
) -> Any:
    """Call a function of an implementation. Raise Unsupported if it refuses the call, and KernelError if it fails.

    A call whose arguments do not fit the signature of the function is refused. By default, these errors are refusals too::

        NotImplementedError, ValueError  that a statement of the implementation raised
        AssertionError                   that a statement of the implementation raised before a launch: `out` and `lse` are
                                         unchanged, torch wrote to no argument except the workspace, no kernel was being
                                         launched, and the GPU reports no error
        TypeError                        that names an unknown or missing argument

    `refusals` replaces these errors. Raise Unjudgeable if Triton's interpreter cannot run the kernel.
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
        if isinstance(error, torch.AcceleratorError):
            raise raised(error) from error
        if torch.cuda.is_initialized() and not is_capturing():
            try:
                torch.cuda.synchronize()
            except RuntimeError as of_launch:
                raise KernelError(f"{raised(error)}; {of_launch}") from error
        if limit := limit_of(error):
            raise Unjudgeable(limit) from error
        wrote = any(not same_bits(arguments[name], held) for name, held in before.items())
        late = wrote or _versions(arguments) != versions
        if not _is_refusal(error, refusals, signature, arguments, late):
            raise raised(error) from error
        raise Unsupported(_sentence(error), late) from error


def output_and_lse(interface: AttentionCall, returned: Any) -> tuple[Tensor, Tensor | None]:
    """Return (output, LSE or None), with one row per query row, from what a call returned: an output or (output, LSE). Raise
    KernelError if it returned anything else.
    """
    out, lse = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if type(out) not in TENSORS:
        raise KernelError(f"{interface.value} returned {type(out).__name__}, not a tensor")
    if lse is not None and type(lse) not in TENSORS:
        raise KernelError(f"{interface.value} returned {type(lse).__name__} as its LSE, not a tensor")
    # New tensors: the kernel may have given its own an attribute `double`, which a comparison would call.
    out, lse = Tensor.detach(out), None if lse is None else Tensor.detach(lse)
    if interface in LATENT_CALLS:
        out = out.flatten(0, 1) if out.dim() == 4 else out
        lse = lse.flatten(0, 1) if lse is not None and lse.dim() == 3 else lse
    return out, lse


def is_capturing() -> bool:
    """Return True during the capture of a CUDA graph, in which the host must not wait for the GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _versions(arguments: dict[str, Any]) -> list[int]:
    # torch's version counters: an operation of torch that writes to a tensor increases its counter, a kernel does not.
    values = [value for name, value in arguments.items() if name != "workspace_buffer"]
    tensors = [part for value in values for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [part._version for part in tensors if isinstance(part, Tensor) and not part.is_inference()]


def _is_refusal(
    error: BaseException,
    refusals: Refused | None,
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
    # True if a `raise` or `assert` statement of the implementation, or of a package that it calls directly, raised the error.
    # An error of Python itself ("too many values to unpack"), of a framework, of Python's library or of a package further down
    # is no decision to refuse the call. `packages` has the package of each frame of the error's traceback.
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
    # `LIBRARY` for Python's own library, "" for code that is not installed.
    package, file = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
    if package in FRAMEWORKS or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return str(package)
    return LIBRARY if file.startswith(LIBRARY) else ""


def own_name(error: BaseException | None, function: Callable[..., Any]) -> str:
    """Return an error's class as the option `--refusals` names it; "" if the class is not from the package of `function`."""
    kind, module = type(error), str(getattr(function, "__module__", ""))
    if getattr(sys.modules.get(module), kind.__name__, None) is kind:
        return kind.__name__
    return name_of(kind) if kind.__module__.partition(".")[0] == module.partition(".")[0] else ""


def _is_of_an_argument(sentence: str, signature: inspect.Signature | None, arguments: dict[str, Any]) -> bool:
    # True if a TypeError says that the function has no parameter for an argument or, if its signature is unknown or has
    # `**keywords`, that a required argument is missing.
    named = set(re.findall(r"\w+", sentence)) & set(arguments)
    if _UNKNOWN.search(sentence):
        return bool(named)
    forwards = signature is None or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    return forwards and not named and _MISSING.search(sentence) is not None


def _sentence(error: BaseException) -> str:
    message = message_of(error)
    if isinstance(error, AssertionError):
        return f"AssertionError: {message or traceback.extract_tb(error.__traceback__)[-1].line}"
    if isinstance(error, TypeError):
        return _of_arguments(error)
    return message or type(error).__name__


def _of_arguments(error: TypeError) -> str:
    message = message_of(error)
    is_missing = _MISSING.search(message) is not None
    return f"{'it needs an argument that no call has' if is_missing else 'it does not take these arguments'}: {message}"


class _EquivalentForm(NamedTuple):
    words: str  # for "judged with ... instead"
    omitted: str = ""  # the argument that is left out
    added: Callable[[Arguments], Arguments] = lambda _: {}  # returns further arguments of a call


def _forms(interface: AttentionCall, arguments: Arguments, refusal: str, by_engine: bool) -> Iterator[_EquivalentForm]:
    named = set(re.findall(r"\w+", refusal))
    for name in OMITTED:
        if name in named and arguments.get(name) is not None:
            yield _EquivalentForm(f"no {name}", name)
    out_is_given = arguments.get("out") is not None
    if "out" in named and out_is_given and by_engine:  # elsewhere a check wants `out` itself judged
        yield _EquivalentForm("its result copied into the output", "out")
    if "out" in named and not out_is_given:
        yield _EquivalentForm("an output handed out", added=functools.partial(_with_out, interface))
    takes_mask = interface is AttentionCall.DECODE and not arguments.get("enable_block_sparse_attention")
    if takes_mask and (arguments.get("q_len_per_req") or 1) > 1 and arguments.get("mask") is None:
        mask = functools.partial(_causal_mask, len(arguments["seq_lens"]), arguments["q_len_per_req"])
        yield _EquivalentForm("the causal mask of its rows", added=lambda given: {"mask": mask(given["query"].device)})


def _with_out(interface: AttentionCall, arguments: Arguments) -> Arguments:
    query, problem = arguments["query"], CALL_TYPES[interface](**arguments).problem()
    shape = (*query.shape[:-1], problem.v_head_dim)
    return {"out": query.new_full(shape, float("nan"), dtype=problem.out_dtype)}


@functools.cache  # a CUDA graph cannot build a mask during capture, and reads the same mask in each replay
def _causal_mask(batch_size: int, q_len: int, device: torch.device) -> Tensor:
    causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    return packed_mask(causal.expand(batch_size, -1, -1)).to(device)


class KernelCalls:
    """Makes the calls of one case to an implementation, and repeats a refused call with equivalent arguments."""

    def __init__(self, implementation: Any, note: Callable[[str], None], refusals: Refused | None = None) -> None:
        self.implementation, self.note, self.refusals = implementation, note, refusals
        self.count = 0  #: number of calls so far
        self.needed: dict[Any, Iterable[_EquivalentForm]] = {}  #: the forms with which calls of a shape were accepted
        #: a hint for each exception class of the implementation that it raised and that does not count as a refusal
        self.remarks: dict[str, None] = {}

    def offered(self, name: str, missing: type[Exception] = KernelError) -> Callable[..., Any]:
        function: Callable[..., Any] | None = getattr(self.implementation, name, None)
        if function is None:
            raise missing(f"it has no {name}")
        return function

    def make(self, prefix: str, interface: AttentionCall, arguments: Arguments, of_engine: bool = False) -> Any:
        """Make a call, with equivalent arguments if it is refused, and return what the function returned. If `prefix` is
        "prepare_" or "plan_", return a callable that makes the call. If `of_engine`, omit `window_left=-1`, and arguments whose
        value and default are None.
        """
        function = self.offered(prefix + interface.value, Unsupported if of_engine else KernelError)
        once = functools.partial(self.once, function)
        if of_engine:
            fields = CALL_TYPES[interface].__dataclass_fields__
            arguments = {
                name: value
                for name, value in arguments.items()
                if not (name == "window_left" and value == -1) and not (value is None and fields[name].default is None)
            }
        call = (lambda **given: functools.partial(self.once, once(**given))) if prefix else once
        return self.invoke(interface, call, arguments, by_engine=of_engine and not prefix)

    def once(self, function: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        self.count += 1
        try:
            return invoke(function, args, arguments, self.refusals)
        except KernelError as failure:
            if own := own_name(failure.__cause__, function):
                self.remarks[f"if the kernel refuses a call by raising {own}, say so: --refusals {own}"] = None
            raise

    def invoke(
        self, interface: AttentionCall, function: Callable[..., Any], arguments: Arguments, by_engine: bool = False
    ) -> Any:
        """Make a call. If it is refused, repeat it with equivalent arguments until one call is accepted.

        If all calls are refused, raise the refusal of the first call, or of the last call that differs from it only by omitted
        arguments of `OMITTED`. A refusal after a write, or in the capture of a CUDA graph, is raised at once. In an engine's
        forward pass (`by_engine`), the repeated call may omit `out`, and its result is copied into `out`.
        """
        key = (interface, tuple(arguments), arguments["query"].shape, arguments.get("q_len_per_req"))
        if key in self.needed and is_capturing():
            return _made(interface, function, arguments, self.needed[key])
        try:
            return function(**arguments)
        except Unsupported as refused:
            if refused.late or is_capturing():
                raise
            used: dict[str, _EquivalentForm] = {}  # by words
            last = reason = refused
            while True:
                forms = _forms(interface, arguments, str(last), by_engine)
                if (form := next((each for each in forms if each.words not in used), None)) is None:
                    raise reason from None
                used[form.words] = form
                try:
                    returned = _made(interface, function, arguments, used.values())
                except Unsupported as again:
                    last = again
                    reason = again if all(each.omitted in OMITTED for each in used.values()) else reason
                else:
                    self.needed[key] = used.values()
                    self.note(f"{refused}{JUDGED_WITH}{' and '.join(used)} instead")
                    return returned


def _made(
    interface: AttentionCall, function: Callable[..., Any], arguments: Arguments, used: Iterable[_EquivalentForm]
) -> Any:
    changed = arguments
    for form in used:
        changed = {name: each for name, each in changed.items() if name != form.omitted} | form.added(changed)
    returned = function(**changed)
    if returned is None:  # the function only wrote its result into `out`
        returned = changed.get("out")
    if arguments.get("out") is not None and "out" not in changed:
        arguments["out"].copy_(output_and_lse(interface, returned)[0].view(arguments["out"].shape))
    return returned
