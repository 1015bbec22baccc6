"""Each module of device functions is patched once in a launch."""

from collections.abc import Callable

import pytest

from tests.interpreter import LanguagePatches


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
