"""Decorators that give a function the parameters of one of FlashInfer's calls."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes(call_type: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Return a decorator that gives a function the parameters of FlashInfer's function. The decorated function gets them as one
    object of `call_type`, such as `DecodeCall`.
    """

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return function(call_type(*args, **kwargs))

        entry.__signature__ = inspect.signature(call_type).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return entry

    return wrap


def takes_fields_of(terms: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that replaces the `**` parameter in a function's signature by the fields of a dataclass, as
    keyword-only parameters. Only `inspect.signature` and the documentation change.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        *parameters, _ = signature.parameters.values()
        for each in inspect.signature(terms).parameters.values():
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return wrap


def made_at_once(prepare: Callable[P, Callable[[], R]]) -> Callable[P, R]:
    """Return a function that prepares a call, runs the prepared call once and returns its results.

    Args:
        prepare: a function that checks a call's arguments and returns the ready call. The new function has the same parameters
            and documentation, and the same name without `prepare_` or `plan_`.
    """

    @functools.wraps(prepare)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        return prepare(*args, **kwargs)()

    entry.__name__ = entry.__qualname__ = prepare.__name__.removeprefix("prepare_").removeprefix("plan_")
    entry.__doc__ = f"Make the call of `{prepare.__name__}` once, and return its results.\n\n    {prepare.__doc__}"
    return entry
