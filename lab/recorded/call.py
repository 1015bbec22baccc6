"""Define a recorded attention call: the arguments of an engine's call, and the output and LSE of its kernel."""

import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import torch
from torch import Tensor

from lab import files
from lab.calls import CALL_TYPES, AttentionCall, Problem, RaggedAttention
from lab.calls.mla_decode import lse_is_base_e
from lab.calls.ragged_context import MIRRORS
from lab.references.assertion import lse_in_base_2
from lab.references.errors import Truth
from lab.workloads.inputs.contents import fill

# DeepSeek-V4's call is not recorded, because a recording would contain its whole pools.
RECORDED_CALLS = tuple(call for call in AttentionCall if call is not AttentionCall.DSV4_DECODE)
CPU = torch.device("cpu")
RESULTS = ("out", "lse")  # arguments that a call writes
ALIGNMENT_BYTES = 256  # recorded tensors keep their addresses modulo this; no load of a kernel needs a larger alignment
# The errors that torch and pickle raise for a damaged file, or for a value that no file holds.
DAMAGED = (*files.DAMAGED, EOFError, OSError, RuntimeError, pickle.PickleError, BadZipFile, zlib.error)


class RecordingError(ValueError):
    """A file or folder has no call that the lab can read. The message has the path and the reason, in one line."""

    def __init__(self, sentence: str) -> None:
        super().__init__(" ".join(sentence.splitlines()))  # names that it quotes from a file may contain line ends


class InvalidArgumentsError(RecordingError):
    """The engine made a call with invalid arguments, such as a page id outside the pool."""


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Yield the path, for a block that reads the file. An error that the block raises because the file is damaged becomes a
    RecordingError.

    Raises:
        RecordingError: the path is not a regular file, or the block raised an error that a damaged file causes.
    """
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


def recorded_function(path: Path, name: str) -> AttentionCall:
    """Return the function with this name. Raises RecordingError, with the path of the record, if it is not in
    `RECORDED_CALLS`.
    """
    for function in RECORDED_CALLS:
        if function.value == name:
            return function
    raise RecordingError(f"{path} holds a call of {name}, and the lab does not read recordings of this function")


def decoded(path: Path, name: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Convert the recorded value of the argument `name` to a tensor (of `tensors`, by the recorded key), a dtype, a tuple, a
    list or a plain value. Raises RecordingError, which names `path`, if FlashInfer recorded only the type of the value.
    """
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


class ListedCall(NamedTuple):
    """A recorded call before its tensors are read: its file, the name of the function ("" if the record is damaged),
    its time, the number of the graph replay (0 for an eager call), and the model's layer (None if unknown).
    """

    path: Path
    function: str
    time: str = ""
    replay: int = 0
    layer: int | None = None


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The arguments of one call of an engine, and the output and LSE of its kernel.

    Attributes:
        given: the arguments by name. Their tensors are on the CPU if the call was read from a file. For `out` and `lse` only
            dtype, shape and strides are meaningful.
        out: the output after the call; None if the call did not return.
        lse: the LSE after the call; None if the call did not return, or does not compute the LSE.
        versions: the version of each package in the engine's process.
        lost: sentences about data that was not recorded, such as alignment.
        gpu: the name of the GPU; "" if it was not recorded.
        raised: type and message of the error that the call raised; "" if it raised none, or if it was not recorded.
        module: the module of the called function; "" if it was not recorded.
        pages: the engine's id of each page in `kv_cache`, if only some pages of the pool were recorded; else None.
        drawn: names of the arguments whose recorded contents were replaced by random values.
        time, replay, layer: its time, graph replay (0: none) and model layer; set only while the recorder has it.
        number: the number of the call in the engine's process. It is set only while the recorder has the call.
    """

    function: AttentionCall
    given: Mapping[str, Any]
    out: Tensor | None = None
    lse: Tensor | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    gpu: str = ""
    raised: str = ""
    module: str = ""
    pages: tuple[int, ...] | None = None
    drawn: frozenset[str] = frozenset()
    time: str = ""
    number: int = 0
    replay: int = 0
    layer: int | None = None

    def __post_init__(self) -> None:
        for name in RESULTS:
            if not isinstance(result := getattr(self, name), Tensor | None):
                raise RecordingError(f"the recorded {name} is of type {type(result).__name__}, and no tensor")
        fields = CALL_TYPES[self.function].__dataclass_fields__
        unknown = sorted(set(self.given) - set(fields))
        if unknown:
            raise RecordingError(
                f"{self.function.value} was recorded with {', '.join(unknown)}, which FlashInfer 0.7.2 does not have: "
                f"the engine had {self.versions.get('flashinfer', 'an unknown release')}"
            )
        needed = (each.name for each in fields.values() if each.default is each.default_factory is MISSING)
        if missing := [name for name in needed if name not in {*self.given, "workspace_buffer"}]:
            raise RecordingError(f"the recorded call of {self.function.value} lacks {', '.join(missing)}")

    def arguments(self, device: torch.device = CPU) -> dict[str, Any]:
        """Return copies of the recorded arguments as keyword arguments of a new call. The workspace is None, and `out` and
        `lse` contain NaN, so that the judge finds elements that a kernel does not write.

        Args:
            device: the device of the copies, which keep strides and (if it was recorded) alignment. Lengths that FlashInfer
                reads on the host stay on the CPU.
        """

        def copied(name: str, value: Any) -> Any:
            place = CPU if name in MIRRORS else device
            return each_tensor(value, lambda _, tensor: self._copied(tensor, place, name not in RESULTS))

        return {name: copied(name, value) for name, value in self.without_workspace().items()}

    def without_workspace(self) -> dict[str, Any]:
        """Return the recorded arguments, with None for the workspace, whose contents are not recorded."""
        return {**self.given, "workspace_buffer": None}

    def problem(self) -> Problem:
        """Check the arguments, and return the attention problem that they define.

        Raises:
            InvalidArgumentsError: the arguments are invalid, such as a page id outside the pool.
            RecordingError: the lab does not support one of the arguments, or no request has a query row.
        """
        try:
            problem: Problem = CALL_TYPES[self.function](**self.without_workspace()).problem()
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

    def refuse_block_sparse(self, done: str) -> None:
        """Raise RecordingError if the call is block-sparse, so that each K/V head selects its own pages. The message says that
        "the call cannot be <done> yet".
        """
        if self.given.get("enable_block_sparse_attention"):
            what = "a call whose K/V heads select pages (enable_block_sparse_attention)"
            raise RecordingError(f"{what} cannot be {done} yet")

    def compared(self, truth: Truth, out: Tensor, lse: Tensor | None) -> tuple[Truth, Tensor, Tensor | None]:
        """Return the expected results, and an output and LSE of this call (None: no LSE), in the form in which the judge
        compares them: one row per query row, and the LSE in base 2. Padding rows are omitted, and so are the rows of requests
        that see a non-finite key.
        """
        if self.function is AttentionCall.MLA_DECODE:
            out = out.flatten(0, 1) if out.dim() == 4 else out
            lse = lse.flatten(0, 1) if lse is not None and lse.dim() == 3 else lse
        rows = slice(len(truth.expected))
        out, lse = out[rows], None if lse is None else lse_in_base_2(lse[rows], lse_is_base_e(self.given))
        finite = truth.expected.isfinite().flatten(1).all(dim=1)
        if bool(finite.all()) or len(out) != len(finite):  # an output of too few rows is of a wrong shape
            return truth, out, lse
        return truth.of_rows(finite), out[finite], None if lse is None else lse[finite]

    def _copied(self, tensor: Tensor, device: torch.device, has_contents: bool) -> Tensor:
        """Copy a tensor to a device. If `has_contents` is False, the copy contains NaN (0 for an integer dtype)."""
        # A lost alignment is that of an allocation.
        copy = placed(tensor, 0 if self.lost else tensor.data_ptr(), device)
        if has_contents:
            unrepeated(copy).copy_(unrepeated(tensor))
        elif tensor.is_floating_point():  # an integer output is wrong anyway, so zeros suffice
            fill(unrepeated(copy), math.nan)
        return copy


def sides_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return K and V of a problem as views [num_pages, page_size, num_kv_heads, head_dim]. Ragged K and V become one page."""
    if isinstance(problem, RaggedAttention):
        return problem.key.unsqueeze(0), problem.value.unsqueeze(0)
    return problem.k_cache.transpose(1, 2), problem.v_cache.transpose(1, 2)


def each_tensor(value: Any, change: Callable[[int, Tensor], Tensor]) -> Any:
    """Return change(0, value) for a tensor. For a tuple or list, replace each tensor in it by change(index, tensor). Return any
    other value unchanged.
    """
    if isinstance(value, tuple | list):
        return type(value)(change(side, each) if isinstance(each, Tensor) else each for side, each in enumerate(value))
    return change(0, value) if isinstance(value, Tensor) else value


def size_bytes(layout: Tensor) -> int:
    """Return the number of bytes from the start of a tensor's first element to the end of its last one, gaps included."""
    meta = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="meta")
    return meta.untyped_storage().nbytes()


def placed(layout: Tensor, address: int, device: torch.device = CPU) -> Tensor:
    """Return a tensor of zeros with the shape, strides and dtype of `layout`, and with the alignment of `address`: its
    own address and `address` are equal modulo ALIGNMENT_BYTES.
    """
    memory = torch.zeros(size_bytes(layout) + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    own = memory[(address - memory.data_ptr()) % ALIGNMENT_BYTES :][: size_bytes(layout)]
    return own.view(layout.dtype).as_strided(layout.shape, layout.stride())


def unrepeated(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that has each stored element once: an expanded dimension (of stride 0) has size 1."""
    return tensor[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
