"""What an engine sends: the table of values, the cases that it sends, and the verdicts that concern it."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks import (
    AttentionCase,
    CaseVerdict,
    Configuration,
    Contents,
    Engine,
    ForwardCase,
    GraphCase,
    GraphMode,
    MLACase,
    Outcome,
    RaggedCase,
    Ranges,
    ReplaySequence,
    Storage,
    judge,
)
from lab.checks.parameters.models import MODELS
from lab.checks.parameters.profiles import ALL_BUT, ANY, EVERY, profiles
from lab.checks.run.verdicts import CheckedResult, Judged
from lab.exit_status import ExitStatus
from lab.metadata import ForwardMode
from lab.workloads.interfaces import INTERFACES, Interface, MetadataFunction
from tests.commands.command import run

BATCH = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1))
MODEL = {"num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
MLA = AttentionCase(AttentionCall.MLA_DECODE, (70,), (1,), **MODEL, storage=replace(BATCH.storage, page_size=32))
PASS = ForwardCase(ForwardMode.DECODE, "tiny", prefix_lens=(31,), q_lens=(1,), page_size=32)
LATENT_PASS = MLACase(ForwardMode.DECODE, (31,), (1,), kv_dtype=E4M3)  # SGLang casts the query as it does the cache
DSV4 = {"dtypes": "e4m3/e4m3", "sinks": "per head", "cache": "4-D", "backend": "trtllm-gen"}
OTHER = {"dtypes": "bf16/bf16", "sinks": "none", "cache": "plain", "backend": "auto"}
OF_CASES = {"mode", "engine", "dead", "padded_seq_len", "draft_extend"}  # features of a case, and no axes
OTHERS = {"low", "loud", "faint", "foreign", "negative", "far"}  # values of cases that are no configurations


def senders(interface: Interface, case: Any) -> str:
    return " ".join(key for key, profile in profiles().items() if profile.sends(interface, case))


@pytest.mark.parametrize("key", ["sglang", "vllm"])
def test_each_row_has_a_source_and_values_of_its_parameter(key: str) -> None:
    for names, rows in profiles()[key].functions.items():
        of_rows = [each for each in INTERFACES if names == EVERY or each.name.lower() in names.split()]
        assert names == EVERY or len(of_rows) == len(names.split())
        axes = [MODELS[each](Ranges()).axes for each in of_rows]
        for name, parameter in rows.items():
            assert re.search(r"\.py:\d+", parameter.source) or "no" in parameter.remark, name
            listed = set(parameter.values.removeprefix(ALL_BUT).split(" | ")) - {ANY, ""}
            there = {str(value).lower() for each in axes for value in each.get(name, ())}
            assert name in OF_CASES or listed <= there | OTHERS, (name, listed - there)


def decode(**values: Any) -> Configuration:
    return Configuration(AttentionCall.DECODE, values)


@pytest.mark.parametrize(
    ("case", "by"),
    [
        *((Configuration(each), "sglang vllm") for each in AttentionCall if each is not AttentionCall.DSV4_DECODE),
        # DeepSeek-V4's call is SGLang's with all of four values.
        (Configuration(AttentionCall.DSV4_DECODE, DSV4), "sglang"),
        *((Configuration(AttentionCall.DSV4_DECODE, DSV4 | {axis: value}), "") for axis, value in OTHER.items()),
        # A prefix without tokens is usual, and no engine but SGLang builds its metadata.
        (Configuration(MetadataFunction.DRAFT_KV_INDICES, {"prefixes": "some none"}), "sglang"),
        (decode(page_size=64, dtypes="fp16/fp16", q_len=4), "sglang vllm"),
        (decode(page_size=256), "vllm"),
        (decode(page_size=8), ""),
        (decode(dtypes="bf16/e4m3"), "sglang"),
        (decode(sinks="per head", window_left=127), "sglang vllm"),
        (decode(window_left=0), ""),
        (decode(sinks="some minus infinity"), ""),
        (decode(mask="causal"), "sglang"),
        (decode(mask="tree"), ""),
        (decode(lengths="none last"), "vllm"),
        (decode(lengths="none first"), ""),
        (decode(head_dim=96), "sglang"),
        (decode(lse="given"), "vllm"),
        (BATCH, "sglang vllm"),
        (replace(BATCH, kv_lens=(20, 0)), "vllm"),
        (replace(BATCH, kv_lens=(2, 20), q_lens=(4, 4)), ""),
        (replace(BATCH, storage=Storage(kv_layout="NHD")), ""),
        (replace(BATCH, kv_dtype=E4M3), "sglang"),
        (replace(BATCH, offsets=True), "sglang vllm"),
        (replace(BATCH, contents=Contents.NEEDLES), "sglang vllm"),
        (replace(BATCH, contents=Contents.LOW), ""),
        (MLA, "sglang vllm"),
        (replace(MLA, kv_dtype=E4M3), ""),
        (replace(MLA, sinks=True), ""),
        (PASS, "sglang"),
        (replace(PASS, mode=ForwardMode.DRAFT_EXTEND), ""),
        (LATENT_PASS, ""),
        (replace(LATENT_PASS, query_dtype=E4M3), "sglang vllm"),
        (
            replace(PASS, mode=ForwardMode.EXTEND, engine=Engine.VLLM, num_padding_requests=1, num_padding_rows=1),
            "vllm",
        ),
        (GraphCase(GraphMode(ForwardMode.DECODE), ReplaySequence.POISONED), "sglang"),
        (GraphCase(GraphMode(ForwardMode.DECODE), ReplaySequence.POISONED, padded_seq_len=0), "vllm"),
        (RaggedCase((64, 0), (7, 5)), "sglang vllm"),
        (RaggedCase((64, 0), (7, 0)), ""),
    ],
)
def test_a_case_is_sent_if_its_features_show_no_other_value(case: Any, by: str) -> None:
    assert senders(getattr(case, "interface", AttentionCall.MLA_DECODE), case) == by


def concerned(case: Any, *results: CheckedResult, check: str = "K2") -> str:
    outcome = Outcome.WRONG if any(result.wrong for result in results) else Outcome.RIGHT
    verdict = CaseVerdict("kernel", check, AttentionCall.DECODE, case, "cpu", Judged(outcome, results=results))
    return " ".join(key for key, profile in profiles().items() if profile.concerns(verdict))


def result(*, wrong: bool = True, requests: Any = (), **features: Any) -> CheckedResult:
    return CheckedResult("the call", "output", features, wrong, requests)


def test_a_configuration_is_one_call_where_no_other_call_follows_it() -> None:
    case, corner = Configuration(AttentionCall.DECODE), result(sinks=True, some_inf_sink=True)
    assert concerned(case, corner, check="K18") == "sglang vllm"
    assert concerned(case, corner, check="K14") == ""
    assert concerned(case, result(sinks=True), check="K14") == "sglang vllm"


def test_a_wrong_variation_concerns_the_engines_that_make_its_call() -> None:
    plain, corner = result(sinks=True), result(sinks=True, some_inf_sink=True)
    assert concerned(BATCH, plain) == concerned(BATCH, corner, plain) == "sglang vllm"
    assert concerned(BATCH, corner) == ""
    assert concerned(BATCH, corner, replace(plain, wrong=False)) == ""
    assert concerned(BATCH, replace(corner, wrong=False)) == "sglang vllm"
    assert concerned(BATCH, result(return_lse=True)) == ""
    assert concerned(BATCH, result(dead="nan")) == ""
    assert concerned(BATCH, result(table_tail="far")) == "sglang"
    assert concerned(PASS, corner) == "sglang"


def test_of_a_wrong_call_the_requests_that_are_wrong_count() -> None:
    empty, live = {"no_keys": True, "fewer_keys": True}, {"kv_len": 3}
    assert concerned(BATCH, result(requests=((empty, True), (live, False)))) == "vllm"
    assert concerned(BATCH, result(requests=((empty, True), (live, True)))) == "sglang vllm"
    assert concerned(BATCH, result(dtype="bf16", kv_dtype="e4m3")) == "sglang"
    assert concerned(replace(BATCH, dtype=torch.float16), result(wrong=False)) == "sglang vllm"


def test_the_command_shows_a_profile_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checks --profile vllm") == 0
    said = capsys.readouterr().out
    assert "What vLLM 0.33.0 sends" in said
    assert "gpu_model_runner.py:2146" in said.replace("\n", "").replace(" ", "")
    assert run("checks --profile trt") == 2
    assert "no profile is called 'trt': one of sglang, vllm" in capsys.readouterr().err


def test_wrong_results_of_fp16_mla_concern_an_engine() -> None:
    """MLA's output is bfloat16, whatever the query is."""

    def seven(**arguments: Any) -> Any:
        query = arguments["query"]
        return torch.full((*query.shape[:-1], arguments["kv_lora_rank"]), 7.0, dtype=torch.bfloat16)

    kernel = SimpleNamespace(__name__="seven", trtllm_batch_decode_with_kv_cache_mla=seven)
    ranges = Ranges(dtypes=((torch.float16, torch.float16),), mla_head_dims=((80, 64),), mla_heads=(1,))
    report = judge(kernel, only=["K4"], ranges=ranges, profile="sglang", device="cpu", drawn=0, discover=False)
    assert report.exit_status is ExitStatus.WRONG
