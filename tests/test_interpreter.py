"""What the interpreter is spared gives what it gave."""

from collections.abc import Callable

import pytest
from triton import language as tl

from tests.interpreter import LanguagePatches, by_scalar_name


def of_module(module: str) -> Callable[[], None]:
    """A function that says it is defined there."""

    def fn() -> None: ...

    fn.__module__ = module
    return fn


def test_each_module_once_in_a_launch_and_always_outside() -> None:
    patched: list[str] = []
    kernel, helper = of_module("kernels"), of_module("helpers")

    def launch(executor: str, fails: bool = False) -> None:
        for fn in (kernel, helper, helper, kernel):
            patches.patch_language(fn)
        if fails:
            raise ValueError(executor)

    patches = LanguagePatches(launch, lambda fn: patched.append(fn.__module__))
    patches.launch("first")
    assert patched == ["kernels", "helpers"]
    with pytest.raises(ValueError, match="second"):
        patches.launch("second", fails=True)
    assert patched == ["kernels", "helpers"] * 2
    for _ in range(2):
        patches.patch_language(helper)
    assert patched == ["kernels", "helpers"] * 2 + ["helpers"] * 2


def test_what_restores_the_language_reaches_the_launch() -> None:
    """The interpreter's launch patches first, and calls `restore()` on what it gets."""
    scope = object()
    assert LanguagePatches(lambda executor: None, lambda fn: scope).patch_language(of_module("kernels")) is scope


def test_numpys_dtype_is_looked_up_once_for_each_type_of_element() -> None:
    asked: list[str] = []

    def np_dtype_of(tt_dtype: tl.dtype) -> str:
        asked.append(str(tt_dtype))
        return f"of {tt_dtype}"

    looked_up = by_scalar_name(np_dtype_of)
    pointer, other = tl.pointer_type(tl.bfloat16), tl.pointer_type(tl.float32)
    types = (tl.int32, tl.block_type(tl.int32, [16]), tl.block_type(tl.int32, [4, 4]), pointer, other, tl.bfloat16)
    for _ in range(2):
        assert [looked_up(each) for each in types] == ["of int32"] * 3 + [f"of {each}" for each in types[3:]]
    assert asked == [str(tl.int32), *(str(each) for each in types[3:])]
