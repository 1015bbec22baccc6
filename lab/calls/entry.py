"""Functions that take a call's own parameters."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes(call_type: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Give a function of one `call_type` FlashInfer's own parameters, so that users call it as they call FlashInfer."""

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return function(call_type(*args, **kwargs))

        entry.__signature__ = inspect.signature(call_type).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return entry

    return wrap
