"""One pass on several implementations: who declines, who is wrong, and what a plan costs the host, without a GPU."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.metadata import ForwardMode
from lab.recorded.case import recorded_cases
from lab.timing import Ceilings, GpuTime, GpuWork, Method, forward, method_named
from lab.timing.forward import DeclinedError, time_facts, time_forward, time_interleaved
from lab.timing.host_time import CALLS_PER_BATCH, HostTime, host_time
from lab.timing.sampling import RefusedTimeError
from lab.timing.staging import check_results, renew
from lab.workloads import ForwardCase
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.inputs.redraw import Seeds
from lab.workloads.scenarios import timed_scenario
from tests.recorded.record_calls import decode_arguments
from tests.recorded.write_calls import write_call

CASE = ForwardCase(ForwardMode.DECODE, "tiny", (3, 40), (1, 1), page_size=16)
METHOD = method_named("graph", "cold")
DECODE = "trtllm_batch_decode_with_kv_cache"
MLA = f"{DECODE}_mla"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(work: GpuWork, method: Method) -> Any:
        call, seeds = work.call(), Seeds(1, 8)
        renew(work, seeds)
        call()
        check_results([work], seeds)
        return SimpleNamespace(calls=[call], buffers=[work])

    replaced: dict[str, Any] = {
        "build_forward": lambda case, device: build_forward(case, torch.device("cpu")),
        "build_mla_pass": lambda case, device: build_mla_pass(case, torch.device("cpu")),
        "stage": stage,
        "measure_staged": lambda staged, method, seed: dict.fromkeys(staged, GpuTime((2.0,), method, launches=1)),
        "host_time": lambda calls, **_: host_time(calls, batches=1, calls_per_batch=1),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(forward, name, function)


def module(name: str, **functions: Any) -> SimpleNamespace:
    return SimpleNamespace(__name__=name, **functions)


def declines(**arguments: Any) -> None:
    raise NotImplementedError("it takes no such head")


def breaks(**arguments: Any) -> None:
    raise RuntimeError("an illegal memory access")


PLANNING = module(
    "planning",
    **{f"plan_{DECODE}": lambda **arguments: lambda: getattr(references, DECODE)(**arguments), DECODE: breaks},
)


def test_each_has_a_time_or_the_reason_why_it_has_none() -> None:
    found = time_interleaved(
        CASE,
        [
            references,
            module("declining", **{DECODE: declines}),
            module("wrong", **{DECODE: lambda out, **_: out.fill_(1.0)}),
            module("broken", **{DECODE: breaks}),
            PLANNING,
        ],
        METHOD,
    )
    assert [type(each) for each in found] == [tuple, DeclinedError, AssertionError, RuntimeError, tuple]
    assert str(found[1]) == "it takes no such head"
    (_, first), (_, planned) = found[0], found[4]  # type: ignore[misc]
    assert (first["implementation"], planned["implementation"]) == ("lab.references", "planning")
    assert first["requests"] == planned["requests"] == 2
    assert "plan_us" not in first
    assert planned["plan_us"] > 0


def test_a_recorded_call_is_timed_as_a_pass_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = forward.RecordedPass.of
    monkeypatch.setattr(forward.RecordedPass, "of", lambda case, device: of(case, torch.device("cpu")))
    (case,) = recorded_cases(write_call(tmp_path, DECODE, decode_arguments(), (torch.zeros(1),)))
    wrong = module("wrong", **{DECODE: lambda out, **_: out.fill_(1.0)})
    found = time_interleaved(case, [references, wrong, module("declining", **{DECODE: declines})], METHOD)
    assert [type(each) for each in found] == [tuple, AssertionError, DeclinedError]
    _, facts = found[0]  # type: ignore[misc]
    assert (facts["mode"], facts["requests"], facts["kv_tokens"], facts["kernel"]) == ("decode", 3, 55, "references")
    assert facts["pool_bytes"] == 2 * 9 * 2 * 16 * 64 * 2
    shutil.rmtree(case.path)
    (unreadable,) = time_interleaved(case, [references], METHOD)
    assert isinstance(unreadable, DeclinedError)
    assert "call 1: " in str(unreadable)


@pytest.mark.parametrize("mode", ["decode/kimi-k2/2q1s70/tp4", "target_verify/kimi-k2/2q2s70/e4m3/page32/tp4"])
def test_a_pass_of_latent_attention_is_timed_too(mode: str) -> None:
    wrong = module("wrong", **{MLA: lambda out, **_: out.fill_(1.0)})
    found = time_interleaved(timed_scenario(mode), [references, wrong, module("without", **{DECODE: declines})], METHOD)
    assert isinstance(found[0], tuple), found[0]
    assert isinstance(found[1], AssertionError)
    assert isinstance(found[2], Exception)
    _, facts = found[0]
    assert (facts["mode"], facts["num_qo_heads"], facts["requests"]) == (mode.partition("/")[0], 16, 2)


def test_one_alone_raises_its_reason() -> None:
    time, facts = time_forward(CASE, references, METHOD)
    assert (time.median_us, facts["kernel"]) == (2.0, "references")
    with pytest.raises(DeclinedError, match="no such head"):
        time_forward(CASE, module("declining", **{DECODE: declines}), METHOD)


def test_a_row_has_rounded_times_and_a_time_beyond_the_memorys_bandwidth_is_refused_where_l2_is_cold() -> None:
    """8 MB in 1.235 microseconds are 162 % of the bandwidth."""
    ceilings = Ceilings(bandwidth_gbps=4000, matrix_rate_tflops=800)
    time = GpuTime((1.23456,) * 2, method_named("graph", "warm"), launches=1, busy_us=1.11111, kernels=("a", "b"))
    facts = time_facts(time, ceilings, 8_000_000, 0)
    names = ("median_us", "iqr_us", "samples_us", "busy_us", "kernels", "bandwidth_percent")
    assert [facts[name] for name in names] == [1.235, 0.0, [1.235, 1.235], 1.111, ["a", "b"], 162.001]
    with pytest.raises(RefusedTimeError, match="162 %"):
        time_facts(replace(time, method=METHOD), ceilings, 8_000_000, 0)


@pytest.mark.parametrize(("median_us", "calls"), [(2.0, CALLS_PER_BATCH), (1000.0, 25), (1e6, 1)])
def test_host_times_keep_the_gpu_busy_for_half_a_second_at_most(
    median_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 batches of 25 calls of a millisecond are half a second. A plan is made once a batch."""
    timed: list[tuple[int, int]] = []

    def host_time(work: Mapping[str, Any], *, batches: int, calls_per_batch: int) -> dict[str, HostTime]:
        timed.append((batches, calls_per_batch))
        return {name: HostTime((1.0,) * batches) for name in work}

    monkeypatch.setattr(forward, "host_time", host_time)
    monkeypatch.setattr(
        forward, "measure_staged", lambda staged, method, seed: dict.fromkeys(staged, GpuTime((median_us,), method, 1))
    )
    time_forward(CASE, PLANNING, METHOD)
    assert timed == [(20, calls), (10, 1)]
