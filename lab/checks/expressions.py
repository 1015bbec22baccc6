"""Cases read back from their `repr`: known dataclasses, enums and dtypes are built, and nothing is evaluated."""

import ast
from collections.abc import Callable
from typing import Any

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.draft_lists import DraftListsCase
from lab.checks.graph_case import GraphCase, MLAGraphCase, Story
from lab.checks.space import Space
from lab.metadata.engine.forward_batch import SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.engine.lengths import DraftAttention
from lab.workloads.attention_case import NVFP4, AttentionCase, Contents, Dead, Storage, TableTail
from lab.workloads.forward_case import ForwardCase
from lab.workloads.interfaces import Interface
from lab.workloads.mla_case import MLACase
from lab.workloads.ragged_case import RaggedCase

_CLASSES: tuple[Callable[..., Any], ...] = (
    *(AttentionCase, DraftListsCase, ForwardCase, GraphCase, GraphMode, MLACase, MLAGraphCase, RaggedCase),
    *(Space, SpecInfo, Storage),
)
_ENUMS = (
    *(AttentionCall, Contents, Dead, DraftAttention, ForwardMode, Interface, KVLayout, MetadataPlace, Story),
    TableTail,
)
_BY_NAME = {each.__name__: each for each in _CLASSES}
_MEMBERS = {repr(member): member for enum in _ENUMS for member in enum} | {
    repr(dtype): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, E4M3, NVFP4, torch.int32, torch.int64)
}


def read_expression(text: str) -> Any:
    """Build what `repr` wrote of a case or a space.

    Raises:
        ValueError: it is no such expression, or its numbers make no case.
    """
    try:
        return _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no case: {error}") from error


def _built(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
        named = {keyword.arg or "**": _built(keyword.value) for keyword in node.keywords}
        return _BY_NAME[node.func.id](*map(_built, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(_built, node.elts))
    if isinstance(node, ast.Dict):
        return {_built(key): _built(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in _MEMBERS:
        return _MEMBERS[name]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is no part of a case") from None
