"""Compute a digest of the sources on which verdicts depend, and reuse the verdicts of an earlier run with the same digest."""

import ast
import functools
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

import lab
from lab.checks.record import ReportError, read_cases, read_record
from lab.checks.run.verdicts import CaseVerdict, Key
from lab.loading import load, source_of
from lab.workloads.interfaces import Interface, interfaces_of

# Suffixes of the files that a kernel may have.
SOURCES = (".py", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".pyx", ".so", ".ptx", ".cubin")
MOST_NAMING_BYTES = 2**20  # size of the largest file that is searched for names of environment variables
# Prefixes of environment variables that libraries read. They count even if no source names them.
VARIABLES = ("CUDA_", "CUBLAS_", "FLASHINFER_", "NVIDIA_", "PYTORCH_", "TORCH", "TRITON_")
# Variables that do not count: they choose a GPU or a cache folder, and differ between the shards of one run.
PLACES = (
    *("CUDA_CACHE_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"),
)
_NAME = re.compile(r"[A-Za-z_]\w{2,}")


def offer_of(name: str, implementation: Any) -> tuple[list[Interface], str]:
    """Return (the judged functions that an implementation has, a digest of the sources of the implementation and the lab). The
    digest is "" if the implementation has no judged function, or if `name`, its name, is "".
    """
    interfaces = interfaces_of(implementation)
    return interfaces, _digest(name) if name and interfaces else ""


def digest_of_files(name: str) -> str:
    """Return a digest of the source files in the folder of an implementation. The implementation is not loaded, because its
    code could falsify the digest.
    """
    source = source_of(name)
    files = [Path(each) for each in sorted(_sources_in(str(source.parent)))] if source else []
    contents = [(each.name, hashlib.sha256(each.read_bytes()).hexdigest()) for each in files if each.is_file()]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _sources_in(folder: str) -> set[str]:
    names = os.listdir(folder or os.curdir)
    return {os.path.join(folder, each) for each in names if os.path.splitext(each)[1] in SOURCES}


def _digest(name: str) -> str:
    # A digest of the sources of the lab and of the implementation `name`, and of the environment variables that these sources
    # or libraries read. A file counts by its content and its path relative to a folder of `sys.path`.
    #
    # The sources of the implementation are: loaded modules that are not installed, files that these modules may import later,
    # and source files in the folder of the implementation's module. A module is installed if it is in one of Python's own
    # folders, or in a folder of `sys.path` that contains metadata of a distribution (`*.dist-info`).
    module = load(name.partition(":")[0])
    folder = os.path.dirname(getattr(module, "__file__", None) or "")
    places = [sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [root for root in sys.path if any(Path(root).glob("*.dist-info"))]
    installed = (*places, *site.getsitepackages(), site.getusersitepackages(), str(Path(torch.__file__).parent))
    loaded = {getattr(each, "__file__", None) or "" for each in list(sys.modules.values())}
    own = _sources_in(folder)
    own |= {path for path in loaded if path.endswith(".py") and not path.startswith(installed)}
    of_lab = set(map(str, Path(lab.__file__).parent.rglob("*.py")))
    roots = [os.path.realpath(root) for root in sys.path if not root.startswith(installed)]
    own |= _imported(own - of_lab, roots, without=of_lab)
    variables_here, named, digests = frozenset(os.environ), set[str](), list[tuple[str, int, str]]()
    folders = (*roots, os.path.realpath(Path(lab.__file__).parents[1]))
    for path in filter(os.path.isfile, own | of_lab):
        content = Path(path).read_bytes()
        digests.append((*_within(path, folders), hashlib.sha256(content).hexdigest()))
        if path not in of_lab and len(content) <= MOST_NAMING_BYTES:
            named |= variables_here & _words(content)
    named = {each for each in variables_here if each in named or each.startswith(VARIABLES)} - {*PLACES}
    variables = sorted((each, os.environ[each]) for each in named)
    contents = [(place, digest) for place, _, digest in sorted(digests)]
    return hashlib.sha256(repr((contents, variables)).encode()).hexdigest()


def _within(path: str, folders: Iterable[str]) -> tuple[str, int]:
    there = os.path.realpath(path)
    around = ((os.path.join(each, ""), index) for index, each in enumerate(folders))
    found = [(there[len(each) :], index) for each, index in around if there.startswith(each)]
    return min(found, key=lambda each: len(each[0]), default=(os.path.basename(there), -1))


@functools.cache  # a process that judges several times reads the same sources
def _words(source: bytes) -> frozenset[str]:
    return frozenset(_NAME.findall(source.decode(errors="replace")))


def _imported(paths: set[str], roots: Sequence[str], without: set[str]) -> set[str]:
    """Return the files that the Python files `paths` import, directly or indirectly, except those in `paths` and `without`."""
    found, tried = set[str](), set[tuple[str, str]]()  # files, and pairs of a folder and an imported name
    left = [path for path in paths if path.endswith(".py") and os.path.isfile(path)]
    while left:
        path = Path(left.pop())
        for level, name in _imports_of(path.read_bytes()):
            folders = {(str(each), name) for each in (path.parents[level - 1 : level] if level else roots)} - tried
            tried |= folders
            named = (file for folder, _ in folders for file in _files_of(folder, name))
            new = set(filter(os.path.isfile, named)) - paths - found - without
            found |= new
            left += new
    return found


def _files_of(folder: str, name: str) -> Iterator[str]:
    folders = [folder]
    for part in name.split("."):
        if (spec := PathFinder.find_spec(part, folders)) is None:
            return
        if spec.origin is not None:  # a folder without `__init__.py` has none
            yield spec.origin
        folders = [*(spec.submodule_search_locations or ())]


@functools.cache
def _imports_of(source: bytes) -> frozenset[tuple[int, str]]:
    """Return the imports of a Python source as (number of leading dots, name); none if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return frozenset()
    found = set[tuple[int, str]]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            level, module = (node.level, node.module) if isinstance(node, ast.ImportFrom) else (0, None)
            found |= {(level, f"{module}.{each.name}" if module else each.name) for each in node.names}
    return frozenset(found)


def earlier_verdicts(path: Path | None, digest: str) -> dict[Key, CaseVerdict]:
    """Return {case's key: verdict} of the report at `path`; {} if there is no report, or if its digest is not `digest`."""
    if path is None or not digest or not path.is_file():
        return {}
    try:
        record = read_record(path)
        found = read_cases(record) if record.get("run") == digest else ()
        return {each.key: replace(each, recorded_in=str(path)) for each in found}
    except ReportError:
        return {}
