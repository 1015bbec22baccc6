import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall, mask_words
from lab.checks import Configuration, Ranges
from lab.checks.case_run import CaseRun
from lab.checks.parameters.calls import built_call, judge_call
from lab.checks.parameters.models import MODELS
from lab.checks.parameters.paged_axes import paged_model
from lab.checks.parameters.paged_calls import attention_case, fitted, rows_of_prompts
from lab.checks.parameters.ragged import ragged_case
from lab.checks.parameters.values import (
    Lengths,
    LongestRequest,
)
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import PAGED_CALLS, Interface
from tests.checks.small import SMALL, decoding

CPU = torch.device("cpu")
HEADS = 3
DECODE, CONTEXT, MLA, RAGGED = PAGED_AND_RAGGED = (
    AttentionCall.DECODE,
    AttentionCall.CONTEXT,
    AttentionCall.MLA_DECODE,
    AttentionCall.RAGGED_CONTEXT,
)
PAGED = (DECODE, CONTEXT, MLA)
IN_THE_MIDDLE: dict[str, Any] = {"requests": 3, "longest_request": "in the middle", "offsets": "none last"}
PLAIN: dict[str, Any] = {"dtypes": "bf16/bf16", "out": "none"}


def judged(interface: Interface = DECODE, **values: Any) -> tuple[dict[str, Any], Any]:
    """Return the arguments of the call that a configuration makes, and what the references return, which is right."""
    seen: dict[str, Any] = {}

    def function(**arguments: Any) -> Any:
        seen["arguments"] = arguments
        seen["returned"] = getattr(references, interface.value)(**arguments)
        return seen["returned"]

    run = CaseRun(SimpleNamespace(**{interface.value: function}), Configuration(interface, values), torch.device("cpu"))
    judge_call(run)
    assert not run.wrongs
    return seen["arguments"], seen["returned"]


def ragged(**values: Any) -> Configuration:
    return Configuration(RAGGED, values)


def paged(**values: Any) -> AttentionCase:
    return attention_case(Configuration(DECODE, {"offsets": "equal", **values}), Ranges())


def arguments_of(**values: Any) -> dict[str, Any]:
    return judged(RAGGED, **values)[0]


def described(value: Any) -> Any:
    """Return what two arguments have in common that are the same."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return value.dtype, value.shape, value.stride(), value.storage_offset(), bits
    if isinstance(value, list | tuple):
        return type(value), *map(described, value)
    return repr(value)


@pytest.mark.parametrize("interface", PAGED_AND_RAGGED)
def test_every_value_alone_makes_another_call(interface: Interface) -> None:
    ranges = replace(SMALL, windows=(False, True), sinks=(False, True), q_lens=(1, 4))  # two rows have no other tree
    points: list[Any] = []
    for point in MODELS[interface](ranges).alone():
        # An output in bfloat16 is as all are, and values of two axes that need each other are one point.
        points += [point] if point["out"] != "given bf16" and point not in points else []
    seen = set()
    for point in points:
        given = built_call(Configuration(interface, point), ranges, torch.device("cpu")).given
        seen.add(tuple((name, described(given[name])) for name in sorted(set(given) - {"workspace_buffer"})))
    assert len(seen) == len(points)


@pytest.mark.parametrize("sinks", ["none", "per head"])
def test_a_row_that_its_mask_and_its_request_leave_without_a_key_has_the_sinks_lse(sinks: str) -> None:
    arguments, (out, lse) = judged(q_len=4, mask="own bit clear", sinks=sinks, group=HEADS, lse="returned")
    assert int(arguments["seq_lens"][0]) == 4
    assert int(arguments["seq_lens"][1:].min()) >= 4
    assert arguments["mask"].to(torch.int32)[..., 0].tolist() == [[0, 0b1, 0b11, 0b111]] * 3
    assert not out[0].any()
    expected = torch.full((HEADS,), -math.inf) if sinks == "none" else arguments["sinks"] * math.log2(math.e)
    torch.testing.assert_close(lse[0], expected)


@pytest.mark.parametrize("q_len", [2, 20, 40])
def test_all_bits_after_the_draft_are_set(q_len: int) -> None:
    words = judged(q_len=q_len, mask="bits after the draft")[0]["mask"].to(torch.int32)
    plain = judged(q_len=q_len, mask="tree")[0]["mask"].to(torch.int32)
    bits, own = (((each.unsqueeze(-1) >> torch.arange(16)) & 1).flatten(2) for each in (words, plain))
    assert bits.shape[-1] == 16 * mask_words(q_len)
    assert torch.equal(bits[..., :q_len], own[..., :q_len])
    assert bits[..., q_len:].all()
    assert not own[..., q_len:].any()


@pytest.mark.parametrize("interface", PAGED)
@pytest.mark.parametrize("page_size", [32, 128])
def test_a_request_of_several_pages_has_its_last_twice(interface: Interface, page_size: int) -> None:
    arguments, _ = judged(interface, page_size=page_size, pages="the last twice")
    for cells, kv_len in zip(arguments["block_tables"].tolist(), arguments["seq_lens"].tolist(), strict=True):
        named = cells[: -(-kv_len // page_size)]
        assert len(named) >= 2
        assert named[-1] == named[-2]
        assert len(set(named)) == len(named) - 1


@pytest.mark.parametrize("q_lens", [(2, 2, 2), (1, 2, 1), (0, 0, 17), (5, 1, 17)])
def test_fewer_keys_than_rows_are_some_of_every_request_of_several_rows(q_lens: tuple[int, ...]) -> None:
    for q_len, kv_len in zip(q_lens, fitted(q_lens, q_lens, Lengths.FEWER), strict=True):
        assert min(q_len - 1, 1) <= kv_len < q_len or q_len == kv_len == 0


@pytest.mark.parametrize("interface", PAGED)
def test_strides_an_element_apart_are_no_whole_loads(interface: Interface) -> None:
    for form, axis in (("pages an element apart", 0), ("tokens an element apart", -2)):
        cache = judged(interface, cache=form)[0]["kv_cache"]
        for side in (cache,) if isinstance(cache, torch.Tensor) else cache:
            assert side.stride(axis) * side.element_size() % 16
            assert side.stride(axis) % 16


@pytest.mark.parametrize(("kv_layout", "tokens"), [("HND", 2), ("NHD", 1)])
def test_a_cache_has_gaps_after_what_its_name_says(kv_layout: str, tokens: int) -> None:
    for form, axis in (("pages apart", 0), ("tokens apart", tokens), ("heads apart", 3 - tokens)):
        for side in judged(cache=form, kv_layout=kv_layout, num_kv_heads=2)[0]["kv_cache"]:
            dense = [side.stride(each + 1) * side.shape[each + 1] for each in range(3)]
            assert [each for each in range(3) if side.stride(each) != dense[each]] == [axis]


def test_lengths_are_what_their_names_say() -> None:
    plain = ragged_case(ragged())
    assert plain.q_lens == (5, 1, 17)
    assert all(kv_len >= rows for kv_len, rows in zip(plain.kv_lens, plain.q_lens, strict=True))
    assert ragged_case(ragged(lengths="as rows")).kv_lens == plain.q_lens
    assert ragged_case(ragged(lengths="fewer than rows")).kv_lens == (4, 0, 16)
    assert ragged_case(ragged(lengths="none first")).kv_lens[0] == 0
    assert ragged_case(ragged(lengths="none twice")).kv_lens[:2] == (0, 0)
    assert ragged_case(ragged(offsets="none twice")).q_lens == (0, 0, 17)
    many = ragged_case(ragged(requests=257))
    assert (len(many.q_lens), len(set(many.kv_lens)) > 40) == (257, True)
    assert paged(offsets="none in the middle").q_lens == (1, 0, 1)
    assert paged(lengths="none but the first").kv_lens[1:] == (0, 0)


@pytest.mark.parametrize("interface", [*PAGED_CALLS, RAGGED])
@pytest.mark.parametrize(("count", "lengths", "least"), [(3, 4_100, 4_100), (3, None, 130), (40, None, 130)])
def test_the_longest_requests_are_at_their_places(
    interface: AttentionCall, count: int, lengths: int | None, least: int
) -> None:
    assert [list(place.requests(3)) for place in LongestRequest] == [[2], [0], [1], [0, 2], [1, 2]]
    for place in LongestRequest:
        given = {"requests": count, "longest_request": place, **({"lengths": lengths} if lengths else {})}
        case = Configuration(interface, given, seed=2)
        if interface is RAGGED:
            kv_lens = ragged_case(case).kv_lens
        else:
            kv_lens = attention_case(case, SMALL).kv_lens
            least = 600 if count > 3 else least
        places = list(place.requests(count))
        assert [request for request, kv_len in enumerate(kv_lens) if kv_len >= least] == places[::2]
        assert all(least // 2 <= kv_lens[request] < least for request in places[1::2])
        assert max(kv_len for request, kv_len in enumerate(kv_lens) if request not in places) <= 128


def test_strides_are_what_their_names_say() -> None:
    found = arguments_of(kv="of one tensor")
    key, value = found["key"], found["value"]
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert key.stride() == value.stride() == (2 * (192 + 128), 192 + 128, 1)
    found = arguments_of(kv="V of a projection")
    assert found["key"].is_contiguous()
    assert found["value"].stride() == (2 * (96 + 128), 96 + 128, 1)
    assert arguments_of(kv="heads first")["key"].stride(0) == 192
    assert not arguments_of(query="heads apart")["query"].is_contiguous()


@pytest.mark.parametrize("interface", PAGED_AND_RAGGED)
def test_the_last_row_of_a_far_argument_begins_2_31_elements_after_the_first(interface: AttentionCall) -> None:
    plain = judged(interface)[0]
    far = [each for each in MODELS[interface](Ranges()).axes["far"] if each != "nothing"]
    expected = {"query"} | ({"lse"} if interface is not MLA else set())
    assert set(far) == expected | ({"block_tables"} if interface in PAGED else set())
    for name in far:
        given = judged(interface, far=name, lse="given" if name == "lse" else "none")[0]
        assert (len(given[name]) - 1) * given[name].stride(0) >= 2**31
        others = [each for each in ("query", "block_tables") if each != name and each in plain]
        assert [given[each].stride() for each in others] == [plain[each].stride() for each in others]


def test_a_far_argument_has_several_rows() -> None:
    model = paged_model(DECODE, Ranges())
    for point in model.covering(goals=[(("far", name),) for name in model.axes["far"]]):
        assert point["far"] == "nothing" or point["requests"] > 1


# Values that no call has together.
NEVER: list[tuple[AttentionCall, dict[str, Any]]] = [
    # The value of a key that shades others would be its logit, and so large that an output shows nothing else.
    (MLA, {"head_dims": "64/64", "contents": "shaded"}),
    *((each, {"cache": "K is V", "contents": "shaded"}) for each in (DECODE, CONTEXT)),
    # A longest request has rows and keys.
    *((each, {"longest_request": "first", "offsets": "none first"}) for each in (DECODE, RAGGED)),
    *((each, {"longest_request": "first and last", "lengths": "none last"}) for each in (DECODE, RAGGED)),
    *((each, {"longest_request": "in the middle", "requests": 1}) for each in (DECODE, RAGGED)),
    *((each, {"longest_request": "all but the first", "requests": 257}) for each in (DECODE, RAGGED)),
    *((each, IN_THE_MIDDLE | {"lengths": "none in the middle"}) for each in (DECODE, RAGGED)),
    # A far argument may lie apart.
    (DECODE, {"far": "query", "query": "rows apart"}),
    (DECODE, {"far": "lse", "lse": "strided"}),
    (DECODE, {"far": "block_tables", "block_tables": "rows apart"}),
    (DECODE, {"far": "block_tables", "head_pages": "half"}),
    (MLA, {"far": "block_tables", "top_k": 132, "entries": "random"}),
    # Below the limit of a grid, as many pairs of rows and heads would only take the interpreter minutes.
    (RAGGED, {"requests": 297, "group": 32}),
    # Results of few bits or with sinks do not hold some numbers.
    (DECODE, PLAIN | {"bmm1_size": 16.0, "sinks": "per head"}),
    (DECODE, PLAIN | {"bmm1_size": 1.0, "dtypes": "e4m3/e4m3"}),
    (DECODE, PLAIN | {"bmm1_size": 1e-6, "contents": "shaded"}),
    (DECODE, PLAIN | {"bmm2_size": 1e-6, "dtypes": "fp16/fp16"}),
    (DECODE, PLAIN | {"bmm2_size": 300.0, "out": "dtype e4m3"}),
    (DECODE, PLAIN | {"bmm2_size": 1.0, "bmm2_scale": "1 as a whole number"}),
    (DECODE, PLAIN | {"o_scale": 300.0}),
    (RAGGED, {"bmm1_size": 1.0, "dtype": "e4m3"}),
    (RAGGED, {"bmm2_size": 300.0, "dtype": "fp16", "out": "none"}),
    # Lengths on the host have no padding.
    (RAGGED, {"padding": "keys", "mirrors": "int32"}),
    # int8 keys lie apart from values, and no request is empty.
    (RAGGED, {"sage": "int8, 16 keys", "kv": "of one tensor"}),
    (RAGGED, {"sage": "int8, 16 keys", "kv": "V of a projection"}),
    (RAGGED, {"sage": "int8, 16 keys", "lengths": "fewer than rows"}),
]
SOMETIMES: list[tuple[AttentionCall, dict[str, Any]]] = [
    (MLA, {"head_dims": "80/64", "contents": "shaded"}),
    *((each, {"cache": "one tensor", "contents": "shaded"}) for each in (DECODE, CONTEXT)),
    *((each, IN_THE_MIDDLE | {"lengths": "none first"}) for each in (DECODE, RAGGED)),
    *((each, {"longest_request": "first", "offsets": "none at all"}) for each in (DECODE, RAGGED)),
    *((each, {"requests": 1037, "group": 64, "head_dim": 64}) for each in (DECODE, CONTEXT)),
    (MLA, {"requests": 1037, "heads": 64}),
    (RAGGED, {"requests": 1037, "group": 32}),
    (DECODE, {"bmm2_size": 300.0, "dtypes": "bf16/e4m3", "out": "given fp32"}),
    *(
        (RAGGED, values)
        for values in ({"kv": "of one tensor"}, {"kv": "V of a projection"}, {"lengths": "fewer than rows"})
    ),
]


@pytest.mark.parametrize(
    ("interface", "values", "is_possible"),
    [*((*row, False) for row in NEVER), *((*row, True) for row in SOMETIMES)],
    ids=str,
)
def test_a_model_has_the_calls_that_can_be(interface: AttentionCall, values: dict[str, Any], is_possible: bool) -> None:
    read = Configuration(interface, values)
    found = MODELS[interface](Ranges()).completed({name: read[name] for name in values})
    assert (found is not None) == is_possible


def test_the_largest_ragged_batch_has_more_rows_and_heads_than_16_bits_count() -> None:
    point = MODELS[RAGGED](Ranges()).completed({"requests": 1037, "group": 32}) or {}
    rows = sum(rows_of_prompts(Configuration(RAGGED, point, 1)))
    assert rows * point["num_kv_heads"] * point["group"] > 65_535


def number_of(scale: Any) -> float:
    return float(scale.item()) if isinstance(scale, torch.Tensor) else float(scale)


@pytest.mark.parametrize("interface", PAGED_AND_RAGGED)
@pytest.mark.parametrize("name", ["bmm1", "bmm2"])
def test_a_scale_has_exactly_its_size_and_the_sign_of_its_form(interface: AttentionCall, name: str) -> None:
    model = MODELS[interface](Ranges())
    assert {1.0, 1e-6} < set(model.axes[f"{name}_size"])
    for form in model.axes[f"{name}_scale"]:
        for size in model.axes[f"{name}_size"]:
            values = {f"{name}_scale": form, f"{name}_size": size}
            if size == "usual" or not model.fits(model.default | values):
                continue
            given = judged(interface, **values)[0]
            found = number_of(given[f"{name}_scale"])
            if "log2" in str(form):
                found = number_of(given["bmm1_scale_log2"]) / math.log2(math.e)
            is_exact = isinstance(given[f"{name}_scale"], float) and "log2" not in str(form)
            assert found == pytest.approx(math.copysign(size, form.factor), rel=0 if is_exact else 1e-6)


def test_padding_lies_after_the_last_offset_and_lengths_on_the_host_have_none() -> None:
    found = arguments_of(padding="rows and keys")
    assert int(found["cum_seq_lens_q"][-1]) == len(found["query"]) - 3
    assert int(found["cum_seq_lens_kv"][-1]) == len(found["key"]) - 3
    found = arguments_of(padding="rows and keys of NaN")
    for name, of in (("query", "q"), ("key", "kv"), ("value", "kv")):
        end = int(found[f"cum_seq_lens_{of}"][-1])
        assert found[name][:end].isfinite().all()
        assert found[name][end:].isnan().all()
        assert len(found[name]) == end + 3
    found = arguments_of(mirrors="int64")
    assert found["q_seq_lens_cpu"].tolist() == found["cum_seq_lens_q"].diff().tolist()


@pytest.mark.parametrize(("dtype", "out_dtype"), [("e4m3", torch.bfloat16), ("fp16", torch.float16)])
def test_an_output_that_the_call_makes_has_the_documented_dtype(dtype: str, out_dtype: torch.dtype) -> None:
    def function(**arguments: Any) -> Any:
        return references.trtllm_ragged_attention_deepseek(**arguments).to(torch.float32)

    other = SimpleNamespace(trtllm_ragged_attention_deepseek=function)
    run = CaseRun(other, ragged(dtype=dtype), torch.device("cpu"))
    judge_call(run)
    assert run.wrongs == [f"the output is torch.float32, not {out_dtype}"]


@pytest.mark.parametrize("side", [0, 1])
def test_a_write_to_scale_factors_is_wrong(side: int) -> None:
    def kernel(**arguments: Any) -> Any:
        returned = references.trtllm_batch_decode_with_kv_cache(**arguments)
        arguments["kv_cache_sf"][side].view(torch.uint8).add_(1)
        return returned

    values = {"dtypes": "bf16/nvfp4", "group": 2, "head_dim": 64, "page_size": 16}
    run = CaseRun(decoding(kernel), Configuration(DECODE, values), torch.device("cpu"))
    judge_call(run)
    assert any(f"kv_cache_sf[{side}]" in sentence for sentence in run.wrongs)


def test_what_a_kernel_must_not_use_is_not_what_it_must_use() -> None:
    query = judged(CONTEXT, lengths="none first")[0]["query"]
    assert query[:5].isnan().all()  # rows of a request without keys
    assert query[5:].isfinite().all()
    sinks = judged(group=4, sinks="some minus infinity")[0]["sinks"]
    assert sinks.isneginf().tolist() == [True, False] * (len(sinks) // 2)
    scales = judged(bmm1_scale="log2 tensor [1]")[0]
    assert scales["bmm1_scale"] == 2.0
    assert scales["bmm1_scale_log2"].item() == pytest.approx(0.75 * 64**-0.5 * math.log2(math.e))


def test_logits_below_zero_are_so_far_apart_that_exp_of_a_difference_overflows() -> None:
    given = arguments_of(contents="below zero", lengths="longer")
    keys = given["key"][: int(given["seq_lens"][0]), 0].float()
    logits = keys @ given["query"][0, 0].float() * given["bmm1_scale"]
    assert float(logits.max()) < -87
    assert float(logits.max() - logits.min()) > 88.7


def test_a_block_sparse_call_has_the_bound_and_the_lengths_of_its_heads() -> None:
    arguments, _ = judged(num_kv_heads=2, head_pages="last", lengths=4096, bound="exact", seq_lens="amid others")
    lengths = arguments["seq_lens"]
    assert tuple(lengths.shape) == (2, 3)
    assert arguments["max_seq_len"] == int(lengths.max()) <= 16  # a page, of 4,096 keys
    assert arguments["block_tables"].shape[:2] == (2, 3)
    assert "backend" not in arguments
    of_nvfp4, _ = judged(num_kv_heads=2, head_pages="half", dtypes="bf16/nvfp4")
    assert (
        of_nvfp4["backend"] == "trtllm-gen"
    )  # XQA, of whose order a plain call's scale factors are, is not block-sparse


@pytest.mark.parametrize("interface", [each for each in MODELS if isinstance(each, AttentionCall)])
def test_a_kernel_that_changes_its_query_does_not_change_the_expected_result(interface: AttentionCall) -> None:
    name = interface.value

    def negating(**arguments: Any) -> Any:
        arguments["query"].neg_()
        return getattr(references, name)(**arguments)

    run = CaseRun(SimpleNamespace(**{name: negating}), Configuration(interface, {}, 1), CPU, Ranges())
    judge_call(run)
    assert any("vectors are wrong" in wrong for wrong in run.wrongs), run.wrongs
    assert any("query" in wrong for wrong in run.wrongs)
