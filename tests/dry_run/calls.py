"""Arguments of the four calls of 8 requests: points of the sweep."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lab.calls.problem import AttentionCall
from lab.dry_run.sweep_points import SWEPT

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 32, 4, 128, 64, 4
PAGED = {"num_kv_heads": KV_HEADS, "group": HEADS // KV_HEADS}


def arguments(call: AttentionCall, **values: Any) -> dict[str, Any]:
    swept = SWEPT[call]
    given = vars(swept.make(swept.model.default | {"batch_size": 8} | values))
    return given | {"bmm2_scale": 1.0}  # XQA and fmha_v2 apply no other over bf16


def decode(keys: int = 512, **values: Any) -> dict[str, Any]:
    return arguments(AttentionCall.DECODE, **PAGED, max_kv_len=keys, **values) | {"backend": "auto"}


def context() -> dict[str, Any]:
    return arguments(AttentionCall.CONTEXT, **PAGED, q_len=8)


def mla(**values: Any) -> dict[str, Any]:
    given = arguments(AttentionCall.MLA_DECODE, **values)
    return given | {"block_tables": given["block_tables"].repeat(1, 2)}  # FlashInfer 0.6.13 takes 128 tokens or more


def ragged() -> dict[str, Any]:
    return arguments(AttentionCall.RAGGED_CONTEXT, num_kv_heads=16, kv_len=64, lse="returned")


def run_installed(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Call a function of the installed FlashInfer itself, with those of the arguments that it has."""
    own = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    function(**own | {"workspace_buffer": torch.zeros(128 << 20, dtype=torch.uint8)})
