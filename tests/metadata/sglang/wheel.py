"""Single files of SGLang's wheel, loaded without the server, so that tests can hold the lab to SGLang's own code.

The package is the one that ``LAB_SGLANG_WHEEL`` names, a wheel (``pip download sglang==0.5.23 --no-deps``) or the folder it
was unpacked into, else the installed one. A test that loads from it skips with the reason where there is none.

A file imports much of the server. Each module of ``sglang`` that a test does not ask for by name is a stand-in, which gives an
empty class for whatever is imported from it; a test passes what a stand-in must do. So neither SGLang's dependencies nor a GPU
are needed, and Triton's kernels run in its interpreter::

    sglang = sglang_fixture("sglang.kernels.ops.attention.trtllm_mha_page_table")
"""

import importlib
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VERSION = "0.5.23"  # the release that lab.metadata follows
VARIABLE = "LAB_SGLANG_WHEEL"
PACKAGES = ("sglang", "msgspec")  # msgspec is a dependency of SGLang's files, used for its records alone
# Where a release before 0.5.23 has modules that are loaded by their names of today.
EARLIER = {
    "sglang.kernels.ops.attention.": "sglang.srt.layers.attention.triton_ops.",
    "sglang.kernels.ops.speculative.": "sglang.srt.speculative.triton_ops.",
}


@contextmanager
def sglang_modules(
    *real: str, names: Mapping[str, object] | None = None, versions: tuple[str, ...] = (VERSION,)
) -> Iterator[Callable[[str], ModuleType]]:
    """Load real modules of SGLang among stand-ins. On exit the process imports as it did before.

    Args:
        real: modules to load from SGLang's files; every other module of SGLang is a stand-in.
        versions: releases whose files do.
        names: what stand-ins give, by dotted name, such as ``{"sglang.srt.utils.is_flashinfer_available": lambda: False}``.

    Yields:
        a function of a module's name that imports it. Functions that import when they are called work within the context.

    Skips the test where there is none of these releases of SGLang.
    """
    finder = _Finder(_root(versions), real, {"msgspec.Struct": _Struct, **(names or {})})
    before = {name: module for name, module in sys.modules.items() if finder.owns(name)}
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.owns(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def sglang_fixture(*real: str, names: Mapping[str, object] | None = None) -> Any:
    """Return a fixture of a module of tests: the function of `sglang_modules`."""

    @pytest.fixture(scope="module")
    def sglang() -> Iterator[Callable[[str], ModuleType]]:
        with sglang_modules(*real, names=names) as load:
            yield load

    return sglang


class _Struct:
    """A stand-in for `msgspec.Struct`: the fields of a subclass are the parameters of its constructor."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclass(cls)


class _Anything:
    """The base of what a stand-in gives: it can be subclassed, and called with anything."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...


class _StandIn(ModuleType):
    """A module from which anything can be imported: what a test passed, or an empty class of that name."""

    def __init__(self, name: str, given: Mapping[str, object]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._given = given

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        dotted = f"{self.__name__}.{name}"
        value = self._given[dotted] if dotted in self._given else type(name, (_Anything,), {})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, root: Path, real: Sequence[str], given: Mapping[str, object]) -> None:
        self._root = root
        self._real = {*real, *(_name_in(root, name) for name in real)}
        self._given = given

    def owns(self, name: str) -> bool:
        return name.partition(".")[0] in PACKAGES

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not self.owns(fullname):
            return None
        if fullname not in self._real:
            return ModuleSpec(fullname, self, is_package=True)
        stem = self._root.joinpath(*_name_in(self._root, fullname).split("."))
        return spec_from_file_location(fullname, stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self._given)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has no code."""


def _name_in(root: Path, name: str) -> str:
    """Return the name that a release has for a module."""
    if (root / "sglang" / "kernels").is_dir():
        return name
    for today, earlier in EARLIER.items():
        name = name.replace(today, earlier)
    return name


@cache
def _root(versions: tuple[str, ...]) -> Path:
    """Return the folder that holds SGLang's package. Skips where there is none, or another release."""
    named = os.environ.get(VARIABLE)
    if named is None:
        installed = find_spec("sglang")
        if installed is None or not installed.submodule_search_locations:
            pytest.skip(
                f"{VARIABLE} names no wheel of SGLang and none is installed (pip download sglang=={VERSION} --no-deps)"
            )
        root = Path(next(iter(installed.submodule_search_locations))).parent
    else:
        root = Path(named)
        if root.is_file():
            root = Path(_unpacked(root).name)
    if not (root / "sglang" / "srt").is_dir():
        raise FileNotFoundError(
            f"{VARIABLE}={named}: {root} holds no folder sglang/srt; name a wheel or where it is unpacked"
        )
    version = _version(root)
    if version not in versions:
        pytest.skip(f"SGLang {version} is at {root}, and this is about {', '.join(versions)}")
    return root


@cache
def _unpacked(wheel: Path) -> tempfile.TemporaryDirectory[str]:
    """Unpack a wheel's Python files into a folder that lasts as long as the process: Triton reads its kernels' sources."""
    folder = tempfile.TemporaryDirectory(prefix="sglang-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder.name, [name for name in archive.namelist() if name.endswith(".py")])
    return folder


def _version(root: Path) -> str:
    file = root / "sglang" / "_version.py"
    found = re.search(r"^__version__ = .*'(.+)'", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found.group(1) if found else "of an unknown version"
