"""The transport from a worker to the process that prints the verdict. It carries only objects of the judge and plain values.

Reading a pickle can call any function that the pickle names, and a kernel can write to its worker's pipes. So only the classes
in `_SENT`, and plain values, are read from the pipes. Every other object becomes a `Foreign`. No class or enum member that this
process already has is changed.
"""

import builtins
import functools
import io
import multiprocessing.connection
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, ClassVar

import torch

from lab.calls.problem import AttentionCall
from lab.checks.run.verdicts import BitDifference, CheckedResult, Judged, Outcome, SavedOutput, TooLate, WrongVector
from lab.loading import LoadError
from lab.workloads.interfaces import MetadataFunction

# The findings of a case, and what `Workers.call` returns or raises.
_SENT = (
    *(Judged, Outcome, BitDifference, CheckedResult, WrongVector, SavedOutput),
    *(AttentionCall, MetadataFunction, LoadError, TooLate, pickle.PicklingError),
    # Exceptions of Python, but not KeyboardInterrupt or SystemExit, which would end the process that reads them.
    *(each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, Exception)),
)


class Foreign(Exception):  # noqa: N818 - it stands for any object
    """A stand-in for an unpickled object whose class is not permitted. It can be raised in the place of an exception."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__("its worker sent the judge an object that is part of no verdict")

    def __setstate__(self, state: Any) -> None:
        pass


@functools.cache
def _permitted() -> dict[tuple[str, str], Any]:
    """Return the classes and values that are read, by module and name: `_SENT`, the pool's messages, and torch's dtypes."""
    from pebble.common.types import RemoteException, Result, ResultStatus
    from pebble.pool.process import Acknowledgement, TaskProblem, TaskResult

    classes = (*_SENT, Acknowledgement, TaskProblem, TaskResult, Result, ResultStatus)
    rebuild = RemoteException.rebuild_exception

    def rebuilt(exception: Any, traceback: Any) -> Any:
        """Return an exception with its traceback. It is set as attributes, which no other object may get."""
        return rebuild(exception, traceback) if isinstance(exception, Exception) else Foreign()

    return {
        **{(each.__module__, each.__qualname__): each for each in classes},
        (rebuild.__module__, rebuild.__qualname__): rebuilt,
        **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    }


class _Unpickler(pickle._Unpickler):  # in Python, so that it can be restricted
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return _permitted().get((module, name), Foreign)

    def build(self) -> None:
        """Set the state of an object, as the opcode BUILD demands. Only a new dataclass or exception may get one: on a class or
        an enum member the opcode would change what this process judges with.
        """
        instance = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(instance, type) or not (is_dataclass(instance) or isinstance(instance, Exception)):
            raise pickle.UnpicklingError(f"it sets attributes of {instance!r}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = build


def loads(data: Any) -> Any:
    """Unpickle data from a worker. Objects of classes that are not permitted become `Foreign`.

    Raises:
        pickle.PicklingError: the data is damaged. The pool of the worker ends at this error, and at no other.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged data may cause any
        raise pickle.PicklingError(f"a worker sent what cannot be read: {type(error).__name__}: {error}") from error


class _ForkingPickler(multiprocessing.connection._ForkingPickler):  # type: ignore[name-defined]
    loads = staticmethod(loads)


@contextmanager
def guarded() -> Iterator[None]:
    """While the context is open, unpickle with `loads` all that this process receives through multiprocessing's pipes."""
    connection: Any = multiprocessing.connection
    before = connection._ForkingPickler
    connection._ForkingPickler = _ForkingPickler
    try:
        yield
    finally:
        connection._ForkingPickler = before
