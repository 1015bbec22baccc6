"""The transport from a worker to the process that prints the verdict. It carries only objects of the judge and plain values.

Reading a pickle can call any function that the pickle names, and a kernel can write to its worker's pipes. So only objects of
the lab's and pebble's classes, and plain values, are read from the pipes. Every other object becomes a `Foreign`.
"""

import io
import multiprocessing.connection
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PACKAGES = ("lab", "pebble")
PLAIN = {
    "builtins": ("complex", "set", "frozenset", "slice", "range", "bytearray", "int", "float", "str", "bool", "object"),
    "collections": ("OrderedDict", "Counter"),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath"),
}


class Foreign:
    """A stand-in for an unpickled object whose class is not permitted."""

    def __new__(cls, *arguments: Any, **named: Any) -> "Foreign":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_own = module.partition(".")[0] in PACKAGES and (module, name) != (__name__, "Foreign")
        if not (is_own or name in PLAIN.get(module, ()) or module in ("builtins", "torch")):
            return Foreign
        found = super().find_class(module, name)
        if is_own or name in PLAIN.get(module, ()):
            return found if isinstance(found, type) or name == "RemoteException.rebuild_exception" else Foreign
        is_plain = isinstance(found, torch.dtype) or (isinstance(found, type) and issubclass(found, BaseException))
        return found if is_plain else Foreign


def loads(data: Any) -> Any:
    """Unpickle data from a worker. Objects of classes that are not permitted become `Foreign`."""
    return _Unpickler(io.BytesIO(data)).load()


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
