"""The errors of caches in cases that are known by hand, the answers to failures of tests, and what is refused."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.budget import (
    LEVEL,
    MOST_AT_ONCE,
    Explanation,
    Setting,
    UnstoredRequests,
    budget,
    call_of,
    chance,
    drawn_requests,
    explain,
    recorded_requests,
)
from lab.calls import AttentionCall
from lab.calls.problem import E4M3
from lab.recorded.case import recorded_cases
from lab.references import trtllm_batch_decode_with_kv_cache as reference
from tests.commands.command import run
from tests.recorded.write_calls import write_call

DECODE = AttentionCall.DECODE.value


def one_key(*value: float) -> UnstoredRequests:
    """A request with one key, whose output is the value: its elements are repeated to head_dim 16."""
    values = torch.tensor(value).repeat(16 // len(value)).view(1, 1, 16)
    return UnstoredRequests(torch.ones(1, 1, 16, dtype=torch.bfloat16), torch.ones(1, 1, 16), values, 1.0)


def of(kv: str, scale: str = "1", **more: Any) -> Setting:
    return Setting(kv, 1, scale, head_dim=16, group=1, **more)


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        (of("e4m3"), (1.0625,), 0.0625 / 1.0625),  # half of the way from 1 to 1.125, to the even one
        (of("e4m3", "amax"), (1.0625,), 0.0),  # is 448 in units of the scale
        (of("e4m3", "4amax"), (1.0625,), 0.0),
        (of("e4m3", "amax/4"), (1.0625,), 0.75),  # is cut off at a quarter
        (of("e4m3", "amax"), (448.0, 2**-10), 2**-10 / 448),  # half of the smallest number, to the even one
        (of("bf16"), (1 + 2**-8,), 2**-8 / (1 + 2**-8)),
        (of("fp16", query="fp16"), (1 + 2**-8,), 0.0),
        (of("nvfp4"), (6.0, 2.5), math.hypot(0.0, 0.5) / math.hypot(6.0, 2.5)),
        (of("nvfp4", "amax/4"), (6.0,), 0.75),
    ],
    ids=str,
)
def test_quantisation_errors_of_one_key_are_those_of_the_formats(
    setting: Setting, value: tuple[float, ...], error: float
) -> None:
    requests = one_key(*value)
    if setting.query == "fp16":
        requests = requests._replace(query=requests.query.half())
    row = budget(requests, setting)
    assert row["quantisation"] == pytest.approx(error, rel=1e-6, abs=1e-7)
    assert row["kernel"] <= 2**-9
    assert row["bound"] >= 2**-8 if setting.kv != "fp16" else row["bound"] >= 2**-11
    assert (row["keys"], row["vectors"], row["kv"], row["scale"]) == (1, 1, setting.kv, setting.scale)


def test_scales_are_multiples_of_the_least_that_represents_the_largest_value() -> None:
    requests = one_key(7.0, -14.0)
    scales = {name: call_of(requests, of("e4m3", name))["bmm2_scale"] for name in ("1", "amax", "4amax", "amax/4")}
    assert scales == {"1": 1.0, "amax": 14 / 448, "4amax": 4 * 14 / 448, "amax/4": 14 / 448 / 4}
    call = call_of(requests, of("nvfp4", "amax"))
    assert (call["bmm1_scale"], call["bmm2_scale"]) == (pytest.approx(1 / 2688), pytest.approx(14 / 2688))
    assert call_of(requests, of("bf16", "4amax"))["bmm2_scale"] == 1.0


def test_the_shares_beyond_a_tolerance_are_of_elements() -> None:
    row = budget(one_key(1.0625, 1.0), of("e4m3"), atol=0.01, rtol=0.0)
    assert (row["quantisation_over"], row["kernel_over"]) == (0.5, 0.0)
    assert budget(one_key(1.0625, 1.0), of("e4m3"), atol=0.0626, rtol=0.0)["quantisation_over"] == 0.0
    assert budget(one_key(1.0625, 1.0), of("e4m3"), atol=0.0, rtol=0.058)["quantisation_over"] == 0.5
    assert budget(one_key(1.0625, 1.0), of("e4m3"), atol=0.0, rtol=0.06)["quantisation_over"] == 0.0


def test_a_given_kernel_is_compared_by_the_judges_bound() -> None:
    setting = Setting("nvfp4", 40, group=2)
    requests = next(drawn_requests(setting, 1024))
    assert {"given", "given_worst"}.isdisjoint(budget(requests, setting))
    right = budget(requests, setting, kernel=reference)
    assert right["given"] < 0.003
    assert right["given_worst"] <= 1
    wrong = budget(requests, setting, kernel=lambda **call: 1.05 * reference(**call))
    assert wrong["given"] == pytest.approx(0.05, abs=0.003)
    assert wrong["given_worst"] > 3


def test_values_are_drawn_with_the_statistics_that_are_named() -> None:
    def drawn(**more: Any) -> UnstoredRequests:
        return next(drawn_requests(Setting("bf16", 256, head_dim=64, **more), 64 * 64))

    normal, heavy, outliers = (drawn(values=name) for name in ("normal", "heavy", "outliers"))
    for side in ("keys", "values"):
        sizes = [getattr(each, side) for each in (normal, heavy, outliers)]
        assert float(sizes[0].std()) == pytest.approx(1, rel=0.02)
        kurtosis = [float((each**4).mean() / (each**2).mean() ** 2) for each in sizes[:2]]
        assert kurtosis[0] == pytest.approx(3, rel=0.05)
        assert kurtosis[1] > 6
        assert float(sizes[2].std(dim=(0, 1))[::16].mean()) == pytest.approx(10, rel=0.05)
        assert float(sizes[2].std(dim=(0, 1))[8::16].mean()) == pytest.approx(1, rel=0.05)
    assert torch.equal(drawn(v_std=4.0).values, 4 * normal.values)
    assert torch.equal(drawn(v_std=4.0).keys, normal.keys)
    assert normal.softmax_scale == 1 / 8


def test_as_many_requests_are_drawn_as_the_elements_need(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("e4m3", MOST_AT_ONCE // 512 - 1, group=2)
    batches = list(drawn_requests(setting, 9 * 128 - 1))
    assert [each.query.shape for each in batches] == [(4, 2, 64), (4, 2, 64), (1, 2, 64)]
    assert not torch.equal(batches[0].values, batches[1].values)
    monkeypatch.setattr("lab.budget.MOST_DRAWN", 6 * 2 * (setting.keys + 1) * 64)
    assert sum(len(each.query) for each in drawn_requests(setting, 10**9)) == 6
    assert next(drawn_requests(Setting("fp16", 8), 1)).query.dtype == torch.float16
    assert next(drawn_requests(Setting("e4m3", 8, query="e4m3"), 1)).query.dtype == E4M3


def test_probabilities_are_those_of_two_rates() -> None:
    none, three = torch.zeros(4), torch.tensor([1, 1, 1, 0])
    assert chance(1, 10, none, 990) == pytest.approx(0.01)
    assert chance(5, 10, none, 990) == pytest.approx(0.01)  # all five may be one event
    assert chance(2, 100, three, 100) == pytest.approx(26 / 32)  # 2 or more of 5, each with 1/2
    doubled = torch.tensor([8, 0, 0, 0, 0, 0, 0, 0])  # variance 8, mean 1: events of 8
    assert chance(8, 100, doubled, 100) == pytest.approx(3 / 4)


@pytest.fixture(scope="module")
def ask() -> Callable[..., Explanation]:
    """Ask about a failure in 1,024 elements. One simulation is used for all questions."""
    setting = Setting("e4m3", 64, group=2)
    batches = list(drawn_requests(setting, 128 * 1024))
    return lambda **asked: explain(
        setting, batches, **({"elements": 1024, "mismatched": 1, "atol": 2e-3, "rtol": 0.0} | asked)
    )


def test_what_right_kernels_do_is_noise_and_what_the_judge_refuses_is_a_bug(ask: Callable[..., Explanation]) -> None:
    usual = ask()
    numbers = usual.numbers
    assert usual.verdict == "noise"
    assert numbers["simulated"] == 128 * 1024
    assert 0.01 < numbers["mean"] < 5
    assert numbers["mean"] < numbers["mean_at_bound"]
    assert 2e-3 < numbers["largest"] < numbers["judge_allows"]
    assert ask(off_by=0.999 * numbers["largest"]).verdict == "noise"
    assert ask(off_by=1.001 * numbers["largest"]).verdict == "undecided"
    assert ask(elements=8).verdict == "noise"
    assert ask(elements=8, off_by=0.999 * numbers["largest"]).verdict == "undecided"  # too rare in 8 elements
    assert ask(off_by=0.999 * numbers["judge_allows"]).verdict == "undecided"
    beyond = ask(off_by=1.001 * numbers["judge_allows"])
    assert beyond.verdict == "bug"
    assert beyond.reason.startswith(f"the largest difference is {1.001 * numbers['judge_allows']:.4g}, ")
    assert ask(off_by=math.nan).verdict == ask(off_by=math.inf).verdict == "bug"


def test_too_many_mismatches_are_a_bug_and_some_more_cannot_be_told(ask: Callable[..., Explanation]) -> None:
    verdicts = {count: ask(mismatched=count).verdict for count in (1, 16, 200, 400)}
    assert verdicts == {1: "noise", 16: "undecided", 200: "undecided", 400: "bug"}
    assert 200 < ask().numbers["mean_at_bound"] < 400
    probabilities = [ask(mismatched=count).numbers["probability"] for count in (1, 4, 64)]
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[-1] < LEVEL
    assert ask(mismatched=1000).reason.startswith("1,000 mismatches or more have a probability below 0.1%")


def test_without_simulated_mismatches_nothing_is_noise(ask: Callable[..., Explanation]) -> None:
    assert ask(atol=1.0).verdict == "undecided"
    assert ask(atol=1.0, elements=10**9, mismatched=1000).verdict == "undecided"  # the simulation is too small


def test_a_reference_on_the_original_values_sees_the_quantisation_error(ask: Callable[..., Explanation]) -> None:
    failure = {"mismatched": 40, "atol": 1e-2, "off_by": 0.03}
    verdicts = {against: ask(**failure, against=against).verdict for against in ("stored", "rounded", "original")}
    assert verdicts == {"stored": "bug", "rounded": "bug", "original": "noise"}
    exact, in_bf16 = (ask(against=against).numbers["largest"] for against in ("stored", "rounded"))
    assert exact != in_bf16
    stored, original = (ask(against=against).numbers["judge_allows"] for against in ("stored", "original"))
    assert original > 1.05 * stored


def test_the_failures_of_two_public_tests() -> None:
    """flashinfer 5400, in fp16 over 54 keys, and 4800, in e4m3: 541,663,232 elements, off by 96.6."""
    setting = Setting("fp16", 54, head_dim=256, group=4)
    small = explain(
        setting, drawn_requests(setting, 20 * 8192), mismatched=2, elements=8192, atol=1e-3, rtol=1e-3, off_by=1.16e-3
    )
    assert small.verdict == "undecided"
    setting = Setting("e4m3", 2047, query="e4m3", head_dim=256)
    asked = {"mismatched": 4007, "elements": 541_663_232, "atol": 0.1, "rtol": 0.1, "off_by": 96.5625}
    large = explain(setting, drawn_requests(setting, 16 * 2048), **asked)
    assert large.verdict == "bug"
    assert large.numbers["judge_allows"] < 1
    one_visible_key = replace(setting, keys=1)  # as the first rows of a prompt see
    assert explain(one_visible_key, drawn_requests(one_visible_key, 2**17), **asked).verdict == "bug"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two requests of 20 and 5 keys, two rows each, over a cache in bf16 with two K/V heads; a window of 8 keys."""
    torch.manual_seed(1)
    arguments = {
        "query": torch.randn(4, 4, 16).bfloat16(),
        "kv_cache": tuple(torch.randn(4, 2, 16, 16).bfloat16() for _ in range(2)),
        "block_tables": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 5], dtype=torch.int32),
        "max_seq_len": 32,
        "bmm1_scale": 0.25,
        "bmm2_scale": 2.0,
        "q_len_per_req": 2,
        "window_left": 7,
    }
    return write_call(tmp_path / "calls", DECODE, arguments, (torch.zeros(4, 4, 16).bfloat16(),))


def test_recorded_calls_have_their_own_queries_keys_and_values(recording: Path) -> None:
    (case,) = recorded_cases(recording)
    given = case.read().given
    first, second = recorded_requests([case])
    assert first.query.shape == (2, 2, 16)
    assert torch.equal(first.query.flatten(0, 1), given["query"][1])
    assert torch.equal(second.query.flatten(0, 1), given["query"][3])
    keys, values = given["kv_cache"]
    assert torch.equal(first.keys[:, -4:], keys[3, :, :4].float())
    assert torch.equal(first.keys[:, :4], keys[1, :, 12:].float())
    assert torch.equal(second.values, 2 * values[2, :, :5].float())
    assert (first.keys.shape, second.keys.shape) == ((2, 8, 16), (2, 5, 16))
    row = budget(first, Setting("bf16"))
    assert (row["quantisation"], row["keys"], row["vectors"]) == (0.0, 8, 4)
    assert budget(first, Setting("e4m3"))["quantisation"] > 0.01


COMMAND = "budget --keys 32 --group 2"


def test_the_command_shows_a_table_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{COMMAND} --scale 1,amax/4 --values outliers,normal --keys 32,1K lab.references") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split()[:4] for line in lines if re.match(" (bf16|e4m3|nvfp4)", line)]
    assert rows.count(["bf16", "–", "outliers", "1K"]) == 1
    assert rows[-1] == ["nvfp4", "amax/4", "normal", "1K"]
    assert len(rows) == 4 + 8 + 8
    assert "q %, k %: elements with |got - want| > 0.01 + 0.01 |want|, quantised and kernel" in lines


def test_the_command_takes_a_recording(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{COMMAND} --calls {recording} --kv e4m3 --json -") == 0
    assert '"keys": 8' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "status", "says"),
    [
        ("--atol 2e-3 --mismatched 1", 0, "noise: 1 mismatches or more have a probability of"),
        (
            "--atol 1e-2 --mismatched 900 --against stored",
            1,
            "bug: 900 mismatches or more have a probability below 0.1%",
        ),
        ("--atol 1e-2 --mismatched 1 --off-by 96.5", 1, "bug: the largest difference is 96.5, "),
        ("--atol 1e-2 --mismatched 1 --exceeds 9700%", 1, "bug: the largest difference is 0.98, "),
        ("--atol 1 --mismatched 1", 125, "undecided: it is more than the simulation shows"),
    ],
)
def test_the_command_answers(failure: str, status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{COMMAND} --kv e4m3 --elements 1024 --rtol 0 --draws 100 {failure}") == status
    said = capsys.readouterr().out
    assert says in said
    assert "simulated: Setting(kv='e4m3', keys=32" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--kv int8", "kv 'int8' is none of fp16, bf16, e4m3, nvfp4"),
        ("--scale 2", "scale '2' is none of 1, amax, 4amax, amax/4"),
        ("--values odd", "values 'odd' is none of normal, heavy, outliers"),
        ("--keys 1X", "1X is no number of keys, such as 1000, 64K or 1M"),
        ("--head-dim 24", "head_dim a multiple of 16"),
        ("--group 0", "each must be above 0"),
        ("--v-std 0", "each must be above 0"),
        ("--kv fp16 --query bf16", "a cache of fp16 goes with queries of fp16, not bf16"),
        ("--mismatched 1 --elements 8", "for the failure of a test, give one value each by --kv"),
        ("--kv e4m3 --mismatched 9 --elements 8", "9 mismatched of 8 elements: at least 1, and at most all"),
        ("--kv e4m3 --mismatched 1", "1 mismatched of 0 elements"),
        ("--kv e4m3 --off-by 1", "0 mismatched of 0 elements"),
        (
            "--kv e4m3 --mismatched 1 --elements 8 --off-by 0.005",
            "does not exceed atol 0.01: give the largest |got - want|",
        ),
        ("--kv e4m3 --mismatched 1 --elements 8 --rtol -1", "must be finite and at least 0"),
        ("--kv e4m3 --mismatched 1 --elements 8 --off-by much", "much"),
        ("tests/test_budget.py", f"tests/test_budget.py has no {DECODE}"),
        ("--calls absent", "absent is no folder of recorded calls"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(options: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{COMMAND} {options}") == 2
    assert says in capsys.readouterr().err


def test_a_kernel_may_decline_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{COMMAND} tests/checks/someone_elses.py --kv nvfp4") == 125
    assert "tests/checks/someone_elses.py computes no call over a cache of nvfp4" in capsys.readouterr().err


def test_a_quantised_recording_has_no_original_values(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = recorded_cases(recording)
    given = dict(case.read().given)
    given.pop("workspace_buffer", None)
    given["kv_cache"] = tuple(side.to(E4M3) for side in given["kv_cache"])
    other = write_call(recording.parent / "quantised", DECODE, given, (torch.zeros(4, 4, 16).bfloat16(),))
    assert run(f"{COMMAND} --calls {other}") == 2
    assert "record with a cache of bf16 or fp16" in capsys.readouterr().err
