"""Computation that does not depend on the caller's default device and autocast."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def with_own_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `function` with the CPU as default device and without autocast.

    Tests of other projects call `torch.set_default_device("cuda")`, which would move indices that belong on the host.
    Autocast would lower the precision of the control, and fails for e4m3.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest shows the line of the test
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
