"""A kernel whose bits depend on one factor is named with this factor and no other."""

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from lab.calls.problem import AttentionCall
from lab.checks import Outcome, Ranges, Report, invariance
from lab.checks.properties.check import Level
from lab.checks.properties.invariance import FACTORS, _judge
from lab.checks.properties.k08_decomposition import halves, single_rows
from lab.checks.properties.variants import Variant
from lab.checks.run.invariance import Answer, Dependence, Invariance
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import largest_ulps
from lab.exit_status import ExitStatus
from lab.reports.invariance import invariance_report
from lab.workloads.attention_case import AttentionCase, HeadPages, Storage
from lab.workloads.inputs.attention import build_attention
from lab.workloads.interfaces import PAGED_CALLS
from tests.checks import dependent_kernels as kernels
from tests.checks.dependent_kernels import divided
from tests.checks.small import SMALL, decoding
from tests.devices import ON_GPU

RANGES = replace(SMALL, page_sizes=(16, 32))
CPU = torch.device("cpu")
ON_CPU = {factor.key for factor in FACTORS} - {"cuda-graph"}


def answers(found: Invariance) -> dict[str, set[Answer]]:
    by_factor: dict[str, set[Answer]] = {}
    for each in found.dependences:
        by_factor.setdefault(each.check, set()).add(each.answer)
    return by_factor


def found_for(kernel: Any, *functions: str, **settings: Any) -> Invariance:
    return invariance(kernel, ranges=RANGES, device="cpu", functions=functions, **settings)


def test_a_right_kernel_that_divides_all_calls_alike_has_the_same_bits_everywhere() -> None:
    found = found_for(kernels.Parts())
    assert answers(found) == {key: {Answer.SAME} for key in ON_CPU} | {"cuda-graph": {Answer.NOT_TRIED}}
    assert {each.interface for each in found.dependences} == {*PAGED_CALLS, AttentionCall.RAGGED_CONTEXT}
    assert found.exit_status is ExitStatus.DONE
    assert all(each.most_ulps == 0 for each in found.dependences)
    (reason,) = {why for v in found.report.verdicts if v.judged.by_lab for why in v.judged.declines}
    assert reason == "no GPU"


def bound_of(call: Any) -> int:
    return getattr(call, "max_seq_len", getattr(call, "max_kv_len", 0))


@pytest.mark.parametrize(
    ("factor", "kernel", "functions"),
    [
        ("batch-size", kernels.by_batch_size, ["decode", "ragged_context"]),
        ("position", divided(lambda run, r: 24 + 8 * r), ["ragged_context"]),
        ("neighbours", divided(lambda run, r: 24 if run.batch == 1 or run.lens[1] < 100 else 40), ["mla_decode"]),
        # The requests after the first are divided into single keys if the first query is large.
        ("neighbours", divided(lambda run, r: 1 if r and run.query[0, 0].norm() > 13 else 24), ["decode"]),
        ("bounds", divided(lambda run, r: 8 + bound_of(run.call) // 10), ["ragged_context"]),
        ("bounds", divided(lambda run, r: 24 if run.k_table.shape[1] < 30 else 40), ["decode"]),
        ("page-order", kernels.ByPageOrder(), ["decode"]),
        ("page-size", divided(lambda run, r: 2 * run.page_size), ["decode"]),
        (
            "rows-per-call",
            divided(lambda run, r: 24 + 8 * (run.offsets[r + 1] - run.offsets[r])),
            ["context", "ragged_context"],
        ),
        ("workspace", kernels.ByWorkspace(), ["ragged_context"]),
        ("tactic", divided(lambda run, r: 24 + 8 * (getattr(run.call, "backend", "auto") == "xqa")), ["mla_decode"]),
    ],
)
def test_a_kernel_that_depends_on_one_factor_is_named_with_it_and_no_other(
    factor: str, kernel: Any, functions: list[str]
) -> None:
    ranges = SMALL if factor == "page-order" else RANGES  # pages of another size have another order
    found = invariance(kernel, ranges=ranges, device="cpu", functions=functions)
    of = answers(found)
    assert of.pop(factor) == {Answer.WITHIN}
    assert of.pop("cuda-graph") == {Answer.NOT_TRIED}
    assert set().union(*of.values()) == {Answer.SAME}
    assert found.exit_status is ExitStatus.DONE
    assert all(0 < each.most_ulps <= 16 for each in found.dependences if each.check == factor)


@pytest.mark.parametrize("kernel", [kernels.ByLaunch, kernels.ByTheCallBefore])
def test_no_other_factor_is_named_where_the_same_call_has_other_bits(kernel: Any) -> None:
    of = answers(found_for(kernel(), "decode"))
    assert of.pop("repeated-runs") == {Answer.WITHIN}
    assert Answer.WITHIN not in set().union(*of.values())


def test_what_is_wrong_refused_or_fails_with_a_factor_is_told_apart() -> None:
    of_large = found_for(kernels.WrongInLargeBatches(), "decode", factors=["batch-size", "position"])
    assert answers(of_large) == {"batch-size": {Answer.WRONG}, "position": {Answer.SAME}}
    assert of_large.exit_status is ExitStatus.WRONG
    failing = found_for(kernels.FailingWithoutOthers(), "decode", factors=["batch-size", "bounds"])
    assert answers(failing) == {"batch-size": {Answer.WRONG}, "bounds": {Answer.SAME}}
    refusing = found_for(kernels.OfThreeRequests(), "decode", factors=["batch-size", "workspace"])
    assert answers(refusing) == {"batch-size": {Answer.UNSUPPORTED}, "workspace": {Answer.SAME}}
    assert refusing.exit_status is ExitStatus.DONE


def test_a_required_factor_must_have_been_tried_with_the_same_bits() -> None:
    kernel = kernels.by_batch_size
    assert found_for(kernel, "decode", factors=["position"], require=["position"]).exit_status is ExitStatus.DONE
    required = found_for(kernel, "decode", factors=["position"], require=["batch-size"])
    assert set(answers(required)) == {"batch-size", "position"}
    assert [each.check for each in required.unmet] == ["batch-size"]
    assert required.exit_status is ExitStatus.WRONG
    untried = found_for(kernel, "decode", factors=["position"], require=["cuda-graph"])
    assert untried.exit_status is ExitStatus.WRONG
    elsewhere = found_for(kernel, "context", factors=["position"], require=["tactic"])
    assert elsewhere.without_cases == ("tactic",)
    assert elsewhere.exit_status is ExitStatus.WRONG


@cache
def at_positions() -> Report:
    return found_for(kernels.Parts(), "decode", factors=["position"]).report


def test_a_requirement_is_not_met_by_some_cases_alone() -> None:
    """As of a kernel that has the same bits again only where it does not divide the keys."""
    right, untried = verdict(Outcome.RIGHT), verdict(Outcome.DECLINED, by_lab=True, declines=("other bits",))
    report = at_positions()
    found = Invariance(replace(report, verdicts=(right, untried, right)), ("position",))
    assert [(each.answer, each.required_answer) for each in found.unmet] == [(Answer.SAME, Answer.NOT_TRIED)]
    assert found.exit_status is ExitStatus.WRONG
    shown = invariance_report(found)
    assert "required, but not tried: position of decode" in shown.below
    refused = Invariance(replace(report, verdicts=(right, verdict(Outcome.DECLINED))), ("position",))
    assert refused.exit_status is ExitStatus.DONE


def test_a_function_that_takes_no_call_meets_no_requirement_and_breaks_none() -> None:
    def refuse(**_: Any) -> None:
        raise NotImplementedError("nothing is supported")

    kernel = decoding(kernels.Parts().trtllm_batch_decode_with_kv_cache)
    kernel.trtllm_batch_context_with_kv_cache = refuse
    found = found_for(kernel, factors=["position"], require=["position"])
    assert not found.unmet
    assert found.exit_status is ExitStatus.NOT_JUDGED


def test_the_record_has_each_answer_with_its_smallest_case() -> None:
    record = found_for(kernels.by_batch_size, "decode", factors=["batch-size"]).as_record()
    (answer,) = record["invariance"]
    assert answer["function"] == "trtllm_batch_decode_with_kv_cache"
    assert (answer["dtypes"], answer["factor"], answer["answer"]) == ("bf16/bf16", "batch-size", "within the bound")
    assert answer["cases"] == {"within the bound": 3}
    assert answer["smallest"] == {"within the bound": 1}
    assert answer["most_ulps"] == "1.0"
    (first, *_) = record["cases"]
    assert "kv_lens=(121," in first["case"]
    assert ["request 0 alone", 1.0] in first["differences"]


def verdict(outcome: Outcome, **judged: Any) -> Any:
    (first, *_) = at_positions().verdicts
    return replace(first, judged=replace(first.judged, outcome=outcome, **judged))


def test_the_worst_answer_of_the_cases_counts() -> None:
    right, declined = verdict(Outcome.RIGHT), verdict(Outcome.DECLINED)
    of = partial(Dependence, "position", AttentionCall.DECODE, dtypes="bf16/bf16")
    assert of((declined, right)).answer is Answer.SAME
    assert of((declined,)).answer is Answer.UNSUPPORTED
    assert of((verdict(Outcome.DECLINED, by_lab=True), declined)).answer is Answer.NOT_TRIED
    assert of((right, verdict(Outcome.FAILED))).answer is Answer.WRONG


def test_the_first_request_is_the_longest_and_long_requests_are_among_the_cases() -> None:
    for factor in FACTORS:
        for interface in factor.interfaces:
            cases = list(factor.cases(interface, Ranges(), Level.SMOKE))
            assert {max(case.kv_lens) >= 4_100 for case in cases} == {False, True}
            for case in cases:
                assert case.kv_lens[0] == max(case.kv_lens)
                assert case.q_lens[0] == max(case.q_lens)
    few, many = (
        len(list(FACTORS[0].cases(AttentionCall.DECODE, Ranges(), level))) for level in (Level.SMOKE, Level.FULL)
    )
    assert (few, many) == (12, 32)


def test_a_replay_is_what_a_variant_makes() -> None:
    """As a CUDA graph is on a GPU."""
    replays = []

    def captured(run: Any, call: Any) -> Any:
        def replay() -> Any:
            replays.append(call)
            return run.call(call)._replace(out=2.0 * run.call(call).out)

        return replay

    def variants(run: Any, inputs: Any) -> Any:
        yield Variant("a replay", inputs, make=captured)

    check = replace(FACTORS[0], judge=partial(_judge, variants=variants))
    (case, *_) = check.cases(AttentionCall.DECODE, RANGES, Level.SMOKE)
    judged = run_case(kernels.Parts(), check, case, CPU, RANGES)
    assert judged.outcome is Outcome.WRONG
    assert [each.what for each in judged.differences] == ["a replay"]
    assert len(replays) == 1


def test_another_dtype_is_wrong() -> None:
    class Widened(kernels.Parts):
        def paged(self, call: Any) -> Any:
            out = super().paged(call)
            return out.float() if call.problem().batch_size == 1 else out

    found = found_for(Widened(), "decode", factors=["batch-size"])
    assert answers(found) == {"batch-size": {Answer.WRONG}}
    assert "request 0 alone: the output is torch.float32" in found.report.verdicts[0].reason


def test_the_distance_in_units_of_the_last_place() -> None:
    one = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    other = one.clone()
    assert largest_ulps(one, other) == 0.0
    other[0, 0, 1] = 1 + 3 * 2**-7
    assert largest_ulps(one, other) == 3.0
    other[0, 0, 0] = 4.0  # the places of the vector's largest element count for all of them
    assert largest_ulps(one, other) == 96.0
    other = one.clone()
    other[0, 0, 2] = math.nan
    assert largest_ulps(one, other) == math.inf
    zero = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    assert largest_ulps(zero, -zero) == 0.0
    tiny = torch.full_like(zero, 2**-133)
    assert largest_ulps(zero, tiny) == 1.0


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=ON_GPU)])
def test_a_graph_is_tried_on_a_gpu(where: str) -> None:
    ranges = replace(RANGES, head_dims=(128,), groups=(8,), page_sizes=(64,))
    found = invariance(
        "lab.kernels.portable", ranges=ranges, device=where, functions=["decode"], factors=["cuda-graph", "workspace"]
    )
    assert answers(found)["cuda-graph"] <= {Answer.SAME, Answer.WITHIN}


def test_rows_in_one_call_are_divided_into_single_rows_and_halves() -> None:
    case = AttentionCase(AttentionCall.CONTEXT, (9, 5), (5, 3), num_kv_heads=1)
    inputs = build_attention(case, CPU)
    first, second = halves(inputs)
    assert (first.inputs.q_lens, first.inputs.kv_lens) == ((2, 1), (6, 3))
    assert (second.inputs.q_lens, second.inputs.kv_lens) == ((3, 2), (9, 5))
    assert torch.cat((first.rows, second.rows)).tolist() == [0, 1, 5, 2, 3, 4, 6, 7]
    assert [each.rows.tolist() for each in single_rows(inputs)] == [[4, 7], [3, 6], [2, 5]]
    assert [each.inputs.kv_lens for each in single_rows(inputs)] == [(9, 5), (8, 4), (7, 3)]


@pytest.mark.parametrize("head_pages", HeadPages)
def test_a_row_by_itself_sees_the_pages_that_its_head_selects_in_the_whole_call(head_pages: HeadPages) -> None:
    storage = Storage(page_size=16)
    case = AttentionCase(
        AttentionCall.DECODE, (33, 70), (3, 3), num_kv_heads=3, group=2, head_pages=head_pages, storage=storage
    )
    inputs = build_attention(case, CPU)
    whole = inputs.truth().expected
    for variant in (*single_rows(inputs), *halves(inputs)):
        assert variant.rows is not None
        assert torch.allclose(variant.inputs.truth().expected, whole[variant.rows], rtol=0, atol=1e-12)
