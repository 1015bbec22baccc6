"""Decorators of functions that compute or prepare an attention call."""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def takes(call_type: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Return a decorator for `function(call)`: the decorated `function(**arguments)` is `function(call_type(**arguments))`."""

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return function(call_type(*args, **kwargs))

        entry.__signature__ = inspect.signature(call_type).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return entry

    return wrap


def made_at_once(prepare: Callable[P, Callable[[], R]]) -> Callable[P, R]:
    """Return a function that also calls the function that `prepare` returns: `made_at_once(prepare)(x)` is `prepare(x)()`."""

    @functools.wraps(prepare)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        return prepare(*args, **kwargs)()

    entry.__name__ = entry.__qualname__ = prepare.__name__.removeprefix("prepare_").removeprefix("plan_")
    entry.__doc__ = f"Make the call of `{prepare.__name__}` once, and return its results.\n\n    {prepare.__doc__}"
    return entry


def with_own_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `function` with the CPU as default device and without autocast.

    A user's test may have set both. The default device "cuda" would move indices that must be on the host. Autocast would
    change the low-precision results from which error bounds are computed, and fails for e4m3.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest shows the line of the test
        # A device context calls a Python function for each operator.
        on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with on_cpu, torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
