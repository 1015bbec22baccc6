"""Cases read back from their `repr`: known dataclasses, enums and dtypes are built, and nothing is evaluated."""

import ast
import functools
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch

from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4

DTYPES = (*HALF_DTYPES, E4M3, NVFP4, torch.float32, torch.int32, torch.int64)


@functools.cache
def _classes() -> dict[str, Callable[..., Any]]:
    """Return the dataclasses that `lab.checks` offers to make cases of, by name."""
    import lab.checks as offering

    offered = {name: getattr(offering, name) for name in offering.__all__}
    return {name: each for name, each in offered.items() if isinstance(each, type) and is_dataclass(each)}


@functools.cache
def _members() -> dict[str, Any]:
    """Return the members of its enums, and dtypes, by their repr."""
    import lab.checks as offering

    offered = [getattr(offering, name) for name in offering.__all__]
    members = [member for each in offered if isinstance(each, type) and issubclass(each, Enum) for member in each]
    return {repr(each): each for each in (*members, *DTYPES)}


def read_expression(text: str) -> Any:
    """Build what `repr` wrote of a case or a ranges.

    Raises:
        ValueError: it is no such expression, or its numbers make no case.
    """
    try:
        return _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no case: {error}") from error


def _built(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _classes():
        named = {keyword.arg or "**": _built(keyword.value) for keyword in node.keywords}
        return _classes()[node.func.id](*map(_built, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(_built, node.elts))
    if isinstance(node, ast.Dict):
        return {_built(key): _built(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in _members():
        return _members()[name]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is no part of a case") from None
