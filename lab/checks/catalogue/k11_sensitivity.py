"""An argument that is accepted and ignored, or does something else than it says.

A default that is never left cannot be seen to work: scales of 1, windows wider than every request, equal K and V scales.
Here every optional argument takes a value that must change the output, by what float64 says it changes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.checks.attention_inputs import AttentionInputs, running_sum
from lab.checks.check import Check, Level, counted, first_line
from lab.checks.space import Space
from lab.checks.trial import Trial, truth_of_call
from lab.problem import MASK_BITS_PER_WORD, mask_words
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.interfaces import Interface


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[AttentionCase]:
    for case in space.covering(interface, counted(level, 6, 24), seed=13):
        # Needles make every limit visible, and every request is longer than a window of 20.
        kv_lens = tuple(max(kv_len, 40 + request) for request, kv_len in enumerate(case.kv_lens))
        yield replace(case, kv_lens=kv_lens, window_left=-1, sinks=False, contents=Contents.NEEDLES)


def _judge(trial: Trial) -> None:
    inputs = trial.build()
    trial.hold("nothing changed", trial.call(inputs), truth_of_call(inputs))
    for name, probe in _PROBES[trial.case.interface].items():
        if not any(word in name and True not in axis for word, axis in _optional(trial.space).items()):
            changes, rules = probe(inputs)
            _probe(trial, name, inputs, changes, rules)
    if trial.case.interface is Interface.DECODE:
        _masks(trial)
        _ragged(trial, inputs)
    if not trial.case.is_mla:
        _separate_tables(trial, inputs)


def _optional(space: Space) -> dict[str, tuple[bool, ...]]:
    """What a kernel may have been built without, by the word in a probe's name."""
    return {"window": space.windows, "sinks": space.sinks}


def _probe(trial: Trial, name: str, inputs: AttentionInputs, changes: dict[str, Any], rules: dict[str, Any]) -> None:
    """The output must be what the changed argument says."""
    truth = truth_of_call(inputs, **rules)
    result = trial.attempt(name, inputs, **changes)
    if result is None:
        return
    trial.hold(name, result, truth)
    if name == "lse" and result.lse is None:
        trial.wrong("return_lse=True returned no LSE")
    if "out_dtype" in changes and result.out.dtype != changes["out_dtype"]:
        trial.wrong(f"out_dtype={changes['out_dtype']} gave {result.out.dtype}")


Probe = Callable[[AttentionInputs], tuple[dict[str, Any], dict[str, Any]]]


def _window(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"window_left": 20}, {"window_left": 20}


def _window_of_none(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"window_left": 0}, {"window_left": 0}


def _sinks(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """As large as the needles' logits, and unequal."""
    sinks = torch.linspace(8.0, 14.0, inputs.case.num_qo_heads, device=inputs.query.device)
    return {"sinks": sinks}, {"sinks": sinks}


def _mla_sinks(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    changes, rules = _sinks(inputs)
    return {"sinks": [changes["sinks"]]}, rules


def _scaled(name: str, factor: float, on_device: bool = False) -> Probe:
    """Another bmm1_scale or bmm2_scale, as a number or as a tensor."""

    def probe(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
        scale: Any = factor * getattr(inputs, name)
        if on_device:
            scale = torch.tensor([scale], dtype=torch.float32, device=inputs.query.device)
        return {name: scale}, {name: scale}

    return probe


def _bmm1_log2(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    scale = torch.tensor([0.75 * inputs.bmm1_scale], dtype=torch.float32, device=inputs.query.device)
    return {"bmm1_scale_log2": scale * math.log2(math.e)}, {"bmm1_scale": scale}


def _out_dtype(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    other = torch.float16 if inputs.case.dtype == torch.bfloat16 else torch.bfloat16
    return {"out_dtype": other}, {"out_dtype": other}


def _lse(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"return_lse": True}, {}


def _with_lse(probe: Probe) -> Probe:
    """The same, and the LSE."""

    def with_lse(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
        changes, rules = probe(inputs)
        return changes | {"return_lse": True}, rules

    return with_lse


def _not_causal(inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"causal": False}, {"causal": False}


_SHARED: dict[str, Probe] = {
    "bmm1_scale": _scaled("bmm1_scale", 0.75),
    "bmm1_scale below 0": _scaled("bmm1_scale", -0.5),  # the smallest product weighs most
    "bmm1_scale as a tensor": _scaled("bmm1_scale", 0.75, on_device=True),
    "bmm2_scale": _scaled("bmm2_scale", 1.25),
    "bmm2_scale as a tensor": _scaled("bmm2_scale", 1.25, on_device=True),
    "lse": _lse,
}
_MHA: dict[str, Probe] = _SHARED | {
    "out_dtype": _out_dtype,
    "window_left": _window,
    "window_left=0": _window_of_none,
    "sinks": _sinks,
    "lse of sinks": _with_lse(_sinks),
}
_PROBES: dict[Interface, dict[str, Probe]] = {
    Interface.DECODE: _MHA | {"bmm1_scale_log2": _bmm1_log2},
    Interface.CONTEXT: _MHA | {"causal": _not_causal},
    Interface.MLA_DECODE: _SHARED | {"sinks": _mla_sinks, "lse of sinks": _with_lse(_mla_sinks)},
}


def _masks(trial: Trial) -> None:
    """Masks over the draft tokens: causal, full, a tree, and one of these for each request; within a window, too."""
    for q_len in trial.space.masked_rows:
        kv_lens = tuple(max(kv_len, q_len + 3) for kv_len in trial.case.kv_lens)
        inputs = trial.build(replace(trial.case, kv_lens=kv_lens, q_lens=(q_len,) * len(kv_lens)))
        causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
        shapes = {"causal": causal, "full": torch.ones_like(causal), "tree": _tree(q_len)}
        masks = {f"{name} mask": shown.expand(len(kv_lens), -1, -1) for name, shown in shapes.items()}
        each = [list(shapes.values())[request % len(shapes)] for request in range(len(kv_lens))]
        masks["mask that differs by request"] = torch.stack(each)
        for name, shown in masks.items():
            what, words = f"{name} of {q_len} rows", packed_mask(shown).to(trial.device)
            truth = truth_of_call(inputs, shown=shown.to(trial.device))
            trial.hold(what, trial.attempt(what, inputs, mask=words), truth)
            if name == "tree mask" and True in trial.space.windows:
                truth = truth_of_call(inputs, shown=shown.to(trial.device), window_left=20)
                what = f"{what} within a window"
                trial.hold(what, trial.attempt(what, inputs, mask=words, window_left=20), truth)


def _tree(q_len: int) -> Tensor:
    """Each row sees itself and what a binary tree has above it."""
    shown = torch.zeros(q_len, q_len, dtype=torch.bool)
    for row in range(q_len):
        token = row
        while True:
            shown[row, token] = True
            if token == 0:
                break
            token = (token - 1) // 2
    return shown


def packed_mask(shown: Tensor) -> Tensor:
    """XQA's words of bool [batch, q_len, q_len]: uint16 [batch, q_len, words], bit b of word w for draft token 16 w + b."""
    batch, q_len, _ = shown.shape
    words = torch.zeros(batch, q_len, mask_words(q_len), dtype=torch.int32)
    for token in range(q_len):
        words[..., token // MASK_BITS_PER_WORD] |= shown[..., token].to(torch.int32) << (token % MASK_BITS_PER_WORD)
    return words.to(torch.uint16)


def _ragged(trial: Trial, inputs: AttentionInputs) -> None:
    """Unequal rows through cum_seq_lens_q."""
    case = trial.case
    q_lens = tuple(1 + (request * 2 + case.seed) % 5 for request in range(len(case.kv_lens)))
    query = torch.cat([inputs.query] * 8)[: sum(q_lens)]
    ragged = replace(inputs, case=replace(case, interface=Interface.CONTEXT, q_lens=q_lens), query=query)
    truth = truth_of_call(ragged)
    result = trial.attempt(
        "cum_seq_lens_q",
        replace(inputs, query=query),
        q_len_per_req=None,
        max_q_len=max(q_lens),
        cum_seq_lens_q=running_sum(q_lens, trial.device),
    )
    trial.hold("cum_seq_lens_q", result, truth)


def _separate_tables(trial: Trial, inputs: AttentionInputs) -> None:
    """V's pages in another order than K's, each with a table of its own."""
    order = torch.arange(len(inputs.v_pages) - 1, -1, -1, device=trial.device)
    v_pages = inputs.v_pages.view(torch.uint8)[order].view(inputs.v_pages.dtype)
    v_tables = len(inputs.v_pages) - 1 - inputs.block_tables
    both = torch.stack((inputs.block_tables, v_tables), dim=1)
    what = "uses_shared_paged_kv_idx=False"
    moved = replace(inputs, v_pages=v_pages, block_tables=both)
    result = trial.attempt(what, moved, uses_shared_paged_kv_idx=False)
    trial.hold(what, result, truth_of_call(inputs))


CHECK = Check("K11", "sensitivity", first_line(__doc__), _cases, _judge)
