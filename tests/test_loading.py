"""An implementation is found by the name of a module, or by the path of a file."""

from pathlib import Path

import pytest

from lab import references
from lab.loading import LoadError, load
from tests.cases import DECODE
from tests.checks import hostile


def test_a_name_leads_to_a_module_or_into_it() -> None:
    assert load("tests.checks.hostile") is hostile
    assert load("tests.checks.hostile:Odd.__doc__") == hostile.Odd.__doc__


def test_a_function_alone_is_an_implementation_with_one_function() -> None:
    found = load("lab.references:trtllm_batch_decode_with_kv_cache")
    assert vars(found) == {DECODE: references.trtllm_batch_decode_with_kv_cache}
    assert load("lab.references:trtllm_batch_decode_with_kv_cache") is found


def test_a_path_leads_to_a_file_whose_neighbours_it_may_import(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 3\n")
    kernel = tmp_path / "math.py"  # a file may be called as another module is
    kernel.write_text("import beside_it\n\n\nclass Kernel:\n    value = beside_it.VALUE\n")
    assert load(f"{kernel}:Kernel.value") == 3
    assert load(str(kernel)) is load(str(kernel))


def test_a_file_of_a_package_is_imported_as_its_module(tmp_path: Path) -> None:
    folder = tmp_path / "a_package_of_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "sizes.py").write_text("VALUE = 4\n")
    (folder / "kernel.py").write_text("from .sizes import VALUE\n")
    assert load(f"{folder}/kernel.py:__name__") == "a_package_of_kernels.kernel"
    assert load(f"{folder}/kernel.py:VALUE") == 4


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def decode(:\n", "SyntaxError: invalid syntax (kernel.py, line 1)"),
        ("\nx = 1 / 0\n", "ZeroDivisionError: division by zero (kernel.py, line 2)"),
        ("import nowhere_at_all\n", "No module named 'nowhere_at_all' (kernel.py, line 1)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (kernel.py, line 1)"),
    ],
)
def test_what_its_own_code_raises_is_a_sentence_with_the_place(code: str, sentence: str, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(code)
    with pytest.raises(LoadError) as refused:
        load(str(kernel))
    assert str(refused.value) == f"{kernel} cannot be imported: {sentence}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests.checks.nowhere", "No module named 'tests.checks.nowhere'"),
        ("tests.checks.hostile:nothing", "module 'tests.checks.hostile' has no attribute 'nothing'"),
        ("nowhere/kernel.py", "there is no such file"),
    ],
)
def test_what_is_not_there_is_a_sentence(name: str, reason: str) -> None:
    with pytest.raises(LoadError) as refused:
        load(name)
    assert str(refused.value) == f"{name} cannot be imported: {reason}"
