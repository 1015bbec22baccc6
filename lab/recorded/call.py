"""Define a recorded attention call: its arguments, and the output and LSE that the engine's kernel computed."""

import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import torch
from torch import Tensor

from lab import files
from lab.calls import CALL_TYPES, AttentionCall, Problem, RaggedAttention
from lab.calls.arguments import RESULTS
from lab.calls.mla_decode import lse_is_base_e
from lab.calls.ragged_context import MIRRORS
from lab.named_enum import NamedEnum
from lab.references.assertion import lse_in_base_2, truth_of_problem
from lab.references.errors import Truth
from lab.workloads.inputs.contents import fill, new_workspace

# DeepSeek-V4's call is not recorded, because a recording would contain its whole pools.
RECORDED_CALLS = tuple(call for call in AttentionCall if call is not AttentionCall.DSV4_DECODE)
CPU = torch.device("cpu")
ALIGNMENT_BYTES = 256  # recorded tensors keep their addresses modulo this; no load of a kernel needs a larger alignment
# The errors that torch and pickle raise for a damaged file, or for a value that no file holds.
DAMAGED = (*files.DAMAGED, EOFError, OSError, RuntimeError, pickle.PickleError, BadZipFile, zlib.error)


class RecordingError(ValueError):
    """A file or folder has no call that the lab can read. The message is one line with the path and the reason."""

    def __init__(self, sentence: str) -> None:
        super().__init__(" ".join(sentence.splitlines()))  # names that it quotes from a file may contain line ends


class InvalidArgumentsError(RecordingError):
    """The engine made a call with invalid arguments, such as a page id outside the pool."""


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Yield `path`. Raise RecordingError if it is no regular file, or if the code in the `with` block finds it damaged."""
    try:
        regular = files.regular(path)
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield regular
    except RecordingError:
        raise
    except pickle.UnpicklingError as error:  # torch's own sentence advises to run the file's code
        raise RecordingError(f"{path} has something else than tensors and plain values, and is not read") from error
    except DAMAGED as error:
        first, *_ = str(error).splitlines() or ["the file is too short"]
        raise RecordingError(f"{path} is damaged: {type(error).__name__}: {first}") from error


def decoded(path: Path, name: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return an argument's value from the JSON of FlashInfer's recorder. Raise RecordingError if only its type was recorded."""
    match value:
        case {"type": "torch.Tensor", "tensor_key": str(key)} if key in tensors:
            return tensors[key]
        case {"type": "torch.dtype", "value": str(text)} if isinstance(
            dtype := getattr(torch, text.removeprefix("torch."), None), torch.dtype
        ):
            return dtype
        case {"type": "enum", "value": constant}:
            return constant
        case {"type": "tuple" | "list" as kind, "truncated": False, "items": list(items)}:
            values = [decoded(path, name, each, tensors) for each in items]
            return tuple(values) if kind == "tuple" else values
        case {}:
            what = value.get("type", "an object")
            raise RecordingError(f"{path} does not hold the value of {name}, only that it is {what}")
    return value


class Listed(NamedTuple):  # as `RecordedCase` describes it
    path: Path
    function: str  #: "" if the record is damaged
    time: str = ""
    replay: int = 0
    layer: int | None = None


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The arguments and results of a recorded call. Fields whose values were not recorded have their defaults."""

    function: AttentionCall
    #: the arguments by name, without workspace; `out` and `lse` only as dtype, shape and strides
    given: Mapping[str, Any]
    out: Tensor | None = None  #: the output after the call; None if the call did not return
    lse: Tensor | None = None  #: the LSE after the call; None if the call did not return, or computes none
    versions: Mapping[str, str] = field(default_factory=dict)  #: of each package in the engine's process
    lost: tuple[str, ...] = ()  #: sentences about data that was not recorded, such as alignment
    gpu: str = ""  #: the name of the GPU
    raised: str = ""  #: type and message of the error that the call raised
    module: str = ""  #: the module of the called function
    pages: tuple[int, ...] | None = None  #: the engine's ids of the pages in `kv_cache`; None: the whole pool
    drawn: frozenset[str] = frozenset()  #: names of the arguments whose contents were replaced by random values
    # Set only while the recorder has the call, as in `RecordedCase`. The number counts the calls of the process.
    time: str = ""
    number: int = 0
    replay: int = 0
    layer: int | None = None

    @staticmethod
    def function_of(path: Path, name: str) -> AttentionCall:
        if name not in [each.value for each in RECORDED_CALLS]:
            which = f"a call of {name}, and the lab does not read recordings of this function"
            raise RecordingError(f"{path} holds {which}")
        return AttentionCall(name)

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", {**self.given, "workspace_buffer": None})
        for name in RESULTS:
            if not isinstance(result := getattr(self, name), Tensor | None):
                raise RecordingError(f"the recorded {name} is of type {type(result).__name__}, and no tensor")
        fields = CALL_TYPES[self.function].__dataclass_fields__
        if unknown := sorted(self.given.keys() - fields.keys()):
            raise RecordingError(
                f"{self.function.value} was recorded with {', '.join(unknown)}, which FlashInfer 0.7.2 does not have: "
                f"the engine had {self.versions.get('flashinfer', 'an unknown release')}"
            )
        needed = (each.name for each in fields.values() if each.default is each.default_factory is MISSING)
        if missing := [name for name in needed if name not in self.given]:
            raise RecordingError(f"the recorded call of {self.function.value} lacks {', '.join(missing)}")

    def arguments(self, device: torch.device = CPU) -> dict[str, Any]:
        """Return copies of the arguments on a device, for a new call. Strides are kept, and alignments if they were recorded.
        The workspace is None, and `out` and `lse` contain NaN. Lengths that FlashInfer reads on the host stay on the CPU.
        """

        def copied(name: str, _: int, tensor: Tensor) -> Tensor:
            address = 0 if self.lost else tensor.data_ptr()  # a lost alignment is that of an allocation
            copy = placed(tensor, address, CPU if name in MIRRORS else device)
            if name not in RESULTS:
                distinct(copy).copy_(distinct(tensor))
            elif tensor.is_floating_point():  # an integer output is wrong anyway, so zeros suffice
                fill(distinct(copy), math.nan)
            return copy

        return {name: each_tensor(value, partial(copied, name)) for name, value in self.given.items()}

    def problem(self) -> Problem:
        """Return the attention problem that the arguments define. Raises InvalidArgumentsError for an invalid argument, and
        RecordingError if the lab does not support an argument, or no request has a query row.
        """
        try:
            problem: Problem = CALL_TYPES[self.function](**self.given).problem()
            if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
                problem.check_values()
        except (ArithmeticError, NotImplementedError) as error:
            raise RecordingError(str(error)) from error
        except (TypeError, ValueError) as error:
            kept_pool = f"the pool of {len(self.pages or ())} pages"  # the engine's pool has more
            text = str(error) if self.pages is None else str(error).replace(kept_pool, "the engine's pool")
            raise InvalidArgumentsError(text) from error
        if problem.has_no_rows or not problem.row_offsets()[-1]:
            raise RecordingError("no request has a query row")
        return problem

    def refuse_unsupported(self, done: str) -> None:
        what = "whose K/V heads select pages (enable_block_sparse_attention)"
        if not self.given.get("enable_block_sparse_attention"):
            what = "with scales of blocks (sage_attn_sfs)"
            if all(each is None for each in self.given.get("sage_attn_sfs", ())):
                return
        raise RecordingError(f"a call {what} cannot be {done} yet")

    def compared(self, truth: Truth, out: Tensor, lse: Tensor | None) -> tuple[Truth, Tensor, Tensor | None]:
        """Return (`truth`, `out`, `lse` in base 2) without padding rows and without requests that have non-finite keys."""
        if self.function is AttentionCall.MLA_DECODE:
            out = out.flatten(0, 1) if out.dim() == 4 else out
            lse = lse.flatten(0, 1) if lse is not None and lse.dim() == 3 else lse
        rows = slice(len(truth.expected))
        out, lse = out[rows], None if lse is None else lse_in_base_2(lse[rows], lse_is_base_e(self.given))
        finite = truth.expected.isfinite().flatten(1).all(dim=1)
        if bool(finite.all()) or len(out) != len(finite):  # an output of too few rows is of a wrong shape
            return truth, out, lse
        return truth.of_rows(finite), out[finite], None if lse is None else lse[finite]


def sides_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return views of K and V [num_pages, page_size, num_kv_heads, head_dim]. Unpaged (ragged) K and V become one page."""
    if isinstance(problem, RaggedAttention):
        return problem.key.unsqueeze(0), problem.value.unsqueeze(0)
    return problem.k_cache.transpose(1, 2), problem.v_cache.transpose(1, 2)


def each_tensor(value: Any, change: Callable[[int, Tensor], Tensor]) -> Any:
    """Return `value`, a tensor or a tuple or list of tensors, with each tensor replaced by `change(its index or 0, tensor)`."""
    if isinstance(value, tuple | list):
        return type(value)(change(side, each) if isinstance(each, Tensor) else each for side, each in enumerate(value))
    return change(0, value) if isinstance(value, Tensor) else value


def placed(layout: Tensor, address: int, device: torch.device = CPU) -> Tensor:
    """Return zeros with the shape, strides and dtype of `layout`. Their address equals `address` modulo ALIGNMENT_BYTES."""
    meta = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="meta")
    size_bytes = meta.untyped_storage().nbytes()  # with gaps between elements
    memory = torch.zeros(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    own = memory[(address - memory.data_ptr()) % ALIGNMENT_BYTES :][:size_bytes]
    return own.view(layout.dtype).as_strided(layout.shape, layout.stride())


def distinct(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in which each expanded dimension (of stride 0) has size 1."""
    return tensor[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


class Reason(NamedEnum):
    ARGUMENTS = "the arguments are invalid"
    RAISED = "the call raises an error"
    NO_RETURN = "the call did not return"
    NOT_FINITE = "the output is not finite"
    OUTPUT = "the output is wrong"
    LSE = "the LSE is wrong"
    BIAS = "the output has a bias"


@dataclass(frozen=True)
class Fault:  # of the result of a call
    reason: Reason
    sentence: str
    error: str = ""  #: the name of the type of the exception that was raised
    vector: str = ""  #: the place and the first elements of the worst output vector


def fault_by_calling(function: Callable[..., Any], device: torch.device, call: RecordedCall) -> Fault | None:
    # A call that crashes the GPU's context raises torch.AcceleratorError.
    try:
        returned = function(**call.arguments(device) | {"workspace_buffer": new_workspace(device)})
        results = [each.cpu() for each in (returned if isinstance(returned, tuple) else (returned,))]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # foreign code may raise anything
        return Fault(Reason.RAISED, f"{type(error).__name__}: {error}", type(error).__name__)
    return fault_of(call, *results[:2])


def recorded_fault(call: RecordedCall) -> Fault | None:
    if call.raised:
        return Fault(Reason.RAISED, call.raised, call.raised.partition(":")[0])
    if call.out is None:
        return Fault(Reason.NO_RETURN, "neither a result nor an error was recorded")
    return fault_of(call, call.out, call.lse)


def fault_of(
    call: RecordedCall, out: Tensor, lse: Tensor | None = None, arithmetic: torch.dtype | None = None
) -> Fault | None:
    """Return what is wrong with a call's arguments or, by the judge's error bounds, with `out` and `lse`; None if all is right.
    Requests with non-finite keys are left out. A kernel may round operands to the dtype `arithmetic` (None: the query's).
    """
    try:
        truth = truth_of_problem(call.problem(), arithmetic)
    except InvalidArgumentsError as error:
        return Fault(Reason.ARGUMENTS, str(error))
    truth, out, lse = call.compared(truth, out, lse)
    if not len(truth.expected):
        return None
    compared = truth.compare(out)
    if bool(compared.wrong.any()):
        ((row, head),) = compared.worst(1)
        shown = (side[row, head, :4].double().tolist() for side in (truth.expected, out))
        expected, got = (", ".join(f"{value:.5g}" for value in values) for values in shown)
        place = f"request {int(truth.request_of_row[row])}, row {truth.row_of_call(row)}, head {head}"
        vector = f"{place}: expected in float64 {expected} …, got {got} …"
        reason = Reason.OUTPUT if bool(out.isfinite().all()) else Reason.NOT_FINITE
        return Fault(reason, truth.wrong_output(compared, out), "", vector)
    if lse is not None and (sentence := truth.wrong_lse(lse)):
        return Fault(Reason.LSE, sentence)
    return None if compared.passed else Fault(Reason.BIAS, truth.wrong_output(compared, out))
