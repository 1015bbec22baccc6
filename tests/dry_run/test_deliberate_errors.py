"""Errors put into adapters and metadata on purpose: each shows in what a launch computes on a B200 that is not there.

The launch is FlashInfer's own, and attention is computed from it alone, so that a wrong argument gives a wrong output, reaches
for memory that the call does not have, or contradicts another argument.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.calls import mla_decode, paged
from lab.dry_run.arithmetic import UnsoundLaunchError
from lab.dry_run.machine import machine
from lab.kernels import flashinfer_call, trtllm
from lab.metadata.engine.forward_mode import ForwardMode
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.mla_case import MLACase
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER

pytestmark = [NEEDS_A_LAUNCHER, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CPU = torch.device("cpu")
Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]

DECODE = ForwardCase(ForwardMode.DECODE, "tiny", (5, 63, 300), (1, 1, 1))
VERIFY = ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (5, 62, 300), (4, 4, 4))
EXTEND = ForwardCase(ForwardMode.EXTEND, "tiny", (0, 63, 130), (5, 70, 1))
WINDOW = replace(DECODE, sliding_window=True)
RAGGED_DRAFT = ForwardCase(ForwardMode.DRAFT_EXTEND, "tiny", (0, 63, 130), (5, 1, 2))
MLA = MLACase(ForwardMode.TARGET_VERIFY, (5, 62, 300), (4, 4, 4))


def set_to(**changes: Any) -> Change:
    return lambda arguments: arguments | changes


def mapped(name: str, function: Callable[[Any], Any]) -> Change:
    return lambda arguments: arguments | {name: function(arguments[name])}


def other_order(cache: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(
        side.as_strided(side.shape, (side.stride(0), side.stride(2), side.stride(1), side.stride(3))) for side in cache
    )


# A pass, and a change of the arguments that the adapter hands FlashInfer.
IN_ADAPTERS: dict[str, tuple[ForwardCase | MLACase, Change]] = {
    "strides of heads and tokens exchanged": (DECODE, mapped("kv_cache", other_order)),
    "pages twice as far apart": (DECODE, mapped("kv_cache", lambda cache: tuple(side[::2] for side in cache))),
    "a window one too wide": (WINDOW, mapped("window_left", lambda window: window + 1)),
    "a window one too narrow": (WINDOW, mapped("window_left", lambda window: window - 1)),
    "no window": (WINDOW, set_to(window_left=-1)),
    "a scale in base e": (DECODE, mapped("bmm1_scale", lambda scale: scale * math.log(2))),
    "a scale in base 2": (EXTEND, mapped("bmm1_scale", lambda scale: scale / math.log(2))),
    "a scale of V": (DECODE, set_to(bmm2_scale=1.1)),
    "K's pointer for V": (DECODE, mapped("kv_cache", lambda cache: (cache[0], cache[0]))),
    "V's pointer for K": (EXTEND, mapped("kv_cache", lambda cache: (cache[1], cache[1]))),
    "sinks of other heads": (DECODE, mapped("sinks", lambda sinks: sinks.roll(1))),
    "no sinks": (VERIFY, set_to(sinks=None)),
    "a table whose rows are not packed": (
        VERIFY,
        mapped("block_tables", lambda table: table.repeat(1, 2)[:, : table.shape[1]]),
    ),
    "a table of tokens": (DECODE, mapped("block_tables", lambda table: table * 64)),
    "rows of the request before": (EXTEND, mapped("cum_seq_lens_q", lambda offsets: offsets.roll(1).clamp(min=0))),
    "a bound of keys too small": (DECODE, set_to(max_seq_len=64)),
    "not causal": (EXTEND, set_to(causal=False)),
    "rows told by width, of requests of several": (RAGGED_DRAFT, mapped("cum_seq_lens_q", lambda offsets: offsets * 0)),
    "MLA, a scale in base e": (MLA, mapped("bmm1_scale", lambda scale: scale * math.log(2))),
    "MLA, a table of tokens": (MLA, mapped("block_tables", lambda table: table * 64)),
    "MLA, entries of half the stride": (
        MLA,
        mapped("kv_cache", lambda cache: cache.as_strided(cache.shape, (cache.stride(0) // 2, *cache.stride()[1:]))),
    ),
}
# A pass, and a change of the metadata that the calls are made from.
IN_METADATA: dict[str, tuple[ForwardCase | MLACase, dict[str, Callable[[Any], Any]]]] = {
    "lengths without the draft": (VERIFY, {"cache_seqlens_int32": lambda lengths: lengths - 4}),
    "lengths without the new token": (DECODE, {"cache_seqlens_int32": lambda lengths: lengths - 1}),
    "slots for pages": (DECODE, {"page_table": lambda table: table * 64}),
    "the table of the full pool": (WINDOW, {"swa_page_table": None}),
    "offsets that are not shifted": (EXTEND, {"cu_seqlens_q": lambda offsets: torch.cat((offsets[1:], offsets[-1:]))}),
    "offsets of keys for rows": (EXTEND, {"cu_seqlens_q": None}),
    "keys' offsets without the prefixes": (EXTEND, {"cu_seqlens_k": lambda offsets: offsets // 2}),
    "rows of another request": (DECODE, {"page_table": lambda table: table.flip(0)}),
    "MLA, lengths without the draft": (MLA, {"seq_lens_k": lambda lengths: lengths - 4}),
    "MLA, rows of another request": (MLA, {"block_kv_indices": lambda table: table.flip(0)}),
}
TAKEN_FROM = {"swa_page_table": "page_table", "cu_seqlens_q": "cu_seqlens_k"}


def build(case: ForwardCase | MLACase) -> Any:
    return (build_mla_pass if isinstance(case, MLACase) else build_forward)(case, CPU)


def is_right(forward: Any) -> bool:
    out = forward.new_out()
    try:
        with machine("b200", computes=True):
            forward.run(trtllm, out)
    except UnsoundLaunchError:
        return False
    return bool(forward.truth().compare(out).passed)


@pytest.mark.parametrize("name", IN_ADAPTERS)
def test_in_an_adapter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, change = IN_ADAPTERS[name]
    installed = flashinfer_call.installed

    def changed(module: str, function: str) -> tuple[Callable[..., Any], Any]:
        real, signature = installed(module, function)
        return lambda **arguments: real(**change(arguments)), signature

    forward = build(case)
    monkeypatch.setattr(flashinfer_call, "installed", changed)
    flashinfer_call.installed_taking.cache_clear()
    try:
        assert not is_right(forward)
    finally:
        flashinfer_call.installed_taking.cache_clear()


@pytest.mark.parametrize("name", IN_METADATA)
def test_in_metadata(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, changes = IN_METADATA[name]
    forward = build(case)
    wrong = {
        member: getattr(forward.metadata, TAKEN_FROM[member])
        if change is None
        else change(getattr(forward.metadata, member))
        for member, change in changes.items()
    }
    for call in (paged, mla_decode):
        monkeypatch.setattr(call, "checked", lambda problem: problem)  # as on a GPU
    assert not is_right(replace(forward, metadata=replace(forward.metadata, **wrong)))


@pytest.mark.parametrize("case", [DECODE, VERIFY, EXTEND, WINDOW, RAGGED_DRAFT, MLA], ids=repr)
def test_without_an_error_all_is_right(case: ForwardCase | MLACase) -> None:
    assert is_right(build(case))
