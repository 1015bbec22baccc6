"""Load an implementation by the name of its module or the path of its file. This module imports only the standard library."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import signal
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

UNPACKAGED = "file "  # the name of a module whose file is in no package begins so, and its path follows


class LoadError(ImportError):
    """An implementation cannot be imported. The message has the reason and the failing line of its code."""


def is_interruption(error: BaseException) -> bool:
    """Return True if `error` is a KeyboardInterrupt that Ctrl-C caused. The result is False in a process that ignores Ctrl-C,
    such as a worker process: there the kernel's own code has raised the KeyboardInterrupt.
    """
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def message_of(error: BaseException) -> str:
    """Return the message of an error that a kernel raised, or a substitute if `str(error)` itself raises an error."""
    try:
        return str(error)
    except BaseException as other:
        return f"a message that cannot be made, for that raises {type(other).__name__}"


def load(name: str) -> Any:
    """Import an implementation, such as a module that defines FlashInfer's functions, and return it.

    Args:
        name: "package.module" or "path/to/file.py", each with ":attribute" after it if the implementation is an attribute.
            If the attribute is a function, the result is an object whose only attribute is this function.

    Raises:
        LoadError: there is no implementation of this name, or its code raised an error during the import.
    """
    (where, _, attribute), folder = name.partition(":"), Path.cwd()
    try:
        path = _file_named(where)
        loaded = importlib.import_module(where) if path is None else _import_file(path)
        found = functools.reduce(getattr, filter(None, attribute.split(".")), loaded)
    except BaseException as error:  # foreign code may raise anything
        if is_interruption(error):
            raise
        raise LoadError(f"{name} cannot be imported: {_sentence(error)}") from error
    finally:
        os.chdir(folder)  # the module may have changed it
    return _with_one_function(attribute.rpartition(".")[2], found) if inspect.isroutine(found) else found


def check_source(name: str) -> None:
    """Raise LoadError if the file of an implementation is missing or is not Python. Import nothing."""
    try:
        if (source := source_of(name)) is not None:
            ast.parse(source.read_bytes(), source.name)
    except FileNotFoundError as error:
        raise LoadError(f"{name} cannot be imported: {error}") from error
    except (SyntaxError, ValueError) as error:
        raise LoadError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def source_of(name: str) -> Path | None:
    """Return the file of an implementation, or None if no folder of `sys.path` has it. Import nothing."""
    where = name.partition(":")[0]
    if (path := _file_named(where)) is not None:
        return path
    stems = [Path(root, *where.split(".")) for root in sys.path]
    modules = (each for stem in stems for each in (Path(f"{stem}.py"), stem / "__init__.py") if each.is_file())
    return next(modules, None)


def _file_named(where: str) -> Path | None:
    path = Path(where)
    if not where.endswith(".py"):
        if "/" in where or where.startswith(".") or path.is_file():
            raise FileNotFoundError("a file's name ends in .py, and a module's has dots")
        return None
    if not path.is_file():
        raise FileNotFoundError("it is no file" if path.exists() else "there is no such file")
    return path


@functools.cache
def _with_one_function(name: str, function: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: function})


def module_of(path: Path) -> list[str]:
    """Return the parts of a file's module name: the names of its packages, and the file's name without suffix."""
    path = path.resolve()
    names, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        names, root = [root.name, *names], root.parent
    return names


def place_of(name: str, folder: Path) -> str:
    """Return a text that identifies what `load(name)` imports if `folder` is the working directory: its name and its file."""
    where, _, attribute = name.partition(":")
    if where.endswith(".py"):
        return f"{os.path.abspath(folder / where)}:{attribute}"
    others = (each for each in sys.path if each not in ("", os.getcwd()))
    spec = PathFinder.find_spec(where.partition(".")[0], [str(folder), *others])
    return f"{name} in {spec and (spec.origin or spec.submodule_search_locations)}"


def last_report(kernel: str, part: str = "") -> Path | None:
    """Return the path at which the user's cache keeps the last report about a kernel; None if the cache is not writable.
    `part` distinguishes several reports about the kernel, such as "invariance"; "" is the judge's report. The file's name has a
    digest of the kernel's location, because two kernels may have the same name.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lab"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    place = place_of(kernel, Path.cwd()).encode(errors="backslashreplace")
    name = f"{kernel.rpartition('/')[2]}-{hashlib.sha256(place).hexdigest()[:8]}-{part}"
    return cache / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')}.json" if os.access(cache, os.W_OK) else None


def name_of(kind: type) -> str:
    """Return the name by which `load` finds the class `kind`: "package.module:Name" or "path/to/file.py:Name"."""
    return f"{kind.__module__.removeprefix(UNPACKAGED)}:{kind.__qualname__}"


def is_same_module(one: str, other: str) -> bool:
    """Return True if two names of modules or files can mean the same file, such as my/kernel.py and my.kernel."""
    parts = [
        Path(name).resolve().with_suffix("").parts if name.endswith(".py") else tuple(name.split("."))
        for name in (one, other)
    ]
    shorter, longer = sorted(parts, key=len)
    return bool(one and other) and longer[-len(shorter) :] == shorter


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    names = module_of(path)
    root = path.parents[len(names) - 1]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(names) > 1:
        return importlib.import_module(".".join(names))
    # A file in no package is registered by its path, because it may have another module's name, such as `math.py`.
    name = f"{UNPACKAGED}{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _sentence(error: BaseException) -> str:
    message = message_of(error)
    if not message or not isinstance(error, ImportError | AttributeError | FileNotFoundError):
        message = f"{type(error).__name__}: {message}".removesuffix(": ")
    raised = traceback.extract_tb(error.__traceback__)[-1]
    is_its_own = not raised.filename.startswith((str(Path(__file__).parent), str(importlib.__file__), "<frozen"))
    return f"{message} ({Path(raised.filename).name}, line {raised.lineno})" if is_its_own else message
