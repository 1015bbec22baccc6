"""Calls one after another that differ in one argument, and calls at the same time, of kernels that keep something."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corpus.kernels import kernel
from lab import references
from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.models import Configuration
from lab.checks.properties.check import Level
from lab.checks.properties.k14_interleaving import CHECK, PARTS, calls_at_once
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import Judged, Outcome
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import INTERFACES, Interface, interface_of
from tests.checks.small import declining_if, decoding
from tests.corpus.test_matrix import RIGHT

CPU = torch.device("cpu")
# The wrong kernels by name, and the argument whose change shows them.
FOUND = {
    "window_kept_with_table": "B, window_left=0: ",
    "causal_kept_with_lengths": "B, causal=False: ",
    "out_of_first_call": "B, out=a view: ",
    "mla_out_of_first_call": "B, out=a view: ",
    "mla_base_of_first_lse": "B, lse=base e: ",
    "ragged_lse_of_first_call": "B, lse=given alone: ",
    "step_of_first_pass": "B, draft_step=none: ",
    "mla_attention_of_first_pass": "B, attention=mla: ",
    "page_size_of_first_draft": "B, page_size=1: ",
}


def one_by_one(interface: Interface, implementation: Any) -> Iterator[Judged]:
    """Judge the smoke level's cases of calls that differ in one argument, by one implementation."""
    cases = [case for case in CHECK.cases(interface, Ranges(), Level.SMOKE) if isinstance(case, Configuration)]
    assert len(cases) == PARTS
    return (run_case(implementation, CHECK, case, CPU, Ranges()) for case in cases)


@pytest.mark.parametrize("name", FOUND)
def test_an_argument_that_is_kept_shows_where_it_alone_changes(name: str) -> None:
    for function in kernel(name).interface:
        judged = one_by_one(interface_of(function), kernel(name).implementation())
        wrong = next(each for each in judged if each.outcome is Outcome.WRONG)
        assert wrong.wrongs[0].startswith(FOUND[name]), wrong.wrongs


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_right_implementation_is_right_whatever_changes(interface: Interface) -> None:
    right = references if isinstance(interface, AttentionCall) else RIGHT[interface.value]()
    for judged in one_by_one(interface, right):
        assert (judged.outcome, judged.wrongs, judged.declines) == (Outcome.RIGHT, (), ())


def test_the_first_call_is_judged_again_and_nothing_follows_a_wrong_one() -> None:
    calls: list[dict[str, Any]] = []

    def as_first(**arguments: Any) -> bool:
        known = {
            name: id(value) if isinstance(value, torch.Tensor | tuple) else repr(value)
            for name, value in arguments.items()
        }
        calls.append(known)
        return len(calls) > 1 and known == calls[0]

    def decode(wrong: Callable[..., bool]) -> SimpleNamespace:
        def call(**arguments: Any) -> Any:
            out = references.trtllm_batch_decode_with_kv_cache(**arguments)
            return torch.zeros_like(out) if isinstance(out, torch.Tensor) and wrong(**arguments) else out

        return decoding(call)

    def first_words(wrong: Callable[..., bool]) -> set[str]:
        calls.clear()
        judged = run_case(decode(wrong), CHECK, Configuration(AttentionCall.DECODE, {}, 2), CPU, Ranges())
        return {each.split(":")[0] for each in judged.wrongs}

    assert first_words(as_first) == {"A again"}
    assert first_words(lambda **_: True) == {"A"}


def test_a_schedule_that_is_kept_by_sums_of_lengths_shows_where_requests_are_in_reverse_order() -> None:
    kept: dict[Any, dict[str, Any]] = {}

    def call(q_seq_lens_cpu: Any = None, kv_seq_lens_cpu: Any = None, **arguments: Any) -> Any:
        if q_seq_lens_cpu is not None:
            sums = [(len(each), int(each.sum())) for each in (q_seq_lens_cpu, kv_seq_lens_cpu)]
            key = (*sums, arguments["is_causal"], q_seq_lens_cpu.dtype)
            schedule = {name: arguments[name] for name in ("seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")}
            arguments |= kept.setdefault(key, schedule)
        return references.trtllm_ragged_attention_deepseek(**arguments)

    judged = one_by_one(AttentionCall.RAGGED_CONTEXT, SimpleNamespace(trtllm_ragged_attention_deepseek=call))
    wrongs = [each.wrongs[0] for each in judged if each.outcome is Outcome.WRONG]
    assert [each.startswith("B, mirrors=int32, requests in reverse order: ") for each in wrongs] == [True]


def test_a_value_that_is_declined_is_left_out() -> None:
    for judged in one_by_one(AttentionCall.DECODE, declining_if(lambda sinks=None, **_: sinks is not None)):
        assert (judged.outcome, judged.declines) == (Outcome.RIGHT, ())
    none = one_by_one(AttentionCall.DECODE, declining_if(lambda **_: True))
    assert {each.outcome for each in none} == {Outcome.DECLINED}


@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale", "sinks"])
def test_a_kernel_that_ignores_the_offset_of_a_small_tensor_reads_another_number(name: str) -> None:
    """A kernel that checks its scales and sinks would refuse NaN, and the judge would not see that it is wrong."""
    forms = {"bmm1_scale": "tensor [1]", "bmm2_scale": "0.9 as a tensor [1]", "sinks": "a part of others"}
    given = built_call(Configuration(AttentionCall.DECODE, {name: forms[name]}, 1), Ranges(), CPU).given[name]
    storage = given.as_strided((given.storage_offset() + len(given) + 1,), (1,), 0)
    assert storage[0].isfinite()
    assert storage[0] not in given
    assert storage[-1].isnan()


def test_a_call_shares_what_is_equal_and_what_it_writes_is_its_own() -> None:
    first, other = (
        built_call(Configuration(AttentionCall.DECODE, {"out": "given", **more}, 1), Ranges(), CPU)
        for more in ({}, {"bmm2_scale": "0.9 as a tensor [1]", "seq_lens": "uint32", "cache": "tokens apart"})
    )
    other.share(first)
    is_shared = {name: value is first.given[name] for name, value in other.given.items()}
    assert is_shared["query"]
    assert is_shared["block_tables"]
    assert is_shared["workspace_buffer"]
    assert not any(is_shared[name] for name in ("out", "bmm2_scale", "seq_lens", "kv_cache"))
    assert other.given["kv_cache"][0].stride() != first.given["kv_cache"][0].stride()
    assert other.given["seq_lens"].dtype == torch.uint32


@pytest.mark.parametrize("is_shared", [False, True])
def test_calls_at_the_same_time_are_compared_with_calls_alone(monkeypatch: Any, is_shared: bool) -> None:
    launched: list[torch.Tensor] = []

    def decode(**arguments: Any) -> Any:
        out = references.trtllm_batch_decode_with_kv_cache(**arguments)
        launched.append(out)
        if is_shared and len(launched) == 8:  # as the other stream's call would
            launched[6].copy_(out)
        return out

    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(record_event=lambda: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: SimpleNamespace(wait_event=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr("lab.checks.properties.k14_interleaving.BUSY_SIZE", 1)
    case = AttentionCase(AttentionCall.DECODE, (20, 9), (1, 1))
    run = CaseRun(decoding(decode), case, CPU)
    calls_at_once(run, run.build(), run.build(AttentionCase(AttentionCall.DECODE, (20, 9), (1, 1), seed=3)))
    assert len(launched) > 20
    assert [each.split(":")[0] for each in run.wrongs] == ["a call at the same time as another stream's"] * is_shared
