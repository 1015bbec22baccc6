"""Features of cases and calls, each in a call that has it, and the results that a case notes with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import DecodeCall, MLADecodeCall
from lab.calls.problem import AttentionCall
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.checks import AttentionCase, ForwardCase, explain
from lab.checks.case_run import CaseRun
from lab.checks.explain.call_features import (
    TILE,
    CallFeatures,
    CallLog,
    _read_batch,
    _read_call,
    _read_pages,
    _read_request,
    _read_rows,
    _read_selections,
    features_of_call,
    features_of_case,
    kept,
)
from lab.checks.explain.feature import CaseFeature, Choice, Condition, Number, of_any_request
from lab.checks.explain.features import FEATURES, UnknownFeatureError, feature_named
from lab.checks.parameters.models import Configuration
from lab.checks.properties import checks
from lab.checks.properties.check import Level
from lab.checks.run.judging import run_case
from lab.metadata import ForwardMode
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.workloads.attention_case import Contents, HeadPages
from tests.cases import latent_batch, mla_arguments, ragged_arguments, ragged_batch, sparse_arguments
from tests.checks.small import SMALL
from tests.dataclass_rules import broken_rules

FEW_ROWS = "no_more_rows_than_requests"
CASE = AttentionCase(AttentionCall.DECODE, (20, 0, 32), (2, 2, 2), num_kv_heads=1, group=3, window_left=5)
CPU = torch.device("cpu")


def arguments_of(case: AttentionCase) -> dict[str, Any]:
    return CaseRun(references, case, CPU).build().arguments()


def read(case: AttentionCase, **changes: Any) -> dict[str, Any]:
    return dict(features_of_call(case.interface, arguments_of(case) | changes, CallLog()).features)


def test_a_plain_call_has_these_features_and_no_others() -> None:
    assert read(AttentionCase(AttentionCall.DECODE, (20,), (1,), num_kv_heads=1, group=4)) == {
        "function": "decode",
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "kv_layout": "HND",
        "head_dim": 64,
        "v_head_dim": 64,
        "num_kv_heads": 1,
        "num_qo_heads": 4,
        "group": 4,
        "out_dtype": "bf16",
        "table_columns": 5,
        "pool_pages": 8,
        "pool_elements": 8 * 16 * 64,
        "calls_before": 0,
        "page_size": 16,
        "requests": 1,
        FEW_ROWS: True,
        "rows_of_batch": 1,
        "longest_kv_len": 20,
    }


PLAIN = AttentionCase(AttentionCall.DECODE, (40, 24), (2, 2), num_kv_heads=2, group=2)
CONTEXT = replace(PLAIN, interface=AttentionCall.CONTEXT)
ARGUMENTS = {each.interface: arguments_of(each) for each in (PLAIN, CONTEXT)}


def of(name: str) -> Any:
    return ARGUMENTS[AttentionCall.DECODE][name]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in rows with gaps."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same pages with gaps between them."""
    return torch.stack([tensor, tensor], dim=1)[:, 0]


def rows_apart(tensor: torch.Tensor, num_elements: int) -> torch.Tensor:
    """The same rows, each `num_elements` after the one before it, in memory that is virtual between them."""
    _, *strides = tensor.stride()
    return torch.empty_strided(tensor.shape, (num_elements, *strides), dtype=tensor.dtype).copy_(tensor)


def packed(*rows: int) -> torch.Tensor:
    """A mask of two requests of two rows, each given by its first word."""
    return torch.tensor([[row, 0] for row in rows], dtype=torch.int32).to(torch.uint16).view(2, 2, 2)


K, V = ARGUMENTS[AttentionCall.DECODE]["kv_cache"]
FOUR = torch.zeros(4)
NUMBERS = (("==", 1.25), (">=", 0), ("<=", 1.25))  # the tests of a number, and what they cost besides its thresholds


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"mask": packed(1, 3, 1, 3)}, {"mask": True, "mask_words": 2}),
        ({"mask": packed(3, 3, 3, 3)}, {"mask": True, "mask_words": 2, "mask_not_causal": True}),
        ({"mask": packed(1, 3, 3, 3)}, {"mask": True, "mask_words": 2, "mask_not_causal": True, "masks_differ": True}),
        ({"sinks": FOUR}, {"sinks": True}),
        ({"sinks": torch.tensor([0, -math.inf, 8, 0])}, {"sinks": True, "some_inf_sink": True}),
        ({"sinks": torch.tensor([0, 0, 8.1, 0])}, {"sinks": True, "large_sink": True}),
        ({"sinks": FOUR - math.inf}, {"sinks": True, "some_inf_sink": True, "all_inf_sinks": True}),
        ({"bmm1_scale": torch.tensor([0.125])}, {"bmm1_scale_tensor": True}),
        ({"bmm1_scale": -0.125}, {"bmm1_scale_negative": True, "bmm1_scale_unusual": True}),
        ({"bmm1_scale": 0.126}, {"bmm1_scale_unusual": True}),
        ({"bmm1_scale": 1.0}, {"bmm1_scale_unusual": True, "bmm1_scale_1": True}),
        ({"bmm1_scale": 1.1}, {"bmm1_scale_unusual": True, "bmm1_scale_large": True}),
        ({"bmm1_scale": -1.1}, {"bmm1_scale_unusual": True, "bmm1_scale_large": True, "bmm1_scale_negative": True}),
        ({"bmm1_scale": 0.001}, {"bmm1_scale_unusual": True}),
        ({"bmm1_scale": -9e-4}, {"bmm1_scale_unusual": True, "bmm1_scale_small": True, "bmm1_scale_negative": True}),
        ({"bmm1_scale_log2": torch.tensor([0.125 / math.log(2)])}, {"bmm1_scale_log2_given": True}),
        ({"bmm2_scale": torch.tensor([1.0])}, {"bmm2_scale_tensor": True}),
        ({"bmm2_scale": 0.5}, {"bmm2_scale_not_1": True}),
        ({"bmm2_scale": 3}, {"bmm2_scale_not_1": True, "bmm2_scale_no_power_of_2": True}),
        ({"bmm2_scale": 0.0}, {"bmm2_scale_not_1": True, "bmm2_scale_no_power_of_2": True, "bmm2_scale_small": True}),
        ({"bmm2_scale": 0.001}, {"bmm2_scale_not_1": True, "bmm2_scale_no_power_of_2": True}),
        ({"bmm2_scale": 2.0**-9}, {"bmm2_scale_not_1": True}),
        (
            {"bmm2_scale": -(2.0**-10)},
            {"bmm2_scale_not_1": True, "bmm2_scale_small": True, "bmm2_scale_negative": True},
        ),
        ({"bmm2_scale": 100}, {"bmm2_scale_not_1": True, "bmm2_scale_no_power_of_2": True}),
        ({"bmm2_scale": -128.0}, {"bmm2_scale_not_1": True, "bmm2_scale_large": True, "bmm2_scale_negative": True}),
        ({"bmm2_scale": -1.0}, {"bmm2_scale_not_1": True, "bmm2_scale_negative": True}),
        ({"out": torch.empty(4, 4, 64, dtype=torch.bfloat16)}, {"out_given": True}),
        ({"out_dtype": torch.float16}, {"out_dtype": "fp16", "other_out_dtype": True}),
        ({"return_lse": True}, {"return_lse": True}),
        ({"lse": torch.empty(4, 4), "return_lse": True}, {"lse_given": True, "return_lse": True}),
        (
            {"lse": widened(torch.empty(4, 4)), "return_lse": True},
            {"lse_given": True, "return_lse": True, "lse_gaps": True},
        ),
        ({"seq_lens": of("seq_lens").to(torch.uint32)}, {"seq_lens_uint32": True}),
        ({"query": widened(of("query"))}, {"query_gaps": True}),
        ({"block_tables": widened(of("block_tables"))}, {"block_tables_gaps": True}),
        ({"block_tables": of("block_tables")[:1].expand(2, -1).contiguous()}, {"one_first_page": True}),
        (
            {"kv_cache": (apart(K), apart(V))},
            {"page_gaps": True, "pool_elements": 2 * K.numel()},
        ),
        ({"kv_cache": (K, apart(V))}, {"other_v_strides": True}),
        ({"kv_cache": (K, widened(V))}, {"other_v_strides": True}),
        (
            {"kv_cache": torch.stack([K, V], dim=1)},
            {"one_cache_tensor": True, "page_gaps": True, "pool_elements": 2 * K.numel()},
        ),
        (
            {
                "block_tables": of("block_tables").unsqueeze(1).repeat(1, 2, 1),
                "uses_shared_paged_kv_idx": False,
            },
            {"separate_tables": True},
        ),
        (
            {"q_len_per_req": None, "max_q_len": 2, "cum_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32)},
            {"cum_seq_lens_q_given": True},
        ),
        (
            {"q_len_per_req": None, "max_q_len": 3, "cum_seq_lens_q": torch.tensor([0, 0, 3], dtype=torch.int32)},
            {"cum_seq_lens_q_given": True, "padding_rows": True}
            | {"rows_of_batch": 3, "unequal_q_lens": True, "some_no_rows": True},
        ),
        (
            {"kv_cache": (widened(K), widened(V))},
            {"page_gaps": True, "gaps_in_pages": True, "pool_elements": 2 * K.numel()},
        ),
        ({"window_left": 0}, {"has_window": True, "window_left": 0}),
    ],
)
def test_an_argument_adds_its_features(changes: dict[str, Any], features: dict[str, Any]) -> None:
    assert read(PLAIN, **changes) == read(PLAIN) | features


@pytest.mark.parametrize(
    ("name", "num_elements", "features"),
    [
        ("query", 2**31 // 3, {"query_gaps"}),
        ("query", 2**31 // 3 + 1, {"query_gaps", "query_far"}),
        ("block_tables", 2**31, {"block_tables_gaps", "block_tables_far"}),
        ("lse", 2**30, {"lse_given", "lse_gaps", "lse_far"}),
    ],
)
def test_rows_far_apart_are_a_feature(name: str, num_elements: int, features: set[str]) -> None:
    # Made here, not at import: a process that keeps 29 GB of virtual memory cannot be forked.
    near: dict[str, Any] = {"return_lse": True, "lse": torch.empty(4, 4)} if name == "lse" else {name: of(name)}
    changes = near | {name: rows_apart(near[name], num_elements)}
    plain = {"return_lse": True} if name == "lse" else {}
    assert read(PLAIN, **changes) == read(PLAIN, **plain) | dict.fromkeys(features, True)


def test_each_value_that_is_read_has_a_text_and_each_text_a_value() -> None:
    arguments = ARGUMENTS[AttentionCall.DECODE] | {"sinks": FOUR, "mask": packed(1, 3, 1, 3), "q_len_per_req": 2}
    of_call = _read_call(AttentionCall.DECODE, arguments, DecodeCall(**arguments).problem())
    sparse = MLADecodeCall(**sparse_arguments(latent_batch([2], [5]), [[0, -1, 3, 1]] * 2)).problem()
    of_rank = replace(sparse, num_visible=torch.ones(2, dtype=torch.int32))
    of_sparse = _read_call(AttentionCall.MLA_DECODE, {}, of_rank)
    (of_selection,) = _read_selections(sparse)
    of_lengths = _read_request(0, (1,), 1, 16, -1) | _read_batch((1,), (1,), 16, -1) | next(_read_rows((1,), 1))
    names = [*FEATURES]
    of_cases = names[names.index("contents") : names.index("later_call")]
    assert (of_call | of_sparse | of_selection | of_lengths | CallLog().read(arguments)).keys() == {*FEATURES} - {
        *of_cases,
        "result",
    }


def test_rows_are_compared_with_those_of_the_whole_batch_and_of_earlier_requests() -> None:
    read = [*_read_rows((4, 2, 4), 8)]
    assert [each["packed_rows"] for each in read] == [32, 16, 32]
    assert [each["fewer_rows"] for each in read] == [False, True, False]
    assert [each["after_fewer_rows"] for each in read] == [False, False, True]
    assert [each["packed_rows"] for each in _read_rows((4,), 0)] == [None]  # a metadata builder's batch has no heads


SEVERAL = [-1] * 128


@pytest.mark.parametrize(
    ("columns", "features"),
    [
        ([0, 1, 3], {}),
        ([3, 1, 0], {"unordered_entries": True}),
        ([1, 3, -1], {"gap": True}),
        ([1, -1, 3], {"gap": True, "gap_before_entry": True}),
        ([-1, 3, 1], {"gap": True, "gap_before_entry": True, "unordered_entries": True}),
        ([-1, -1, -1], {"gap": True, "no_entry": True, "empty_tile": True}),
        ([*SEVERAL, 1], {"gap": True, "gap_before_entry": True, "empty_tile": True}),
        ([*SEVERAL[1:], 1], {"gap": True, "gap_before_entry": True}),
    ],
)
def test_a_request_has_features_of_the_entries_that_its_rows_select(
    columns: list[int], features: dict[str, Any]
) -> None:
    """The second request has two rows, the first of which selects entries in order."""
    batch = latent_batch([1, 2], [140, 140])
    ordered = [*range(len(columns))]
    rows = [ordered, ordered, columns]
    arguments = sparse_arguments(batch, rows, 256, ragged=True)
    first, second = features_of_call(AttentionCall.MLA_DECODE, arguments, CallLog()).of_requests
    names = {"no_entry", "empty_tile", "gap", "gap_before_entry", "unordered_entries", "num_entries"}
    most = {"num_entries": len(ordered)}
    assert {name: first[name] for name in names & first.keys()} == most
    assert {name: second[name] for name in names & second.keys()} == features | most


def test_a_sparse_call_has_features_of_its_arguments() -> None:
    batch = latent_batch([1], [20])

    def features(columns: list[int], **options: Any) -> dict[str, Any]:
        arguments = sparse_arguments(batch, [columns], 16, **options)
        found = features_of_call(AttentionCall.MLA_DECODE, arguments, CallLog()).features
        names = ("top_k", "selects_entries", "top_k_lens", "first_slot", "block_tables_gaps")
        return {name: found[name] for name in names if name in found}

    assert features([1, 2, 3]) == {"top_k": 3, "selects_entries": True}
    assert features([1, 2, 3, -1], lens=[2]) == {"top_k": 4, "selects_entries": True, "top_k_lens": True}
    assert features([1, 2], width=3).keys() == {"top_k", "selects_entries"}  # of one row, there is no gap
    assert features_of_call(AttentionCall.MLA_DECODE, mla_arguments(batch), CallLog()).features.get("top_k") is None
    first = sparse_arguments(batch, [[1, 2, 3]], 16)
    first["block_tables"].zero_()
    found = features_of_call(AttentionCall.MLA_DECODE, first, CallLog())
    assert found.features["first_slot"]
    assert ("gap" in found.of_requests[0], found.of_requests[0]["num_entries"]) == (False, 3)


def test_functions_have_features_of_their_own() -> None:
    context = read(CONTEXT)
    assert context == read(PLAIN) | {"function": "context"}
    assert read(CONTEXT, causal=False) == context | {"not_causal": True}
    latent = AttentionCase(AttentionCall.MLA_DECODE, (20,), (1,), num_kv_heads=1, head_dim=80, v_head_dim=64)
    found = read(latent)
    assert (found["kv_layout"], found["v_head_dim"], found["qk_rope_head_dim"]) == ("MLA", 64, 16)
    assert {name for name, value in found.items() if value is True} == {FEW_ROWS}
    sinks = {"sinks": [torch.zeros(4)]}
    assert read(latent, **sinks) == found | {"sinks": True, "sinks_list": True}
    lse = {"return_lse": True, "return_lse_base": "basee"}
    assert read(latent, **lse) == found | {"return_lse": True, "return_lse_base_given": True, "lse_base_e": True}
    offsets = {"query": ARGUMENTS_OF_LATENT["query"].flatten(0, 1), "cum_seq_lens_q": torch.tensor([0, 1]).int()}
    assert read(latent, **offsets) == found | {"cum_seq_lens_q_given": True}
    square = replace(PLAIN, storage=replace(PLAIN.storage, page_size=2))
    assert read(square)["page_size_is_num_kv_heads"]
    three_rows = torch.ones(2, 3, 2, dtype=torch.uint16)
    assert read(replace(PLAIN, q_lens=(3, 3)), mask=three_rows)["mask_words"] == 2


ARGUMENTS_OF_LATENT = arguments_of(
    AttentionCase(AttentionCall.MLA_DECODE, (20,), (1,), num_kv_heads=1, head_dim=80, v_head_dim=64)
)


@pytest.mark.parametrize(("visible", "is_unseen"), [((9, 9), False), ((0, 9), True), ((9, 0), False)])
def test_a_row_that_sees_none_of_its_requests_keys_on_a_rank_is_a_feature(
    visible: tuple[int, int], is_unseen: bool
) -> None:
    """The second request has no keys, of which its row sees none."""
    arguments = arguments_of(AttentionCase(AttentionCall.DECODE, (20, 0), (1, 1), num_kv_heads=1, group=2))
    problem = replace(DecodeCall(**arguments).problem(), num_visible=torch.tensor(visible, dtype=torch.int32))
    assert bool(_read_pages(AttentionCall.DECODE, arguments, problem)["unseen_keys"]) is is_unseen


@pytest.mark.parametrize(
    ("cells", "lens", "follows", "is_partial"),
    [
        ([4, 5, 6, 7, -1], 4, False, False),
        ([4, 5, 6, 7, 8], 4, True, False),
        ([4, 5, 6, 7, 8], 5, False, True),
        ([4, -1, 6, -1, -1], 3, False, True),
        ([4, 5, 6, -1, 8], 3, True, True),
        ([4, -1, -1, 0, -1], 3, True, True),
    ],
)
def test_what_follows_the_columns_in_use_is_a_feature(
    cells: list[int], lens: int, follows: bool, is_partial: bool
) -> None:
    arguments = sparse_arguments(latent_batch([1], [20]), [[0] * 5], lens=[lens])
    arguments["block_tables"] = torch.tensor([[cells]], dtype=torch.int32)
    (only,) = features_of_call(AttentionCall.MLA_DECODE, arguments, CallLog()).of_requests
    found = [name in only for name in ("entry_after_last", "partial_load")]
    assert found == [follows, is_partial]


def test_a_ragged_call_has_keys_values_and_host_lengths_of_its_own() -> None:
    arguments = ragged_arguments(ragged_batch([2, 3], [5, 7], dims=(48, 32)))

    def features(**changes: Any) -> dict[str, Any]:
        return dict(features_of_call(AttentionCall.RAGGED_CONTEXT, arguments | changes, CallLog()).features)

    plain = features()
    assert (plain["v_head_dim"], plain["head_dim"], plain["page_size"]) == (32, 48, TILE)
    assert {name for name, value in plain.items() if value is True} == {
        *("bmm1_scale_1", "bmm1_scale_unusual", "out_given", "other_out_dtype", "return_lse"),
        *("unequal_q_lens", "unequal_kv_lens"),
    }
    for name in ("key", "value"):
        assert features(**{name: widened(arguments[name])}) == plain | {f"{name}_gaps": True}
    lengths = {"q_seq_lens_cpu": torch.tensor([2, 3]), "kv_seq_lens_cpu": torch.tensor([5, 7])}
    assert features(**lengths) == plain | {"host_lengths": "int64"}


@pytest.mark.parametrize(
    ("place", "backend", "is_used"),
    [
        (0, "xqa", False),  # counters, which the lab's checks watch
        (SEMAPHORE_BYTES, "xqa", True),
        (SEMAPHORE_BYTES + 63, "xqa", True),
        (SEMAPHORE_BYTES + 64, "xqa", False),  # only the beginning is read
        (0, "trtllm-gen", True),
        (SEMAPHORE_BYTES, "trtllm-gen", True),
    ],
)
def test_scratch_was_used_if_its_beginning_is_not_zero(place: int, backend: str, is_used: bool) -> None:
    workspace = torch.zeros(SEMAPHORE_BYTES + 128, dtype=torch.uint8)
    workspace[place] = 1
    plain = read(PLAIN, backend=backend)
    assert read(PLAIN, backend=backend, workspace_buffer=workspace) == plain | (
        {"used_scratch": True} if is_used else {}
    )


def test_a_call_that_the_lab_refuses_has_the_features_of_earlier_calls_alone() -> None:
    assert read(PLAIN, window_left=-2) == {"calls_before": 0}


def request(kv_len: int, q_len: int, **batch: Any) -> set[str]:
    """The conditions of a batch's only request, which is its last too."""
    (only,) = CallFeatures.of_lengths({}, (kv_len,), (q_len,), **batch).of_requests
    return {name for name, value in only.items() if value is True} - {"first_request", "last_request"}


@pytest.mark.parametrize(
    ("kv_len", "q_len", "batch", "conditions"),
    [
        (64, 1, {}, {"full_page", "multiple_of_64_keys"}),
        (65, 1, {}, {"partial_page"}),
        (1, 1, {"page_size": 1}, {"full_page", "no_prefix"}),
        (512, 1, {}, {"full_page", "multiple_of_64_keys", "multiple_of_512_keys"}),
        (0, 1, {}, {"no_keys", "fewer_keys"}),
        (0, 0, {}, {"no_keys", "no_rows", "no_prefix"}),
        (70, 0, {}, {"partial_page", "no_rows"}),
        (3, 3, {}, {"partial_page", "no_prefix", "q_len_no_power_of_2"}),
        (4, 6, {}, {"partial_page", "fewer_keys", "q_len_no_power_of_2"}),
        (20, 1, {"window_left": 19}, {"partial_page"}),
        (20, 1, {"window_left": 18}, {"partial_page", "hidden_keys", "window_in_page"}),
        (20, 1, {"window_left": 0}, {"partial_page", "hidden_keys", "window_in_page"}),
        (
            40,
            1,
            {"window_left": 7, "page_size": 16},
            {"partial_page", "hidden_keys", "hidden_page", "window_with_page"},
        ),
        (
            40,
            2,
            {"window_left": 7, "page_size": 16},
            {"partial_page", "hidden_keys", "hidden_page", "window_in_page", "window_with_page", "window_at_page_end"},
        ),
        (
            40,
            1,
            {"window_left": 23, "page_size": 16},
            {"partial_page", "hidden_keys", "hidden_page", "window_with_page"},
        ),
        (
            40,
            1,
            {"window_left": 24, "page_size": 16},
            {"partial_page", "hidden_keys", "window_in_page", "window_at_page_end"},
        ),
        (40, 1, {"window_left": 25, "page_size": 16}, {"partial_page", "hidden_keys", "window_in_page"}),
        (
            40,
            4,
            {"window_left": 21, "page_size": 16},
            {"partial_page", "hidden_keys", "window_in_page", "window_with_page", "window_at_page_end"},
        ),
        (
            80,
            1,
            {"window_left": 15, "page_size": 256},
            {"partial_page", "hidden_keys", "hidden_tile", "window_in_page"},
        ),
        (80, 1, {"window_left": 16, "page_size": 256}, {"partial_page", "hidden_keys", "window_in_page"}),
    ],
)
def test_the_lengths_of_a_request_say_its_conditions(
    kv_len: int, q_len: int, batch: dict[str, Any], conditions: set[str]
) -> None:
    assert request(kv_len, q_len, **batch) == conditions


def test_requests_are_distinguished_by_their_place() -> None:
    first, second, third = features_of_case(replace(CASE, kv_lens=(20, 20, 32))).of_requests
    assert [each["request"] for each in (first, second, third)] == [0, 1, 2]
    assert [each["pages"] for each in (first, second, third)] == [2, 2, 2]
    assert ["as_long_as_previous" in each for each in (first, second, third)] == [False, True, False]
    assert ["first_request" in each for each in (first, second, third)] == [True, False, False]
    assert ["last_request" in each for each in (first, second, third)] == [False, False, True]


def test_requests_are_distinguished_by_their_neighbours() -> None:
    of_requests = features_of_case(replace(CASE, kv_lens=(20, 0, 5), q_lens=(1, 1, 1))).of_requests
    neighbours = ("after_longer", "after_no_keys", "before_no_keys")
    assert [[name for name in neighbours if name in each] for each in of_requests] == [
        ["before_no_keys"],
        ["after_longer"],
        ["after_no_keys"],
    ]


@pytest.mark.parametrize(
    ("kv_lens", "q_lens", "conditions"),
    [
        ((5, 5), (1, 1), {FEW_ROWS}),
        ((5, 6), (1, 1), {FEW_ROWS, "unequal_kv_lens"}),
        ((5, 5), (1, 2), {"unequal_q_lens"}),
        ((5, 0), (1, 1), {FEW_ROWS, "unequal_kv_lens", "some_no_keys"}),
        ((0, 0), (1, 1), {FEW_ROWS, "some_no_keys", "all_no_keys"}),
        ((5, 5), (0, 1), {FEW_ROWS, "unequal_q_lens", "some_no_rows"}),
        ((5, 5), (0, 0), {FEW_ROWS}),
    ],
)
def test_the_lengths_of_a_batch_say_its_conditions(
    kv_lens: tuple[int, ...], q_lens: tuple[int, ...], conditions: set[str]
) -> None:
    found = features_of_case(AttentionCase(AttentionCall.CONTEXT, kv_lens, q_lens)).features
    lengths = {FEW_ROWS, "unequal_kv_lens", "unequal_q_lens", "some_no_keys", "all_no_keys", "some_no_rows"}
    assert found.keys() & lengths == conditions
    assert (found["requests"], found["rows_of_batch"], found["longest_kv_len"]) == (2, sum(q_lens), max(kv_lens))


def test_a_batch_without_requests_has_these_features_and_no_others() -> None:
    none = {"page_size": TILE, "requests": 0, "rows_of_batch": 0, "longest_kv_len": 0, FEW_ROWS: True}
    assert CallFeatures.of_lengths({}, (), ()).features == none | {"all_no_keys": True}


@pytest.mark.parametrize("group", [1, 3])
def test_a_case_and_its_plain_call_have_the_same_features(group: int) -> None:
    case = replace(CASE, group=group)
    run = CaseRun(references, case, CPU)
    run.call(run.build())
    of_case, of_call = features_of_case(case), run.called
    assert of_case.of_requests == of_call.of_requests
    assert (of_case.q_lens, of_call.q_lens) == ((2, 2, 2), (2, 2, 2))
    shared = of_case.features.keys() & of_call.features.keys()
    assert {
        "window_left",
        "group",
        "head_dim",
        "requests",
        "contents",
        "function",
        "dtype",
        "page_size",
    } <= shared
    assert {name: of_case.features[name] for name in shared} == {name: of_call.features[name] for name in shared}
    for found in (of_case, of_call):
        assert ("group_no_power_of_2" in found.features) == (group == 3)


def test_a_call_has_the_contents_of_its_own_inputs() -> None:
    run = CaseRun(references, CASE, CPU)
    run.call(run.build(replace(CASE, contents=Contents.COUNTED)))
    assert run.called.features["contents"] == "counted"


def test_a_call_of_a_pass_has_the_features_of_the_pass() -> None:
    run = CaseRun(references, ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (3,), (2,)), CPU)
    run.note_call(CASE.interface, arguments_of(CASE))
    assert run.called.features["mode"] == "target_verify"


def test_what_a_call_says_itself_is_not_taken_from_its_case() -> None:
    around = {"head_dim": 1, "geometry": "tiny"}
    features = features_of_call(CASE.interface, arguments_of(CASE), CallLog(), around).features
    assert (features["head_dim"], features["geometry"]) == (64, "tiny")


def test_of_the_features_of_several_requests_the_largest_number_stays() -> None:
    found = of_any_request({"head_dim": 64, "q_len": 1}, [{"q_len": 3, "no_keys": True}, {"q_len": 2}])
    assert found == {"head_dim": 64, "q_len": 3, "no_keys": True}


def test_a_value_for_each_side_is_named_if_the_sides_agree() -> None:
    held = kept({"dtypes": {"K": torch.float16, "V": torch.bfloat16}, "layouts": {"K": 1, "V": 1}, "lens": (1, 2)})
    assert held == {"dtypes": "mixed", "layouts": 1}


def test_a_forward_mode_has_features() -> None:
    def found(mode: ForwardMode, **given: Any) -> dict[str, Any]:
        features = features_of_case(ForwardCase(mode, "tiny", (3,), (1,), **given)).features
        names = ("mode", "uncounted", "leaves_out_tokens", "query_rows", "extends_draft", "draft_step")
        return {name: features[name] for name in names if name in features}

    assert found(ForwardMode.DECODE) == {"mode": "decode", "uncounted": "none", "query_rows": "one"}
    assert found(ForwardMode.DECODE, draft_step=1) == {
        "mode": "decode",
        "uncounted": "draft_step",
        "leaves_out_tokens": True,
        "query_rows": "one",
        "draft_step": 1,
    }
    assert found(ForwardMode.DECODE, draft_step=FROZEN_KV_STEP)["uncounted"] == "none"
    assert found(ForwardMode.DRAFT_EXTEND) == {
        "mode": "draft_extend",
        "uncounted": "none",
        "query_rows": "accepted",
        "extends_draft": True,
    }


def test_a_configuration_has_the_values_that_are_not_default() -> None:
    found = features_of_case(Configuration(AttentionCall.DECODE, {"group": 3})).features
    assert found == {"function": "decode", "group=3": True}
    assert feature_named("group=3").phrase("is", True) == "group is “3”"
    assert feature_named("group=3").phrase("is not", True) == "group is not “3”"


@dataclass(frozen=True)
class UnheardOf:
    speed: int = 3
    seed: int = 0


def test_an_unknown_feature_is_an_error() -> None:
    with pytest.raises(UnknownFeatureError, match="'speed'"):
        features_of_case(UnheardOf())


def test_every_field_of_every_case_is_a_feature() -> None:
    for check in checks():
        for interface in check.interfaces:
            for case in check.cases(interface, SMALL, Level.SMOKE):
                features_of_case(case)


def test_no_two_features_have_one_name_and_each_can_be_said() -> None:
    for name, feature in FEATURES.items():
        assert name.isidentifier()
        operators: Callable[[], tuple[str, ...]] = {
            Condition: lambda: ("is", "is not"),
            Number: lambda: ("==", ">=", "<="),
            Choice: lambda: ("==", "!="),
        }[type(feature)]
        phrases = [feature.phrase(operator, 3) for operator in operators()]
        assert len(set(phrases)) == len(phrases)
        assert not any(set("{|}") & set(phrase) or "  " in phrase for phrase in phrases)


@pytest.mark.parametrize(
    ("feature", "values", "tests"),
    [
        (Choice("it"), ("a", None, "b"), [("==", "a", 1), ("==", "b", 1)]),
        (Choice("it"), "aba", [("==", "a", 1), ("==", "b", 1)]),
        (
            Choice("it"),
            "abc",
            [(op, name, math.log2(3) + more) for name in "abc" for op, more in (("==", 0), ("!=", 2.5))],
        ),
        (Choice("it", is_negated=False), "abcd", [("==", name, 2) for name in "abcd"]),
        (Condition("it"), (True, None), [("is", True, 0), ("is not", True, 2.5)]),
        (Number("it"), (3, None, 1), [(op, step, 1 + more) for step in (1, 3) for op, more in NUMBERS]),
        (
            Number("it"),
            range(12),
            [(op, step, 2.5 + more) for step in range(12) for op, more in NUMBERS],
        ),
        (
            Number("it"),
            range(13),
            [(op, step, 2.5 + more) for step in (0, 1, 2, 3, 5, 9, 12) for op, more in NUMBERS],
        ),
        (
            Number("it"),
            range(0, 130, 4),
            [(op, step, 2.5 + more) for step in (0, 4, 8, 12, 20, 36, 68, 128) for op, more in NUMBERS],
        ),
    ],
)
def test_the_tests_of_a_feature_and_their_bits(feature: CaseFeature, values: Any, tests: list[Any]) -> None:
    """Of many numbers, the thresholds are those next after a power of two, where kernels change."""
    assert list(feature.tests(feature.column(values))) == tests


@pytest.mark.parametrize(
    ("name", "operator", "value", "phrase"),
    [
        ("sinks", "is", True, "sinks are given"),
        ("sinks", "is not", True, "no sinks are given"),
        ("kv_len", "<=", 1, "a request has 1 key or less"),
        ("kv_len", ">=", 11, "a request has 11 keys or more"),
        ("kv_len", "==", 21, "a request has 21 keys"),
        ("q_len", ">=", 2, "a request has several query rows"),
        ("q_len", ">=", 3, "a request has 3 query rows or more"),
        ("q_len", "<=", 2, "a request has 2 query rows or less"),
        ("dtype", "==", "fp16", "the query's dtype is fp16"),
        ("dtype", "!=", "fp16", "the query's dtype is not fp16"),
    ],
)
def test_a_feature_in_words(name: str, operator: str, value: Any, phrase: str) -> None:
    assert feature_named(name).phrase(operator, value) == phrase


def test_a_result_says_which_requests_are_wrong_and_shows_one_vector() -> None:
    run = CaseRun(references, CASE, CPU)
    inputs = run.build()
    result = run.call(inputs, bmm2_scale=torch.tensor([1.0]))
    worst = result.out[5, 1].abs().topk(4).indices.sort().values  # of a vector that is twice as large
    result.out[5, 1] *= 2
    run.expect_close("this", result, inputs.truth())
    (noted,) = run.results
    assert noted.wrong
    assert noted.held == "output"
    assert noted.features["bmm2_scale_tensor"]
    assert [wrong for _, wrong in noted.requests] == [False, False, True]
    assert noted.example is not None
    assert noted.example.where == f"row 5 (request 2), head 1, elements {', '.join(map(str, worst.tolist()))}"
    assert noted.example.got == tuple(result.out[5, 1, worst].tolist())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_elements_that_are_shown_are_the_wrong_ones(bad: float) -> None:
    run = CaseRun(references, CASE, CPU)
    inputs = run.build()
    result = run.call(inputs, bmm2_scale=torch.tensor([1.0]))
    result.out[5, 1, 40] += 100.0
    result.out[5, 1, 33] = bad
    run.expect_close("this", result, inputs.truth())
    example = run.results[0].example
    assert example is not None
    shown = {
        int(element): got
        for element, got in zip(example.where.split("elements ")[1].split(", "), example.got, strict=True)
    }
    assert str(shown[33]) == str(bad)
    assert shown[40] > 50


def later(**changes: Any) -> set[str]:
    """The features of a second call of a case that the first does not have."""
    log, arguments = CallLog(), arguments_of(replace(CASE, window_left=-1))
    log.read(arguments)
    found = log.read(arguments | changes)
    assert (found.pop("calls_before"), found.pop("later_call")) == (1, True)
    return {name for name, value in found.items() if value}


def test_a_call_knows_what_differs_from_the_first_call_of_its_shapes() -> None:
    assert later() == set()
    assert later(bmm1_scale=0.1251) == {"other_bmm1_scale"}
    assert later(bmm1_scale=torch.tensor([0.125])) == set()
    assert later(bmm1_scale_log2=torch.tensor([1.0])) == {"other_bmm1_scale"}
    assert later(attention_sinks=torch.zeros(3)) == {"other_sinks"}
    assert later(window_left=4) == {"other_window_left"}
    assert later(seq_lens=torch.tensor([20, 0, 31])) == {"other_seq_lens"}
    assert later(seq_lens=torch.tensor([20, 1, 32])) == {"other_seq_lens", "longer_request"}


def test_a_call_knows_what_was_written_since_an_earlier_one() -> None:
    log, arguments = CallLog(), arguments_of(CASE)
    log.read(arguments)
    arguments["seq_lens"][2] = 30
    arguments["kv_cache"][0][0] = 0
    found = log.read(arguments)
    assert {name for name, value in found.items() if value and name.startswith("written")} == {
        "written_seq_lens",
        "written_kv_cache",
    }
    features = features_of_call(AttentionCall.DECODE, arguments, log).features
    assert (features["calls_before"], features["later_call"]) == (2, True)
    assert features["other_seq_lens"]
    assert features["written_seq_lens"]
    assert "other_bmm2_scale" not in features


def test_a_small_tensor_was_written_if_its_values_have_changed() -> None:
    """Not if it has its values again, and also if its version is unknown: a kernel that writes does not count it."""
    log, arguments = CallLog(), arguments_of(CASE)
    log.read(arguments)
    lens = arguments["seq_lens"]
    lens.copy_(lens.clone())
    assert not log.read(arguments)["written_seq_lens"]
    lens.numpy()[2] = 30
    assert log.read(arguments)["written_seq_lens"]
    assert not log.read(arguments | {"seq_lens": lens[:2]})["written_seq_lens"]


def test_another_log2_of_bmm1_scale_is_another_bmm1_scale() -> None:
    log, arguments = CallLog(), arguments_of(CASE)
    for value, is_other in ((0.25, False), (0.25, False), (0.5, True)):
        found = log.read(arguments | {"bmm1_scale_log2": torch.tensor([value])})
        assert found["other_bmm1_scale"] is is_other


def test_of_a_call_without_a_cache_writes_to_its_keys_are_noted() -> None:
    log, arguments = CallLog(), {name: torch.zeros(2, 2) for name in ("query", "key", "seq_lens")}
    log.read(arguments)
    arguments["key"].add_(1)
    assert log.read(arguments)["written_kv_cache"]


def test_a_new_tensor_at_an_old_address_was_not_written() -> None:
    log, arguments = CallLog(), arguments_of(CASE)
    arguments["query"] = torch.zeros(3, 2).requires_grad_(False)
    log.read(arguments)
    address = arguments["query"].data_ptr()
    arguments["query"].add_(1)
    storage = arguments.pop("query").untyped_storage()
    arguments["query"] = torch.empty(0).set_(storage, 0, (3, 2)).add_(1)  # type: ignore[call-overload]
    assert arguments["query"].data_ptr() == address
    assert not log.read(arguments)["written_query"]


def test_every_check_notes_results_with_features() -> None:
    for check in checks():
        for interface in check.interfaces:
            case = next(iter(check.cases(interface, SMALL, Level.SMOKE)), None)
            if case is not None and check.key[0] in "LM":
                judged = run_case(references, check, case, CPU, SMALL)
                assert all(result.held and result.features for result in judged.results)


def test_an_e4m3_query_has_features() -> None:
    query = of("query").to(torch.float8_e4m3fn)
    found = read(PLAIN, query=query, kv_cache=(K.to(query.dtype), V.to(query.dtype)), o_scale=1.0)
    assert (found["dtype"], found["out_dtype"]) == ("e4m3", "e4m3")
    assert not {"other_out_dtype", "o_scale_not_1"} & found.keys()
    assert read(PLAIN, query=query, kv_cache=(K.to(query.dtype), V.to(query.dtype)), o_scale=2.0)["o_scale_not_1"]


def test_dataclasses_are_frozen_and_those_with_tensors_or_functions_are_compared_by_identity() -> None:
    assert broken_rules(explain) == []


def test_a_name_of_an_enumeration_is_said_by_its_text_and_a_value_of_several_words_is_quoted() -> None:
    low = "the data of the case is “all logits about -200,000, equal in a request”"
    assert feature_named("contents").phrase("==", "low") == low
    assert feature_named("dead").phrase("!=", "nan").endswith("is not “NaN, which a zero weight does not remove”")
    assert feature_named("sinks=some minus infinity").phrase("is", True) == "sinks is “some minus infinity”"


def test_a_block_sparse_call_has_the_lengths_of_its_longest_heads() -> None:
    case = AttentionCase(AttentionCall.DECODE, (100, 16, 37), (1, 1, 1), head_pages=HeadPages.SOME_NONE)
    arguments = arguments_of(case)
    found = features_of_call(case.interface, arguments, CallLog())
    assert found.features["block_sparse"] is found.features["head_lengths_differ"] is True
    assert [request["kv_len"] for request in found.of_requests] == arguments["seq_lens"].amax(dim=0).tolist()
    alike, plain = (read(replace(case, head_pages=each)) for each in (HeadPages.ALL, None))
    assert (alike["block_sparse"], "head_lengths_differ" in alike, "block_sparse" in plain) == (True, False, False)
