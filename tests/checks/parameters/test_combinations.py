from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import lab.metadata
from lab import references
from lab.calls.problem import E4M3, AttentionCall
from lab.checks import Configuration, Level, Outcome, Ranges
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.circumstances import LAYOUTS, OF_SIZE, WINDOW
from lab.checks.parameters.coverage import tuples_by_outcome
from lab.checks.parameters.metadata_axes import METADATA, TWICE
from lab.checks.parameters.models import FAMILIES, MODELS
from lab.checks.parameters.paged_axes import MHA, VACUOUS
from lab.checks.parameters.paged_calls import attention_case
from lab.checks.parameters.ragged import ragged_case
from lab.checks.parameters.values import Bound, DtypePair, LongestRequest, Lse, Pages, Without
from lab.checks.properties.k18_combinations import CHECK
from lab.checks.run.judging import run_case
from lab.workloads.inputs.guards import same_bits
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction
from tests.checks.parameters.rounds import declined_if, verdicts_in_rounds
from tests.checks.small import SMALL

CPU = torch.device("cpu")


@pytest.mark.parametrize("interface", CHECK.interfaces)
def test_the_references_are_right_at_every_value_alone(interface: Interface) -> None:
    both: dict[str, Any] = {"windows": (False, True), "sinks": (False, True), "nvfp4": (False, True)}
    several: dict[str, Any] = {"dtypes": Ranges().dtypes, "kv_layouts": ("HND", "NHD"), "groups": (1, 3)}
    ranges = replace(SMALL, num_kv_heads=(1, 2), **both, **several)
    right = lab.metadata if interface in METADATA else references
    for case in CHECK.cases(interface, ranges, Level.SMOKE):
        judged = run_case(right, CHECK, case, CPU, ranges)
        assert judged.outcome is Outcome.RIGHT, (case, judged)


@pytest.mark.parametrize("interface", METADATA)
def test_metadata_of_empty_passes_is_right_at_the_full_level(interface: Interface) -> None:
    empty = [case for case in CHECK.cases(interface, Ranges(), Level.FULL) if case["requests"] == 0]
    assert bool(empty) == (interface is not MetadataFunction.MLA_PREFILL)
    for case in empty:
        judged = run_case(lab.metadata, CHECK, case, CPU, Ranges())
        assert judged.outcome is Outcome.RIGHT, (case, judged)


@pytest.mark.parametrize("interface", METADATA)
def test_metadata_of_shared_and_padded_rows_is_right_at_the_full_level(interface: Interface) -> None:
    """A request with the row of req_to_token of a longer one has all its tokens. Padding rows of a ragged verification are of
    the last request, also if padding requests without rows follow.
    """
    cases = [*CHECK.cases(interface, Ranges(), Level.FULL)]
    shared = [case for case in cases if case["table_rows"] == TWICE and isinstance(case["prefixes"], int)]
    padded = [case for case in cases if case["padding"].slot_length is not None and case["mode"] == "RAGGED_VERIFY"]
    assert shared
    assert padded or interface is MetadataFunction.MLA_PREFILL
    for case in (*shared[:5], *padded[:5]):
        for seed in (0, case["requests"] - 1):  # the first or the last request is the long one
            judged = run_case(lab.metadata, CHECK, replace(case, seed=seed), CPU, Ranges())
            assert judged.outcome is Outcome.RIGHT, (case, judged)


@pytest.mark.parametrize(("dtypes", "is_narrow"), [("int64", False), ("int32", True), ("int32 rows", False)])
def test_the_dtype_of_seq_lens_is_a_feature_of_metadata_that_must_not_change(dtypes: str, is_narrow: bool) -> None:
    case = Configuration(MetadataFunction.DSV4_METADATA, {"mode": "EXTEND", "dtypes": dtypes})
    results = run_case(lab.metadata, CHECK, case, CPU, Ranges()).results
    found = [result.features for result in results if result.name == "own tensors"]
    assert found
    assert all(("narrow_seq_lens" in each) is is_narrow for each in found)


@pytest.mark.parametrize("interface", [*FAMILIES])
def test_the_smoke_level_has_values_at_the_limits_of_a_dtype(interface: AttentionCall) -> None:
    cases = [*CHECK.cases(interface, Ranges(), Level.SMOKE)]
    axis = "dtype" if interface is AttentionCall.RAGGED_CONTEXT else "dtypes"
    large = [case for case in cases if case["bmm1_scale"] == "small for a large query"]
    assert any(case[axis].startswith("fp16") for case in large)
    assert not any(case[axis].startswith("e4m3") for case in large)
    for case in large[:2]:
        call = built_call(case, Ranges(), CPU)
        assert abs(call.given["query"]).max() > 2**12
        assert call.given["bmm1_scale"] < 2.0**-12
    if "shaded" in MODELS[interface](Ranges()).axes.get("contents", ()):
        found = [case for case in cases if (case["dtypes"], case["contents"]) == ("e4m3/e4m3", "shaded")]
        assert found
        assert not any(case["out"].is_e4m3(case["dtypes"]) for case in found if interface in MHA)


@pytest.mark.parametrize("interface", [*PAGED_CALLS, AttentionCall.RAGGED_CONTEXT, AttentionCall.DSV4_DECODE])
def test_heads_lie_apart_only_in_calls_of_several_heads(interface: Interface) -> None:
    for case in CHECK.cases(interface, Ranges(), Level.SMOKE):
        if case["query"] in ("heads apart", "heads first"):
            assert built_call(case, Ranges(), CPU).given["query"].shape[-2] > 1, case


@pytest.mark.parametrize("interface", CHECK.interfaces)
def test_the_smoke_level_has_every_value_of_every_axis(interface: Interface) -> None:
    model = MODELS[interface](Ranges())
    cases = list(CHECK.cases(interface, Ranges(), Level.SMOKE))
    for axis, values in model.axes.items():
        assert {case[axis] for case in cases} == set(values), axis


@pytest.mark.parametrize("interface", [*PAGED_CALLS, AttentionCall.RAGGED_CONTEXT])
@pytest.mark.parametrize("rows", [{"q_len": 1, "rows": "one each"}, {"q_len": 4, "rows": "unequal"}])
@pytest.mark.parametrize(
    "wanted",
    [{"lengths": 4_100}, {"requests": 1, "bound": Bound.OF_A_MODEL, "max_kv_len": Bound.OF_A_MODEL}],
)
def test_the_smoke_level_has_every_form_in_every_circumstance(
    interface: AttentionCall, rows: dict[str, Any], wanted: dict[str, Any]
) -> None:
    model = MODELS[interface](Ranges())
    wanted = {name: value for name, value in (wanted | rows).items() if value in model.axes.get(name, ())}
    cases = [case for case in CHECK.cases(interface, Ranges(), Level.SMOKE) if wanted.items() <= case.values.items()]
    cases = [case for case in cases if case.get("group", case.get("heads")) > 1]
    assert all(len(case.non_default) <= len(wanted) + 8 for case in cases)
    wanted |= {name: cases[0][name] for name in (*OF_SIZE, *LAYOUTS) if name in model.axes}
    for axis in {*model.axes} - {*wanted}:
        for value in model.axes[axis]:
            is_possible = model.completed({**wanted, axis: value}) is not None and (axis, value) not in model.vacuous
            assert (value in {case[axis] for case in cases}) == is_possible, (axis, value)
    windows = {case["longest_request"] for case in cases if case.get("window_left") == WINDOW}
    assert "window_left" not in model.axes or "requests" in wanted or windows == set(LongestRequest)


@pytest.mark.parametrize(
    ("interface", "first", "second"),
    [
        (AttentionCall.CONTEXT, ("dtypes", DtypePair("e4m3/e4m3")), "bmm2_scale"),
        (AttentionCall.CONTEXT, ("dtypes", DtypePair("bf16/nvfp4")), "cache"),
        (AttentionCall.MLA_DECODE, ("offsets", "unequal"), "max_q_len"),
        (MetadataFunction.MLA_METADATA, ("mode", "TARGET_VERIFY"), "host_lens"),
    ],
)
def test_the_smoke_level_has_all_values_of_some_parameters_with_a_value_of_its_own_code(
    interface: Interface, first: tuple[str, Any], second: str
) -> None:
    model, (axis, value) = MODELS[interface](Ranges()), first
    cases = [case for case in CHECK.cases(interface, Ranges(), Level.SMOKE) if case[axis] == value]
    possible = {each for each in model.axes[second] if model.completed({axis: value, second: each}) is not None}
    assert {case[second] for case in cases} == possible
    assert len(possible) > 1


def test_a_form_of_a_long_request_is_judged_though_others_are_declined() -> None:
    def is_declined(case: Configuration) -> bool:
        forms = {"sinks", "offsets", "out", "mask", "window_left"} & case.non_default.keys()
        is_long = case["lengths"] == min(SMALL.long_requests)
        has_lse = case["lse"] not in ("none", "given alone")
        return case["skip_softmax"] is not None or (is_long and (len(forms) > 1 or has_lse))

    verdicts = verdicts_in_rounds(declined_if(is_declined), Level.SMOKE)
    long = [verdict.case for verdict in verdicts if verdict.outcome is Outcome.RIGHT]
    long = [case for case in long if case["lengths"] == min(SMALL.long_requests) and case["group"] > 1]
    axes = MODELS[AttentionCall.DECODE](SMALL).axes
    for axis in ("sinks", "out", "mask", "window_left", "bmm1_scale", "bmm2_scale", "offsets", "block_tables"):
        assert {case[axis] for case in long} >= set(axes[axis]) - {Without.ALL}, axis
    assert {case["lse"] for case in long} == {"none", "given alone"}


@pytest.mark.parametrize("interface", CHECK.interfaces)
def test_the_full_level_has_every_pair_that_can_be_and_keys_to_attend_to(interface: Interface) -> None:
    ranges = replace(SMALL, num_kv_heads=(1, 2))
    model = MODELS[interface](ranges)
    cases = list(CHECK.cases(interface, ranges, Level.FULL))
    covered = {each for case in cases for each in model.tuples_of(dict(case.values))}
    missing = [goal for goal in model.tuples() if goal not in covered]
    assert all(model.completed(dict(goal)) is None for goal in missing)
    assert len(missing) < 0.02 * len(covered)
    for case in cases if interface in (*MHA, AttentionCall.MLA_DECODE, AttentionCall.RAGGED_CONTEXT) else ():
        if VACUOUS.isdisjoint(case.values.items()):
            of = ragged_case(case) if interface is AttentionCall.RAGGED_CONTEXT else attention_case(case, ranges)
            assert any(q_len and kv_len for q_len, kv_len in zip(of.q_lens, of.kv_lens, strict=True)), case
            assert case.get("pages") != Pages.TWICE or max(of.kv_lens) > case["page_size"], case


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_a_narrowed_axis_has_its_values_alone(interface: Interface) -> None:
    model = MODELS[interface](SMALL)
    sizes = {"groups": "group", "page_sizes": "page_size", "head_dims": "head_dim"}
    if interface is AttentionCall.MLA_DECODE:
        sizes = {"mla_heads": "heads", "mla_page_sizes": "page_size"}
    for of_ranges, axis in sizes.items():
        assert tuple(model.axes[axis]) == getattr(SMALL, of_ranges)


def test_a_text_is_read_as_the_declared_value_and_written_again() -> None:
    assert repr(Configuration(AttentionCall.DECODE)) == "Configuration(AttentionCall.DECODE, {})"
    case = Configuration(AttentionCall.DECODE, {"lse": "strided", "dtypes": "fp16/e4m3", "lengths": 700})
    assert case["lse"] is Lse.STRIDED
    assert (case["dtypes"].query, case["dtypes"].cache) == (torch.float16, E4M3)
    assert (
        repr(case) == "Configuration(AttentionCall.DECODE, {'dtypes': 'fp16/e4m3', 'lengths': 700, 'lse': 'strided'})"
    )
    # Outside the default ranges, which the user's may be.
    dims = Configuration(AttentionCall.MLA_DECODE, {"head_dims": "9/8"})["head_dims"]
    assert (dims.head_dim, dims.v_head_dim) == (9, 8)


def test_an_axis_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="trtllm_batch_decode_with_kv_cache has no axis 'heads'"):
        Configuration(AttentionCall.DECODE, {"heads": 4})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4)[::4],
        lambda: torch.zeros(()),
        lambda: torch.zeros(3, 4)[:, :2],
        lambda: torch.zeros(64, dtype=torch.uint8),
        lambda: torch.zeros(65, dtype=torch.uint8),
        lambda: torch.zeros(73, dtype=torch.uint8)[1:65],
        lambda: torch.full((8,), float("nan"), dtype=torch.bfloat16),
    ],
)
def test_a_changed_input_shows_whatever_its_strides_and_size(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    before = tensor.clone()
    assert same_bits(tensor, before)
    (tensor[..., -1:] if tensor.dim() else tensor).fill_(1.0)  # its last elements
    assert not same_bits(tensor, before)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_an_empty_input_is_not_changed_wherever_it_lies(offset: int) -> None:
    tensor = torch.zeros(9, dtype=torch.bfloat16)[offset:offset]
    assert same_bits(tensor, tensor.clone())


def test_the_quick_level_judges_each_value_also_of_a_kernel_that_declines_some() -> None:
    is_declined = declined_if(lambda case: case["group"] * case["num_kv_heads"] == 4 or case["lse"] == "returned")
    of_quick, of_smoke = (verdicts_in_rounds(is_declined, level) for level in (Level.QUICK, Level.SMOKE))
    judged_by_quick, judged_by_smoke = (
        tuples_by_outcome(MODELS[AttentionCall.DECODE](SMALL), verdicts)[0] for verdicts in (of_quick, of_smoke)
    )
    values = {each for each in judged_by_smoke if len(each) == 1}
    assert values <= judged_by_quick  # together with other values, a value may be taken that is declined alone
    first = len(list(CHECK.cases(AttentionCall.DECODE, SMALL, Level.QUICK)))
    assert first < len(of_smoke) / 3
    assert len({repr(verdict.case) for verdict in of_quick}) == len(of_quick)


@pytest.mark.parametrize(("takes", "fewest"), [("", 5), ("e4m3/", 30)])
def test_the_quick_level_has_several_cases_of_e4m3_queries_for_a_kernel_that_takes_them(
    takes: str, fewest: int
) -> None:
    ranges = Ranges(long_requests=(4_100,))
    is_declined = declined_if(lambda case: not case["dtypes"].startswith(takes))
    verdicts = verdicts_in_rounds(is_declined, Level.QUICK, ranges=ranges)
    with_e4m3 = [each.case for each in verdicts if each.case["dtypes"] == "e4m3/e4m3"]
    assert len(with_e4m3) >= fewest
    assert {case["page_size"] for case in with_e4m3} >= set(ranges.page_sizes)
    assert {case["head_dim"] for case in with_e4m3} >= set(ranges.head_dims)
