"""A recorded attention call: the arguments of an engine's call, and the results of its kernel."""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab import files
from lab.calls import CALL_TYPES, AttentionCall, Problem, RaggedAttention
from lab.calls.mla_decode import lse_is_base_e
from lab.calls.ragged_context import MIRRORS
from lab.references.assertion import lse_in_base_2
from lab.references.errors import Truth
from lab.workloads.inputs.contents import fill

# DSV4's call is left out, because a recording would hold its pools whole.
RECORDED_CALLS = tuple(call for call in AttentionCall if call is not AttentionCall.DSV4_DECODE)
RESULTS = ("out", "lse")  # arguments that a call fills
ALIGNMENT_BYTES = 256  # recorded tensors keep their addresses modulo this, the most that a kernel's loads need
# The errors that torch and pickle raise for a damaged file, or for a value that no file holds.
DAMAGED = (*files.DAMAGED, EOFError, OSError, RuntimeError, pickle.PickleError)


class RecordingError(ValueError):
    """A file or folder has no call that the lab can read; the message has the path and the reason, in one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(" ".join(sentence.splitlines()))  # it quotes names in the file


class InvalidArgumentsError(RecordingError):
    """The engine made a call with invalid arguments, such as a page id outside the pool."""


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Yield the path of a regular file that is read in the block.

    Raises:
        RecordingError: in the place of the errors that reading a damaged file raises; or the path is no regular file.
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
    """Return the function that a record names. Raise RecordingError if it is not one of `RECORDED_CALLS`."""
    for function in RECORDED_CALLS:
        if function.value == name:
            return function
    raise RecordingError(f"{path} holds a call of {name}, of which the lab reads no recording")


class ListedCall(NamedTuple):
    """A call in a folder, before its tensors are read. Fields are as in `lab.recorded.case.RecordedCase`, but `function` is ""
    if the record is damaged.
    """

    path: Path
    function: str
    time: str = ""
    replay: int = 0
    layer: int | None = None


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The recorded arguments of one call, and the results of the kernel.

    Attributes:
        function: the function that was called.
        given: the arguments by name, on the CPU if they were read. For `out` and `lse` only dtype, shape and strides matter.
        out: the output after the call; None if the call did not return.
        lse: the LSE after the call; None if the call did not end or returns no LSE.
        versions: the version of each package in the engine's process.
        lost: sentences about data that the recorder did not keep.
        gpu: the name of the GPU; "" if the recorder did not write it.
        raised: the error that the call raised, with its type; "" if it raised none, or if the recorder did not write it.
        module: the module of the function that was called; "" if the recorder did not write it.
        pages: the engine's id of each page in `kv_cache`, if the recorder kept some of the pages only; else None.
        drawn: names of the arguments whose contents were replaced by drawn values.
        time, replay, layer: as in `ListedCall`, while the recorder has the call.
        number: the number of the call in its process, while the recorder has the call.
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

    def arguments(self, device: torch.device | None = None) -> dict[str, Any]:
        """Return the recorded arguments as keyword arguments of a new call: without the workspace, with NaN in `out` and `lse`,
        so that an element that is not written is found.

        Args:
            device: copy the tensors to this device, with their strides, and with their alignment unless it is lost. Lengths
                that FlashInfer reads on the host are copied to the CPU. None: no copies.
        """

        def copied(name: str, value: Any) -> Any:
            place = torch.device("cpu") if device and name in MIRRORS else device
            if place is None and name not in RESULTS:
                return value
            return each_tensor(value, lambda _, tensor: self._copied(tensor, place, name not in RESULTS))

        return {name: copied(name, value) for name, value in {**self.given, "workspace_buffer": None}.items()}

    def problem(self) -> Problem:
        """Check the arguments, and return the attention that they define, for the computation of references.

        Raises:
            InvalidArgumentsError: the arguments are invalid, such as a page id outside the pool.
            RecordingError: the lab does not model one of the arguments, or no request has a query row.
        """
        try:
            problem: Problem = CALL_TYPES[self.function](**self.arguments()).problem()
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
        """Raise RecordingError if each K/V head has keys of its own. `done` is what then cannot be done, such as "timed"."""
        if self.given.get("enable_block_sparse_attention"):
            what = "a call whose K/V heads select pages (enable_block_sparse_attention)"
            raise RecordingError(f"{what} cannot be {done} yet")

    def compared(self, truth: Truth, out: Tensor, lse: Tensor | None) -> tuple[Truth, Tensor, Tensor | None]:
        """Return the expected results, and an output and LSE of this call, in the form in which they are compared: one row per
        query row, and the LSE in base 2. Padding rows and the rows of requests that see a non-finite key are left out.
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

    def _copied(self, tensor: Tensor, device: torch.device | None, has_contents: bool) -> Tensor:
        """Copy a tensor to a device; without its contents, the copy holds NaN, or 0 if it has integers."""
        copy = placed(
            tensor, 0 if self.lost else tensor.data_ptr(), device
        )  # a lost alignment is that of an allocation
        if has_contents:
            unrepeated(copy).copy_(unrepeated(tensor))
        elif tensor.is_floating_point():  # a result of integers is wrong, and zeros do for it
            fill(unrepeated(copy), math.nan)
        return copy


def sides_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return K and V as views [num_pages, page_size, num_kv_heads, head_dim]; ragged K and V are one page."""
    if isinstance(problem, RaggedAttention):
        return problem.key.unsqueeze(0), problem.value.unsqueeze(0)
    return problem.k_cache.transpose(1, 2), problem.v_cache.transpose(1, 2)


def each_tensor(value: Any, change: Callable[[int, Tensor], Tensor]) -> Any:
    """Apply a change to a tensor, or to each tensor of a tuple or list with its place; return other values as they are."""
    if isinstance(value, tuple | list):
        return type(value)(change(side, each) if isinstance(each, Tensor) else each for side, each in enumerate(value))
    return change(0, value) if isinstance(value, Tensor) else value


def size_bytes(layout: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one, those of gaps included."""
    meta = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="meta")
    return meta.untyped_storage().nbytes()


def placed(layout: Tensor, address: int, device: torch.device | None = None) -> Tensor:
    """Return a tensor of zeros with a tensor's shape, strides and dtype, whose address is `address` modulo ALIGNMENT_BYTES. It
    is on the CPU if `device` is None.
    """
    # The system fills only the part that is used.
    memory = torch.zeros(size_bytes(layout) + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    own = memory[(address - memory.data_ptr()) % ALIGNMENT_BYTES :][: size_bytes(layout)]
    return own.view(layout.dtype).as_strided(layout.shape, layout.stride())


def unrepeated(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's elements in which an expanded dimension has size 1."""
    return tensor[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
