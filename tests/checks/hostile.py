"""A decode that does something else for each group of query heads: never returns, dies, raises; and is right for the others."""

import ctypes
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from lab.references import trtllm_batch_decode_with_kv_cache as right


class Odd(Exception):  # noqa: N818 - an exception of somebody's own
    """What no judge has heard of."""


def hang() -> None:
    while True:
        time.sleep(1.0)


def leave() -> None:
    os._exit(7)


def leave_at_once(environment: dict[str, str]) -> None:
    """Stand for the first thing that a worker does."""
    leave()


def segfault() -> None:
    ctypes.string_at(0)


def raise_runtime_error() -> None:
    raise RuntimeError("an unspecified launch failure")


def raise_type_error() -> None:
    len(5)  # type: ignore[arg-type]


def raise_odd() -> None:
    raise Odd("out of cheese")


def exit_politely() -> None:
    sys.exit(3)


DEEDS = {
    2: hang,
    3: leave,
    4: segfault,
    5: raise_runtime_error,
    6: raise_type_error,
    8: raise_odd,
    16: exit_politely,
}


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    q_len_per_req: int = 1,
) -> torch.Tensor:
    group = query.shape[1] // kv_cache[0].shape[1]
    if group in DEEDS:
        DEEDS[group]()
    return right(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        q_len_per_req=q_len_per_req,
    )


def _right_and_dead_a_second_later(**arguments: Any) -> Any:
    out = right(**arguments)
    threading.Timer(1.0, leave).start()
    return out


dies_later = SimpleNamespace(trtllm_batch_decode_with_kv_cache=_right_and_dead_a_second_later)
