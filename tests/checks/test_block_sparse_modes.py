"""MiniMax-M3's passes in M1 and their replays in S1: right with the references, and wrong for what M1 and S1 are to find."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties import forward_modes, graph_replays
from lab.checks.properties.check import Level
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mha.block_sparse import BlockSparseBackend
from lab.ranges import Ranges
from lab.workloads.forward_case import ForwardCase
from tests.devices import IN_INTERPRETER

CPU = torch.device("cpu")
PASSES = [*forward_modes.block_sparse_cases(Ranges(), (4,))]
REPLAYS = [case for case in graph_replays.CHECK.cases(AttentionCall.DECODE, Ranges(), Level.SMOKE) if case.block_sparse]


def test_decodes_and_verifications_are_passed_and_replayed() -> None:
    modes = {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}
    assert {case.mode for case in PASSES} == {case.mode.forward_mode for case in REPLAYS} == modes


def wrongs(case: Any, implementation: Any = references) -> list[str]:
    run = CaseRun(implementation, case, CPU, Ranges())
    (forward_modes if isinstance(case, ForwardCase) else graph_replays).CHECK.judge(run)
    assert run.judged
    assert not run.failures + run.declines
    return run.wrongs


def decoding(**changed: Any) -> Any:
    """The references' decode, with arguments changed by functions of them."""

    def decode(**arguments: Any) -> Any:
        changes = {name: change(arguments[name]) for name, change in changed.items()}
        return references.trtllm_batch_decode_with_kv_cache(**arguments | changes)

    return SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode)


def heads_swapped(sides: Any) -> Any:
    return tuple(side.flip(1) for side in sides)


def a_token_less(seq_lens: torch.Tensor) -> torch.Tensor:
    return (seq_lens - 1).clamp(min=1)


@pytest.mark.parametrize("case", PASSES, ids=str)
def test_a_pass(case: ForwardCase) -> None:
    assert not wrongs(case)
    assert wrongs(case, decoding(kv_cache=heads_swapped))
    assert wrongs(case, decoding(seq_lens=a_token_less))


def test_the_floor_counts_the_pages_that_a_head_selects() -> None:
    decode, verify = PASSES
    assert (decode.visible_pairs, decode.visible_keys) == (1 + 127 + 301 + 1921, decode.visible_pairs)
    assert verify.visible_keys == 4 + 130 + 304 + 1921
    assert verify.visible_pairs == 10 + 127 + 128 + 129 + 130 + 301 + 302 + 303 + 304 + 2046 + 2047 + 2048 + 1921
    assert decode.bytes_moved < replace(decode, block_sparse=False).bytes_moved


class KeepsPages(BlockSparseBackend):
    """Reads the indexer's output when the call is prepared."""

    def prepare_attention(self, *arguments: Any, topk_indices: torch.Tensor, **named: Any) -> Any:
        return super().prepare_attention(*arguments, topk_indices=topk_indices.clone(), **named)


class AllPages(BlockSparseBackend):
    """Counts the tokens of all pages, as if a row selected them."""

    def build_metadata(self, *arguments: Any) -> Any:
        metadata = super().build_metadata(*arguments)
        every = metadata.query_seq_lens.clamp(min=1).expand_as(metadata.seq_lens)
        return replace(metadata, seq_lens=every.clamp(max=2048).contiguous())


@IN_INTERPRETER
@pytest.mark.parametrize("case", REPLAYS, ids=str)
def test_a_replay(case: Any) -> None:
    assert not wrongs(case)


@IN_INTERPRETER
@pytest.mark.parametrize("backend", [KeepsPages, AllPages])
def test_a_wrong_backend_is_found_by_a_replay(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.workloads.graph_case.BlockSparseBackend", backend)
    assert any(wrongs(case) for case in REPLAYS)
