"""Decorators that change the parameters of functions which compute or prepare a call."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes(call_type: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Return a decorator for a function whose only parameter is a `call_type` object, such as a `DecodeCall`. The decorated
    function has the parameters of `call_type` (those of FlashInfer's function), and builds the object.
    """

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return function(call_type(*args, **kwargs))

        entry.__signature__ = inspect.signature(call_type).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return entry

    return wrap


def takes_fields_of(terms: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that changes a function's signature for `inspect.signature` and the documentation: the fields of the
    dataclass `terms` replace the function's `**` parameter.
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
    """Return a function that prepares a call with `prepare`, makes it once and returns its results. The function has the
    parameters and documentation of `prepare`, and its name without `prepare_` or `plan_`.
    """

    @functools.wraps(prepare)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        return prepare(*args, **kwargs)()

    entry.__name__ = entry.__qualname__ = prepare.__name__.removeprefix("prepare_").removeprefix("plan_")
    entry.__doc__ = f"Make the call of `{prepare.__name__}` once, and return its results.\n\n    {prepare.__doc__}"
    return entry
