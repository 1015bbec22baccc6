"""The digest of a kernel's sources follows their contents and names, and neither their folder nor their times."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.checks.run.sources import MOST_NAMING_BYTES, _digest

LARGE = bytes(MOST_NAMING_BYTES + 1)
FILES = {
    "kernel.py": b"from helpers import scales\n\n\ndef trtllm_batch_decode_with_kv_cache(**_): import later.part.of_it\n",
    "helpers/__init__.py": b"",
    "helpers/scales.py": b"SCALE = 1.0\n",
    "later/__init__.py": b"",
    "later/native.so": b"",
    "later/part/of_it.py": b"from .. import native\n",
    "library.so": LARGE,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)  # as a working folder that holds all kernels
    folder = tmp_path / "one"
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def digest(folder: Path) -> str:
    """Return the digest of the kernel in a folder, as a process that has loaded nothing else computes it."""
    known = {*sys.modules}
    sys.path.insert(0, str(folder))
    try:
        return _digest(str(folder / "kernel.py"))
    finally:
        sys.path.remove(str(folder))
        for name in {*sys.modules} - known:
            del sys.modules[name]


def moved(package: Path) -> Path:
    shutil.copytree(package, other := package.parent / "at" / "another" / "place")
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    return other


def test_the_same_sources_in_another_folder_and_of_another_time_have_the_same_digest(package: Path) -> None:
    assert digest(moved(package)) == digest(package)


def test_files_of_one_name_in_two_folders_go_in_the_order_of_the_folders(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python imports the first one's."""
    (package / "kernel.py").write_bytes(b"import util\n")
    for place in "ab":
        (package.parent / place).mkdir()
        monkeypatch.syspath_prepend(package.parent / place)

    def digest_with(**contents: bytes) -> str:
        for place, content in contents.items():
            (package.parent / place / "util.py").write_bytes(content)
        return digest(package)

    assert len({digest_with(a=b"1", b=b"2"), digest_with(a=b"2", b=b"1"), digest_with(a=b"1", b=b"1")}) == 3


CHANGES: dict[str, Callable[[Path], object]] = {
    "a large file": lambda folder: (folder / "library.so").write_bytes(LARGE[:-1] + b"1"),
    "an imported file": lambda folder: (folder / "helpers" / "scales.py").write_bytes(b"SCALE = 2.0\n"),
    "a file that a function imports": lambda folder: (folder / "later" / "part" / "of_it.py").write_bytes(b"1\n"),
    "an imported compiled module": lambda folder: (folder / "later" / "native.so").write_bytes(b"1"),
    "a package around it": lambda folder: (folder / "later" / "__init__.py").write_bytes(b"1\n"),
    "an empty file": lambda folder: (folder / "helpers" / "__init__.py").write_bytes(b"\n"),
    "a name": lambda folder: (folder / "library.so").rename(folder / "libraries.so"),
    "one file more": lambda folder: (folder / "more.cu").write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_sources_with_another_content_or_name_have_another_digest(change: str, package: Path) -> None:
    other = moved(package)
    CHANGES[change](other)
    assert digest(other) != digest(package)
