"""Unpickle safely what a worker process sends to the main process.

Unpickling can call any function that a pickle names, and a kernel can write to the pipes of its worker. So only built-in values
and objects of the classes in `_SENT` are unpickled. Every other object becomes a `Foreign`.
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
from lab.checks.run.verdicts import BitDifference, CheckedResult, Judged, Outcome, TooLate, WrongVector
from lab.loading import LoadError
from lab.workloads.inputs.expected import SavedTensor
from lab.workloads.interfaces import MetadataFunction

# The classes of a case's judgement, and of the values that `Workers.call` returns or raises.
_SENT = (
    *(Judged, Outcome, BitDifference, CheckedResult, WrongVector, SavedTensor),
    *(AttentionCall, MetadataFunction, LoadError, TooLate, pickle.PicklingError),
    # Built-in exceptions, without KeyboardInterrupt and SystemExit, which would end the main process.
    *(each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, Exception)),
)


class Foreign(Exception):  # noqa: N818 - it stands for any object
    """Replaces an unpickled object whose class is not permitted. It is an exception because it may replace an exception."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__("its worker sent the judge an object that is part of no verdict")

    def __setstate__(self, state: Any) -> None:
        pass


@functools.cache
def _permitted() -> dict[tuple[str, str], Any]:
    from pebble.common.types import RemoteException, Result, ResultStatus
    from pebble.pool.process import Acknowledgement, TaskProblem, TaskResult

    classes = (*_SENT, Acknowledgement, TaskProblem, TaskResult, Result, ResultStatus)
    rebuild = RemoteException.rebuild_exception

    def rebuilt(exception: Any, traceback: Any) -> Any:
        return rebuild(exception, traceback) if isinstance(exception, Exception) else Foreign()

    return {
        **{(each.__module__, each.__qualname__): each for each in classes},
        (rebuild.__module__, rebuild.__qualname__): rebuilt,
        **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    }


class _Unpickler(pickle._Unpickler):  # the unpickler in Python, because the one in C cannot be restricted
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return _permitted().get((module, name), Foreign)

    def build(self) -> None:
        # Set the attributes of an unpickled object (the pickle opcode BUILD) if it is an instance of a dataclass or an
        # exception: a changed class or enum member would change the judge in this process.
        instance = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(instance, type) or not (is_dataclass(instance) or isinstance(instance, Exception)):
            raise pickle.UnpicklingError(f"it sets attributes of {instance!r}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = build


def loads(data: Any) -> Any:
    """Unpickle data from a worker. Raises PicklingError for damaged data, because only this error ends the worker's pool."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged data may cause any
        raise pickle.PicklingError(f"a worker sent what cannot be read: {type(error).__name__}: {error}") from error


class _ForkingPickler(multiprocessing.connection._ForkingPickler):  # type: ignore[name-defined]
    loads = staticmethod(loads)


@contextmanager
def guarded() -> Iterator[None]:
    """Make multiprocessing use `loads` for what its pipes receive, until the `with` block ends."""
    connection: Any = multiprocessing.connection
    before = connection._ForkingPickler
    connection._ForkingPickler = _ForkingPickler
    try:
        yield
    finally:
        connection._ForkingPickler = before
