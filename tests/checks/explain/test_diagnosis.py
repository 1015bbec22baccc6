"""Diagnoses of synthetic verdicts, of mutants and of a right implementation."""

import json
from dataclasses import replace
from typing import Any

import pytest

from corpus.kernels import MUTANTS, kernel
from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, CaseVerdict, Outcome, judge
from lab.checks.explain import diagnosis
from lab.checks.explain.diagnosis import CaseResult, Diagnosis, Region, _broken, _features_of, _units, diagnose
from lab.checks.explain.features import feature_named
from lab.checks.explain.literal import Literal
from lab.checks.run.verdicts import RETURNED, CheckedResult, Judged, WrongVector
from lab.recorded.case import RecordedCase
from tests.checks.measure_regions import TRIGGERS, markdown, record_of
from tests.checks.small import SMALL

CASE = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1))
SEVERAL = replace(SMALL, groups=(1, 2), num_kv_heads=(1, 2), page_sizes=(16, 32), q_lens=(1, 2, 3), longest=100)
RANGES = replace(SEVERAL, windows=(False, True), sinks=(False, True))


def verdict(number: int, *results: CheckedResult) -> CaseVerdict:
    outcome = Outcome.WRONG if any(result.wrong for result in results) else Outcome.RIGHT
    judged = Judged(outcome, ("off",) if outcome is Outcome.WRONG else (), judged=len(results), results=results)
    return CaseVerdict("somebody", "K1", AttentionCall.DECODE, CASE, "cpu", judged, number=number)


def result(rows: int, *, wrong: bool, held: str = "output", **features: Any) -> CheckedResult:
    vector = WrongVector("row 0 (request 0), head 1", (1.0, 2.0), (3.0, 4.0)) if wrong else None
    given = {"rows_of_batch": rows, **features}
    return CheckedResult("the call", held, given, wrong, (({"q_len": rows}, wrong), ({"q_len": 1}, False)), vector)


def region(name: str, held: str, **more: Any) -> Region:
    smallest = CaseResult(with_outcome(Outcome.WRONG), result(4, wrong=True))
    return Region((Literal(name, "is"),), held, 4, 4, 5, 6, smallest, **more)


def test_results_are_counted_and_the_smallest_is_shown() -> None:
    verdicts = [verdict(number, result(1 + number % 4, wrong=number % 4 > 0)) for number in range(40)]
    found = diagnose(verdicts)
    assert found.broken == (
        "The output is wrong wherever a request has several query rows (30 of 30 results); every other result is right."
    )
    (region,) = found.regions
    assert (region.rule, region.wrong, region.results, region.right_outside, region.outside) == (
        "q_len >= 2",
        30,
        30,
        10,
        10,
    )
    assert region.counts == "the output is wrong in 30 of 30 results with q_len >= 2, right in 10 of 10 other results"
    record = json.loads(json.dumps(found.as_record()))
    assert record["smallest"]["case"] == 1
    assert record["smallest"]["got"] == ["3.0", "4.0"]
    assert record["regions"][0]["case"] == 1
    assert record["regions"][0]["sentence"] == "The output is wrong wherever a request has several query rows"
    assert found.follows == ("K1 of decode: no further error, because the first call of each wrong case is wrong",)


def test_what_is_before_a_request_is_no_feature_of_a_whole_call() -> None:
    case = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1))
    judged = Judged(Outcome.RIGHT, judged=1)
    found = _features_of(CaseVerdict("somebody", "K1", AttentionCall.DECODE, case, "cpu", judged))
    assert (found["kv_len"], found["requests"]) == (33, 2)
    names = {"request", "previous_kv_len", "previous_q_len", "work_items", "rows_so_far", "rows_before", "keys_before"}
    assert not names & found.keys()


def test_a_region_records_both_numbers_that_its_rule_compares() -> None:
    case = verdict(0, result(1, wrong=True))
    literals = (Literal("kv_len", ">", "window_left"), Literal("sinks", "is"))
    region = Region(literals, "output", 1, 1, 0, 0, CaseResult(case, result(1, wrong=True)))
    assert region.as_record()["features"] == ["kv_len", "window_left", "sinks"]
    assert region.words == "a request's number of keys is larger than window_left and sinks are given"


def test_checks_without_further_errors_are_in_order_of_their_numbers_or_names() -> None:
    """The checks of `lab invariance` are factors, which have no number."""
    checks = ("K10", "page-order", "K4", "batch-size")
    found = diagnose([replace(verdict(n, result(1, wrong=True)), check=check) for n, check in enumerate(checks)])
    (follows,) = found.follows
    assert follows.startswith("K4, K10, batch-size and page-order of decode: no further error")


def test_wrong_results_outside_every_region_are_counted_whatever_comes_first() -> None:
    failures = [verdict(99, *[result(4, wrong=True, held="return", mask=True)] * 9)]
    outputs = [verdict(n, result(1 + n % 4, wrong=n % 4 == 3 or n == 40)) for n in range(48)]
    found = diagnose(outputs + failures)
    assert [region.rule for region in found.regions] == ["mask", "q_len >= 4"]
    assert found.sentence.endswith("; 1 other result is wrong too.")


def test_what_was_left_out_is_not_called_right() -> None:
    verdicts = [verdict(number, result(1 + number % 4, wrong=number % 4 > 0)) for number in range(40)]
    assert diagnose(verdicts, is_whole=False).sentence.endswith("; every other result that was judged is right.")


def test_no_other_result_is_called_right_if_each_result_has_a_request_of_the_region() -> None:
    """As of the calls that a recorder in shadow keeps: all are wrong."""
    found = diagnose([verdict(number, result(2 + number % 3, wrong=True)) for number in range(30)])
    assert [(region.rule, region.outside) for region in found.regions] == [("q_len >= 2", 0)]
    assert found.broken == "The output is wrong wherever a request has several query rows (30 of 30 results)."


def test_a_kind_that_follows_from_another_has_no_region() -> None:
    pairs = [(result(1 + n % 4, wrong=n % 4 > 0), result(1 + n % 4, wrong=n % 4 > 1, held="bits")) for n in range(40)]
    assert [region.held for region in diagnose([verdict(n, *pair) for n, pair in enumerate(pairs)]).regions] == [
        "output"
    ]


@pytest.mark.parametrize(("wrong_outputs", "regions"), [(40, ["output"]), (20, ["output", "LSE"])])
def test_an_lse_follows_where_most_of_its_outputs_are_wrong(wrong_outputs: int, regions: list[str]) -> None:
    pairs = [
        (result(4, wrong=n % 4 == 3 and n < wrong_outputs, sinks=n % 4 == 3), result(4, wrong=n % 4 == 3, held="LSE"))
        for n in range(40)
    ]
    lses = [(output, replace(lse, features=output.features)) for output, lse in pairs]
    assert [region.held for region in diagnose([verdict(n, *pair) for n, pair in enumerate(lses)]).regions] == regions


def test_written_memory_and_failures_follow_from_nothing() -> None:
    triples = [
        (
            result(4, wrong=True),
            result(4, wrong=n % 2 > 0, held="memory", sinks=n % 2 > 0),
            result(4, wrong=True, held="bits"),
        )
        for n in range(40)
    ]
    failures = [result(4, wrong=True, held="return", mask=True)] * 9
    found = diagnose([verdict(n, *each) for n, each in enumerate(triples)] + [verdict(99, *failures)])
    assert [region.held for region in found.regions] == ["return", "output", "memory"]
    assert found.broken.startswith("The call fails wherever a draft mask is given")


@pytest.mark.parametrize(("wrong_outputs", "first"), [(12, "memory"), (24, "output")])
def test_memory_that_is_written_more_often_than_results_are_wrong_comes_first(wrong_outputs: int, first: str) -> None:
    """It is then the cause: a kernel that clears a page of its input makes later calls wrong."""
    pairs = [
        (
            result(4, wrong=n < wrong_outputs, mask=n < wrong_outputs),
            result(4, wrong=n % 2 > 0, held="memory", sinks=n % 2 > 0),
        )
        for n in range(40)
    ]
    found = diagnose([verdict(n, *pair) for n, pair in enumerate(pairs)])
    assert [region.held for region in found.regions] == sorted(["output", "memory"], key=lambda held: held != first)


def test_what_was_read_from_a_file_is_diagnosed_by_its_cases() -> None:
    shapes = [(20,), (20, 33), (33,), (20, 40), (7,), (1, 2), (9,), (9, 9)] * 3
    verdicts = [
        CaseVerdict(
            "somebody",
            "K1",
            AttentionCall.DECODE,
            AttentionCase(AttentionCall.DECODE, lens, (1,) * len(lens)),
            "cpu",
            Judged(Outcome.WRONG if len(lens) > 1 else Outcome.RIGHT, judged=1),
        )
        for lens in shapes
    ]
    assert "a batch has several requests" in diagnose(verdicts).sentence


def test_a_crash_is_described_by_its_case_and_not_by_what_a_call_alone_would_say() -> None:
    def judged(number: int, q_lens: tuple[int, ...], *, crashed: bool) -> CaseVerdict:
        case = AttentionCase(AttentionCall.DECODE, (40,) * len(q_lens), q_lens)
        found = (
            Judged(Outcome.FAILED) if crashed else Judged(Outcome.RIGHT, judged=1, results=(result(1, wrong=False),))
        )
        return CaseVerdict("somebody", "K9", AttentionCall.DECODE, case, "cpu", found, number=number)

    verdicts = [judged(n, (1 + n % 4,) * (1 + n % 3), crashed=n % 4 == 3) for n in range(48)]
    assert [region.rule for region in diagnose(verdicts).regions] == ["q_len >= 4"]


def test_that_it_failed_is_no_region_of_what_fails() -> None:
    failed = replace(result(4, wrong=True, held="return", mask=True), name="it failed")
    verdicts = [verdict(n, result(1 + n % 4, wrong=False)) for n in range(40)] + [verdict(99, *[failed] * 9)]
    assert [region.rule for region in diagnose(verdicts).regions] == ["mask"]


@pytest.mark.parametrize(
    ("wrong", "extent", "without_rule"),
    [
        (40, "wherever", "everywhere"),
        (39, "in most cases where", "nearly everywhere"),
        (36, "in most cases where", "nearly everywhere"),
        (35, "in most cases where", "in most cases"),
        (21, "in most cases where", "in most cases"),
        (20, "in some cases where", "in some cases"),
    ],
)
def test_a_rule_that_holds_for_right_results_too_says_so(wrong: int, extent: str, without_rule: str) -> None:
    rule = (Literal("q_len", ">=", 2),)
    region = Region(rule, "output", wrong, 40, 5, 6, CaseResult(with_outcome(Outcome.WRONG), result(4, wrong=True)))
    assert region.where == f"{extent} a request has several query rows"
    assert replace(region, literals=()).where == without_rule


def test_nan_that_no_row_may_read_is_named() -> None:
    def judged(number: int, dead: str) -> CheckedResult:
        has_window = number % 2 > 0
        return result(4, wrong=dead == "nan" and has_window, held="bits", has_window=has_window, dead=dead)

    verdicts = [verdict(n, judged(n, "nan"), judged(n, "huge")) for n in range(40)]
    said = "NaN in memory that no row may read reaches the result, as 0 times NaN is NaN, wherever "
    assert diagnose(verdicts).broken.startswith(said)


def test_a_region_that_no_engine_sends_follows_and_says_so() -> None:
    def judged(number: int, *, corner: bool) -> CaseVerdict:
        features = {"some_inf_sink": True} if corner else {"mask": number % 4 == 0}
        is_wrong = corner or number % 4 == 0
        return replace(verdict(number, result(1, wrong=is_wrong, **features)), sent_by=() if corner else ("sglang",))

    verdicts = [judged(n, corner=n % 3 > 0) for n in range(60)]
    assert [(region.rule, region.is_corner) for region in diagnose(verdicts).regions] == [
        ("mask", False),
        ("some_inf_sink", True),
    ]
    assert "wherever a sink is minus infinity, which no engine sends (40 of 40)" in diagnose(verdicts).broken


def test_a_corner_follows_all_that_engines_send_and_is_told_apart() -> None:
    """Whatever is wrong in it: here the output, while what an engine sends returns other bits."""

    def judged(number: int, held: str, *, corner: bool) -> CaseVerdict:
        features = {"some_inf_sink": True} if corner else {"mask": number % 4 == 1}
        is_wrong = (held == "output") == corner and (corner or number % 4 == 1)
        found = result(1, wrong=is_wrong, held=held, **features)
        return replace(verdict(number, found), sent_by=() if corner else ("sglang",))

    kinds = ("output", "bits")
    found = diagnose([judged(n, kinds[n % 2], corner=n % 3 > 0) for n in range(120)])
    assert [(region.held, region.is_corner) for region in found.regions] == [("bits", False), ("output", True)]

    later = [region("mask", "output"), region("sinks", "output", is_corner=True), region("no_keys", "output")]
    for chosen, says in (
        (
            later[:2],
            "the output is wrong wherever a draft mask is given; and wherever sinks are given, which no engine sends.",
        ),
        (later[1:2], "the output is wrong wherever sinks are given, which no engine sends."),
        (later[::2], "the output is wrong wherever a draft mask is given or wherever a request has no keys."),
    ):
        assert _broken([region("has_window", "return"), *chosen], 0, True).endswith(f"(4 of 4 results); {says}")


def test_the_smallest_case_is_one_that_an_engine_sends() -> None:
    found = diagnose([verdict(0, result(2, wrong=True)), replace(verdict(1, result(9, wrong=True)), sent_by=("vllm",))])
    assert found.regions[0].smallest.verdict.number == 1


def test_merged_outputs_follow_from_the_lse_that_merges_them() -> None:
    def judged(number: int) -> CaseVerdict:
        features = {"mask": number % 4 == 0}
        kinds = ("output", "LSE", "merged")
        return verdict(
            number, *(result(1, wrong=held != "output" and number % 4 == 0, held=held, **features) for held in kinds)
        )

    assert [region.held for region in diagnose([judged(n) for n in range(40)]).regions] == ["LSE"]


def with_outcome(outcome: Outcome, check: str = "K1", **features: Any) -> CaseVerdict:
    """A verdict whose only result is wrong, or fails, or there is none."""
    held = "return" if outcome is Outcome.FAILED else "output"
    results = (result(4, wrong=True, held=held, **features),) if outcome in (Outcome.WRONG, Outcome.FAILED) else ()
    return CaseVerdict("somebody", check, AttentionCall.DECODE, CASE, "cpu", Judged(outcome, results=results))


def test_checks_that_add_nothing_are_named_in_their_order() -> None:
    verdicts = [with_outcome(Outcome.WRONG, check) for check in ("K10", "L1", "K2", "K2")]
    assert diagnose(verdicts).follows[0].startswith("K2, K10 and L1 of decode: ")


def test_of_several_wrong_cases_the_smallest_with_a_vector_is_shown() -> None:
    sizes = [result(rows, wrong=True) for rows in (5, 3, 4)]
    found = diagnose([verdict(n, each) for n, each in enumerate([replace(sizes[0], example=None), *sizes[1:]])])
    assert found.regions[0].smallest.verdict.number == 1
    found = diagnose([verdict(n, each) for n, each in enumerate([replace(sizes[1], example=None), sizes[2]])])
    assert found.regions[0].smallest.verdict.number == 1
    sizes = [
        result(9, wrong=True, longest_kv_len=0),  # as of one key
        result(3, wrong=True, longest_kv_len=2),
        result(1, wrong=True, longest_kv_len=2, num_qo_heads=5),
    ]
    assert diagnose([verdict(n, each) for n, each in enumerate(sizes)]).regions[0].smallest.verdict.number == 1


def test_a_sentence_names_the_first_region_and_two_more_of_each_kind() -> None:
    assert _broken([region("mask", "bits"), region("sinks", "output")], 0, True) == (
        "An equal call returns different bits wherever a draft mask is given (4 of 4 results); the output is wrong wherever "
        "sinks are given."
    )
    names = ("mask", "sinks", "has_window", "no_keys")
    regions = [region(name, held) for held in ("output", "bits") for name in names]
    assert _broken(regions, 2, True) == (
        "The output is wrong wherever a draft mask is given (4 of 4 results); and wherever sinks are given (4 of 4); and "
        "wherever a window is set (4 of 4); an equal call returns different bits wherever a draft mask is given or wherever "
        "sinks are given; 2 other results are wrong too."
    )


def test_a_rule_over_other_requests_of_the_same_results_has_no_region() -> None:
    wrong = (({"q_len": 3}, True), ({"no_keys": True}, True), ({"q_len": 1}, False))
    verdicts = [
        verdict(n, replace(result(4, wrong=n % 2 > 0), requests=wrong if n % 2 else wrong[2:])) for n in range(40)
    ]
    assert len(diagnose(verdicts).regions) == 1


@pytest.mark.parametrize(
    ("right", "regions", "end"), [(2, ["sinks", "mask"], ""), (3, ["sinks"], "2 other results are wrong too.")]
)
def test_a_later_rule_for_few_results_holds_for_at_least_as_many_wrong_results_as_right_ones(
    right: int, regions: list[str], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [(Literal("sinks", "is"),), (Literal("mask", "is"),)]
    monkeypatch.setattr(diagnosis, "find_rules", lambda *_: rules)
    monkeypatch.setattr(diagnosis, "supported", lambda rule, *_: rule)
    monkeypatch.setattr(diagnosis, "sharpened", lambda rule, *_: rule)
    several = [(True, False, True)] * 9 + [(False, True, True)] * 2 + [(False, True, False)] * right
    found = diagnose(
        [verdict(n, result(1, wrong=wrong, sinks=sinks, mask=mask)) for n, (sinks, mask, wrong) in enumerate(several)]
    )
    assert [each.rule for each in found.regions] == regions
    assert found.broken.endswith(end)


def test_where_every_recorded_call_is_wrong_the_plainest_conditions_that_all_share_are_named() -> None:
    shared = dict.fromkeys(
        ("virtual_slots", "first_request", "all_no_keys", "no_keys", "mask", "sinks", "has_window"), True
    )
    verdicts = [
        replace(
            verdict(n, result(4, wrong=True, **shared, bmm1_scale_tensor=n > 1, some_no_keys=True, group=3)),
            case=RecordedCase(AttentionCall.DECODE, "calls", n, "noon"),
        )
        for n in (1, 2, 3, 4)
    ]
    assert diagnose(verdicts).broken == (
        "No judged call is right, so that the recording shows no rule. All share: a draft mask is given; "
        "sinks are given; a window is set; no request of the batch has keys; a request has no keys. Among their requests, the "
        "output is wrong wherever a request has several query rows (4 of 4 results)."
    )


def test_every_mutant_has_a_trigger_of_known_concepts() -> None:
    known = json.loads(TRIGGERS.read_text())
    assert set(known["triggers"]) == set(MUTANTS)
    for alternatives in known["triggers"].values():
        assert alternatives
        assert {concept for trigger in alternatives for concept in trigger} <= set(known["concepts"])
    for names in known["concepts"].values():
        assert all(
            name.startswith("held == ")
            or feature_named(name if "=" in name[1:] and " " not in name else name.split()[0])
            for name in names
        )


def test_a_measured_record_says_which_region_names_the_trigger() -> None:
    record = record_of("branch_pages_ignored")
    assert record["named_by"] == [0]
    assert "partial_page and topk >= 2" in record["regions"][0]
    assert "For 1 (100.0%) of the found mutants, the first rule of the judge's diagnosis names" in markdown([record])


def diagnosis_of(implementation: Any, *only: str) -> Diagnosis:
    return judge(implementation, ranges=RANGES, only=only, drawn=0, device="cpu").diagnosis


@pytest.mark.parametrize(
    ("name", "only", "words"),
    [
        ("window_of_first_row", ("K3", "K8"), ("a window", "a request has several query rows")),
        ("length_rounded_up_to_page", ("K1", "K13"), ("a request's last page is partly filled",)),
        ("tensor_scales_ignored", ("K10", "K11"), ("bmm1_scale is a tensor", "bmm2_scale is a tensor")),
        ("zeros", ("K1", "K13"), ("The output is wrong nearly everywhere",)),
    ],
)
def test_the_region_of_a_mutant_names_its_trigger(name: str, only: tuple[str, ...], words: tuple[str, ...]) -> None:
    implementation = kernel(name).implementation()
    found = diagnosis_of(
        type(implementation)(**{AttentionCall.DECODE.value: getattr(implementation, AttentionCall.DECODE.value)}), *only
    )
    assert all(word in found.sentence for word in words), found.sentence


def test_the_references_are_right() -> None:
    decode = {AttentionCall.DECODE.value: references.trtllm_batch_decode_with_kv_cache}
    found = diagnosis_of(type("Right", (), {name: staticmethod(function) for name, function in decode.items()})(), "K1")
    assert found.sentence.startswith("Right for all that SGLang 0.5.23 and vLLM 0.33.0 send, and in ")
    assert not found.regions


def with_mask_and_sinks(*counts: int) -> list[CaseVerdict]:
    """As many results with a mask and sinks, which are wrong, with sinks alone, with a mask alone, and with neither."""
    kinds = [(mask, sinks) for mask, sinks in ((True, True), (False, True), (True, False), (False, False))]
    several = [each for kind, count in zip(kinds, counts, strict=True) for each in [kind] * count]
    return [
        verdict(n, replace(result(1, wrong=mask and sinks, mask=mask, sinks=sinks), requests=()))
        for n, (mask, sinks) in enumerate(several)
    ]


def test_a_region_of_few_results_names_their_number_and_has_only_conditions_that_they_support() -> None:
    found = diagnose(with_mask_and_sinks(2, 2, 2, 60))
    assert [len(region.literals) for region in found.regions] == [1]
    assert found.broken.startswith("The output is wrong in 2 of 4 results where sinks are given; ")
    (region,) = diagnose(with_mask_and_sinks(2, 30, 30, 60)).regions
    assert region.sentence.startswith("The output is wrong in 2 of 2 results where ")
    assert len(region.literals) == 2
    (region,) = diagnose(with_mask_and_sinks(1, 30, 30, 60)).regions
    assert len(region.literals) < 2


def test_requests_without_keys_show_nothing_unless_one_is_wrong() -> None:
    """Every result has a request with keys and one without."""

    def judged(number: int, empty_is_wrong: bool) -> CaseVerdict:
        has_sinks = number % 2 > 0
        requests = (({"kv_len": 9}, has_sinks), ({"no_keys": True}, has_sinks and empty_is_wrong))
        return verdict(number, replace(result(1, wrong=has_sinks, sinks=has_sinks), requests=requests))

    units = [
        _units([CaseResult(each, *each.judged.results) for each in several], "output")
        for several in ([judged(n, False) for n in range(40)], [judged(n, True) for n in range(40)])
    ]
    assert [len(each.features) for each in units] == [40, 80]
    empty = verdict(40, replace(result(1, wrong=False), requests=(({"no_keys": True}, False),)))
    found = diagnose([*(judged(n, False) for n in range(40)), empty])
    assert (found.regions[0].rule, found.regions[0].right_outside) == ("sinks", 21)
    assert not _units([CaseResult(empty, *empty.judged.results)], "output").features


def test_a_region_of_few_results_follows_one_of_many() -> None:
    failed = result(1, wrong=True, held="return", mask=True, seq_lens_uint32=True)
    others = [result(1, wrong=n % 2 > 0, seq_lens_uint32=n % 2 > 0) for n in range(40)]
    found = diagnose([verdict(n, each) for n, each in enumerate([failed, *others])])
    assert [region.held for region in found.regions] == ["output", "return"]


def test_a_region_of_several_results_keeps_its_conditions() -> None:
    (region,) = diagnose(with_mask_and_sinks(12, 3, 3, 60)).regions
    assert (len(region.literals), region.where[:9]) == (2, "wherever ")


@pytest.mark.parametrize(("held", "name"), [("return", "the call"), ("other", RETURNED)])
def test_a_call_that_returns_has_the_features_of_requests_without_keys_too(held: str, name: str) -> None:
    """A failed call has them; if a right call lacked them, every failure would seem to be of such requests. What a call returns
    otherwise, such as a dtype, is a matter of no request either.
    """
    requests = (({"kv_len": 9}, False), ({"no_keys": True}, False))
    right = [CheckedResult("the call", "output", {}, False, requests[: 1 + number % 2]) for number in range(40)]
    failed = [CheckedResult(name, held, {"kv_len": 9, "no_keys": True}, True)] * 8
    (region,) = diagnose([verdict(number, each) for number, each in enumerate([*right, *failed])]).regions
    assert (region.rule, region.wrong, region.results, region.outside) == ("no_keys", 8, 28, 20)


@pytest.mark.parametrize(("in_even", "end"), [(0, "every other result is right."), (1, "1 other result is wrong too.")])
def test_wrong_results_of_a_kind_that_follows_are_counted_outside_of_all_regions(in_even: int, end: str) -> None:
    def both(number: int) -> tuple[CheckedResult, CheckedResult]:
        sinks = number % 2 > 0
        output, bits = (result(1, wrong=sinks, sinks=sinks), result(1, wrong=sinks or number < in_even, sinks=sinks))
        return replace(output, requests=()), replace(bits, held="bits", requests=())

    found = diagnose([verdict(number, *both(number)) for number in range(100)])
    assert [region.rule for region in found.regions] == ["sinks"]
    assert found.broken == f"The output is wrong wherever sinks are given (50 of 50 results); {end}"


def test_a_vacuous_result_inside_a_region_is_no_other_result() -> None:
    """Without keys, a right result with sinks shows nothing; it is not among the results without sinks either."""

    def judged(number: int, name: str, wrong: bool) -> CaseVerdict:
        features = result(1, wrong=wrong, sinks=number % 2 > 0)
        return verdict(number, replace(features, requests=(({name: True}, wrong),)))

    several = [
        *(judged(n, "partial_page", n % 2 > 0) for n in range(40)),
        *(judged(n, "no_keys", False) for n in (41, 42)),
    ]
    (region,) = diagnose(several).regions
    assert (region.rule, region.wrong, region.results) == ("sinks", 20, 20)
    assert (region.right_outside, region.outside) == (21, 21)
