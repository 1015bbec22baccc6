"""Features of cases and calls, each in a call that has it, and the results that a case notes with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import ContextCall, DecodeCall, MLADecodeCall
from lab.calls.problem import AttentionCall
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.checks import AttentionCase, ForwardCase
from lab.checks.case_run import CaseRun
from lab.checks.explain import call_features as reading
from lab.checks.explain.call_features import TILE, CallFeatures, CallLog, features_of_call, features_of_case, kept
from lab.checks.explain.feature import (
    RELATIONS,
    REMAINDERS,
    CaseFeature,
    Choice,
    Condition,
    Cost,
    Number,
    of_any_request,
)
from lab.checks.explain.features import FEATURES, UnknownFeatureError, feature_named
from lab.checks.explain.request_features import (
    read_batch,
    read_bounds,
    read_earlier,
    read_pages,
    read_request,
)
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.metadata import MetadataCase
from lab.checks.parameters.models import Configuration
from lab.checks.parameters.values import DtypePair
from lab.checks.properties import checks
from lab.checks.properties.check import Level
from lab.checks.run.judging import run_case
from lab.metadata import ForwardMode
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.ranges import Ranges
from lab.references.errors import Truth
from lab.workloads.attention_case import Contents, HeadPages
from lab.workloads.inputs.draft_lists import DraftListsCase
from tests.cases import latent_batch, mla_arguments, ragged_arguments, ragged_batch, sparse_arguments
from tests.checks.small import SMALL

CASE = AttentionCase(AttentionCall.DECODE, (20, 0, 32), (2, 2, 2), num_kv_heads=1, group=3, window_left=5)
PLAIN = AttentionCase(AttentionCall.DECODE, (40, 24), (2, 2), num_kv_heads=2, group=2)
LATENT = AttentionCase(AttentionCall.MLA_DECODE, (20,), (1,), num_kv_heads=1, head_dim=80, v_head_dim=64)
VERIFY = MetadataCase(ForwardMode.TARGET_VERIFY, (12, 1), (4, 4), page_size=16, rows=4)
DRAFT_EXTEND = MetadataCase(ForwardMode.DRAFT_EXTEND, (12, 1), (1, 4), page_size=16)
CPU = torch.device("cpu")
DECODE, CONTEXT, MLA, RAGGED = (
    AttentionCall.DECODE,
    AttentionCall.CONTEXT,
    AttentionCall.MLA_DECODE,
    AttentionCall.RAGGED_CONTEXT,
)


def arguments_of(case: AttentionCase) -> dict[str, Any]:
    return CaseRun(references, case, CPU).build().arguments()


ARGUMENTS = {each.interface: arguments_of(each) for each in (PLAIN, replace(PLAIN, interface=CONTEXT), LATENT)}
ARGUMENTS[RAGGED] = ragged_arguments(ragged_batch([2, 3], [5, 7], dims=(48, 32)))


def read(interface: AttentionCall, **changes: Any) -> dict[str, Any]:
    """Read the features of a plain call of a function with some arguments changed."""
    return dict(features_of_call(interface, ARGUMENTS[interface] | changes, CallLog()).features)


def named(text: str) -> dict[str, Any]:
    """Read features such as "mask mask_words=2"."""
    pairs = (each.partition("=") for each in text.split())
    return {name: (int(value) if value.isdigit() else value) if equals else True for name, equals, value in pairs}


@pytest.mark.parametrize(
    ("interface", "features"),
    [
        (
            DECODE,
            "function=decode dtype=bf16 kv_dtype=bf16 kv_layout=HND head_dim=64 v_head_dim=64 num_kv_heads=2 num_qo_heads=4 "
            "group=2 out_dtype=bf16 table_columns=6 pool_pages=14 pool_elements=28672 calls_before=0 page_size=16 "
            "requests=2 rows_of_batch=4 longest_kv_len=40 unequal_kv_lens most_q_len=2 max_q_len=2 max_kv_len=96 "
            "first_kv_len=40 first_pages=3 query_stride=256 page_elements=1024",
        ),
        (
            MLA,
            "function=mla_decode dtype=bf16 kv_dtype=bf16 kv_layout=MLA head_dim=80 v_head_dim=64 qk_rope_head_dim=16 "
            "num_kv_heads=1 num_qo_heads=4 group=4 out_dtype=bf16 table_columns=5 pool_pages=8 pool_elements=10240 "
            "calls_before=0 page_size=16 requests=1 rows_of_batch=1 longest_kv_len=20 most_q_len=1 max_q_len=1 "
            "max_kv_len=80 first_kv_len=20 first_pages=2 query_stride=320 page_elements=1280",
        ),
        (
            RAGGED,
            "function=ragged_context dtype=bf16 head_dim=48 v_head_dim=32 num_kv_heads=3 "
            "num_qo_heads=3 group=1 out_dtype=float64 calls_before=0 page_size=64 requests=2 rows_of_batch=5 longest_kv_len=7 "
            "unequal_q_lens unequal_kv_lens not_descending bmm1_scale_1 bmm1_scale_unusual out_given return_lse "
            "other_out_dtype most_q_len=3 max_q_len=3 max_kv_len=7 first_kv_len=5 first_pages=1 query_stride=144 "
            "key_stride=144 value_stride=96",
        ),
    ],
)
def test_a_plain_call_has_these_features_and_no_others(interface: AttentionCall, features: str) -> None:
    assert read(interface) == named(features)


def of(name: str, interface: AttentionCall = DECODE) -> Any:
    return ARGUMENTS[interface][name]


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


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


K, V = of("kv_cache")
KEY, VALUE = of("key", RAGGED), of("value", RAGGED)
TABLES = of("block_tables")
FOUR, LSE = torch.zeros(4), torch.empty(4, 4)
E4M3 = {"query": of("query").to(torch.float8_e4m3fn), "kv_cache": (K.to(torch.float8_e4m3fn),) * 2}
WIDE = f"pool_elements={2 * K.numel()}"
# The tests of a number and of a choice, and what they cost besides its thresholds and names.
NUMBERS, CHOICES = (("==", 1.25), (">=", 0), ("<=", 1.25)), (("==", 0), ("!=", 2.5))
SEPARATE = {"block_tables": TABLES.unsqueeze(1).repeat(1, 2, 1), "uses_shared_paged_kv_idx": False}


def of_steps(first: set[int], last: set[int]) -> list[Any]:
    """Return the tests of numbers at which intervals begin and end."""
    has = {"==": {step for step in first | last if step <= 16}, ">=": first, "<=": last}
    return [
        (op, step, 2.5 + bits + uneven(op, step))
        for step in sorted(first | last)
        for op, bits in NUMBERS
        if step in has[op]
    ]


def uneven(operator: str, step: int) -> float:
    """What a least number costs that is not the first above a power of 2."""
    return 0.01 if operator == ">=" and step not in (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257) else 0.0


def offsets(most: int, *values: int) -> dict[str, Any]:
    return {"q_len_per_req": None, "max_q_len": most, "cum_seq_lens_q": ints(*values)}


@pytest.mark.parametrize(
    ("interface", "changes", "features"),
    [
        (DECODE, {"mask": packed(1, 3, 1, 3)}, "mask mask_words=2 odd_mask_words"),
        (DECODE, {"mask": packed(3, 3, 3, 3)}, "mask mask_words=2 odd_mask_words mask_not_causal"),
        (DECODE, {"mask": packed(1, 3, 3, 3)}, "mask mask_words=2 odd_mask_words mask_not_causal masks_differ"),
        (DECODE, {"sinks": FOUR}, "sinks"),
        (DECODE, {"sinks": torch.tensor([0, -math.inf, 8, 0])}, "sinks some_inf_sink"),
        (DECODE, {"sinks": torch.tensor([0, 0, 8.1, 0])}, "sinks large_sink"),
        (DECODE, {"sinks": FOUR - math.inf}, "sinks some_inf_sink all_inf_sinks"),
        (DECODE, {"bmm1_scale": torch.tensor([0.125])}, "bmm1_scale_tensor"),
        (DECODE, {"bmm1_scale": -0.125}, "bmm1_scale_negative bmm1_scale_unusual"),
        (DECODE, {"bmm1_scale": 0.126}, "bmm1_scale_unusual"),
        (DECODE, {"bmm1_scale": 1.0}, "bmm1_scale_unusual bmm1_scale_1"),
        (DECODE, {"bmm1_scale": 1.1}, "bmm1_scale_unusual bmm1_scale_large"),
        (DECODE, {"bmm1_scale": -1.1}, "bmm1_scale_unusual bmm1_scale_large bmm1_scale_negative"),
        (DECODE, {"bmm1_scale": 0.001}, "bmm1_scale_unusual"),
        (DECODE, {"bmm1_scale": -9e-4}, "bmm1_scale_unusual bmm1_scale_small bmm1_scale_negative"),
        (DECODE, {"bmm1_scale_log2": torch.tensor([0.125 / math.log(2)])}, "bmm1_scale_log2_given"),
        (DECODE, {"bmm2_scale": torch.tensor([1.0])}, "bmm2_scale_tensor"),
        (DECODE, {"bmm2_scale": 0.5}, "bmm2_scale_not_1"),
        (DECODE, {"bmm2_scale": 3}, "bmm2_scale_not_1 bmm2_scale_no_power_of_2"),
        (DECODE, {"bmm2_scale": 0.0}, "bmm2_scale_not_1 bmm2_scale_no_power_of_2 bmm2_scale_small"),
        (DECODE, {"bmm2_scale": 0.001}, "bmm2_scale_not_1 bmm2_scale_no_power_of_2"),
        (DECODE, {"bmm2_scale": 2.0**-9}, "bmm2_scale_not_1"),
        (DECODE, {"bmm2_scale": -(2.0**-10)}, "bmm2_scale_not_1 bmm2_scale_small bmm2_scale_negative"),
        (DECODE, {"bmm2_scale": 100}, "bmm2_scale_not_1 bmm2_scale_no_power_of_2"),
        (DECODE, {"bmm2_scale": -128.0}, "bmm2_scale_not_1 bmm2_scale_large bmm2_scale_negative"),
        (DECODE, {"bmm2_scale": -1.0}, "bmm2_scale_not_1 bmm2_scale_negative"),
        (DECODE, {"out": torch.empty(4, 4, 64, dtype=torch.bfloat16)}, "out_given"),
        (DECODE, {"out_dtype": torch.float16}, "out_dtype=fp16 other_out_dtype"),
        (DECODE, {"return_lse": True}, "return_lse"),
        (DECODE, {"lse": LSE, "return_lse": True}, "lse_given return_lse"),
        (DECODE, {"lse": widened(LSE), "return_lse": True}, "lse_given return_lse lse_gaps"),
        (DECODE, {"seq_lens": of("seq_lens").to(torch.uint32)}, "seq_lens_uint32"),
        (DECODE, {"query": widened(of("query"))}, "query_gaps query_heads_apart query_stride=512"),
        (DECODE, {"block_tables": widened(TABLES)}, "block_tables_gaps"),
        (DECODE, {"block_tables": TABLES[:1].expand(2, -1).contiguous()}, "one_first_page one_table"),
        (DECODE, {"block_tables": torch.cat([TABLES[:1], TABLES[:1].flip(1)])[:, [0, 1, 2, 2, 1, 0]]}, ""),
        (DECODE, SEPARATE, "separate_tables"),
        (DECODE, {"kv_cache": (apart(K), apart(V))}, f"page_gaps {WIDE}"),
        (DECODE, {"kv_cache": (K, apart(V))}, "other_v_strides"),
        (DECODE, {"kv_cache": (K, widened(V))}, "other_v_strides"),
        (DECODE, {"kv_cache": torch.stack([K, V], dim=1)}, f"one_cache_tensor page_gaps {WIDE}"),
        (DECODE, {"kv_cache": (widened(K), widened(V))}, f"page_gaps gaps_in_pages {WIDE}"),
        (DECODE, offsets(2, 0, 2, 4), "cum_seq_lens_q_given max_q_len_given"),
        (
            DECODE,
            offsets(2, 0, 1, 3),
            "cum_seq_lens_q_given max_q_len_given padding_rows padding_fills_bound rows_of_batch=3 unequal_q_lens "
            "uneven_shares",
        ),
        (
            DECODE,
            offsets(3, 0, 0, 3),
            "cum_seq_lens_q_given max_q_len_given padding_rows rows_of_batch=3 unequal_q_lens some_no_rows "
            "some_empty uneven_shares most_q_len=3 max_q_len=3",
        ),
        (DECODE, {"window_left": 0}, "has_window window_left=0"),
        (DECODE, E4M3 | {"o_scale": 1.0}, "dtype=e4m3 kv_dtype=e4m3 out_dtype=e4m3"),
        (DECODE, E4M3 | {"o_scale": 2.0}, "dtype=e4m3 kv_dtype=e4m3 out_dtype=e4m3 o_scale_not_1"),
        (CONTEXT, {"causal": False}, "not_causal"),
        (MLA, {"sinks": [torch.zeros(4)]}, "sinks sinks_list"),
        (MLA, {"return_lse": True, "return_lse_base": "basee"}, "return_lse return_lse_base_given lse_base_e"),
        (MLA, {"query": of("query", MLA).flatten(0, 1), "cum_seq_lens_q": ints(0, 1)}, "cum_seq_lens_q_given"),
        (RAGGED, {"key": widened(KEY)}, "key_gaps key_heads_apart key_stride=288"),
        (RAGGED, {"value": widened(VALUE)}, "value_gaps value_heads_apart value_stride=192"),
        (RAGGED, {"value": torch.cat([VALUE, VALUE], dim=1)[:, : VALUE.shape[1]]}, "value_gaps value_stride=192"),
        (
            RAGGED,
            {"q_seq_lens_cpu": torch.tensor([2, 3]), "kv_seq_lens_cpu": torch.tensor([5, 7])},
            "host_lengths=int64 q_seq_lens_cpu_given",
        ),
        (RAGGED, {"o_sf_scale": 0.5}, "o_sf_scale_not_1"),
        (RAGGED, {"lse": torch.empty(5, 3), "return_lse": True}, "lse_given return_lse"),
    ],
)
def test_an_argument_adds_its_features(interface: AttentionCall, changes: dict[str, Any], features: str) -> None:
    assert read(interface, **changes) == read(interface) | named(features)


@pytest.mark.parametrize(
    ("name", "num_elements", "features"),
    [
        ("query", 2**31 // 3, f"query_gaps query_stride={2**31 // 3}"),
        ("query", 2**31 // 3 + 1, f"query_gaps query_far query_stride={2**31 // 3 + 1}"),
        ("block_tables", 2**31, "block_tables_gaps block_tables_far"),
        ("lse", 2**30, "lse_given lse_gaps lse_far return_lse"),
    ],
)
def test_rows_far_apart_are_a_feature(name: str, num_elements: int, features: str) -> None:
    # Made here, not at import: a process that keeps 29 GB of virtual memory cannot be forked.
    near: dict[str, Any] = {"return_lse": True, "lse": LSE} if name == "lse" else {name: of(name)}
    changes = near | {name: rows_apart(near[name], num_elements)}
    assert read(DECODE, **changes) == read(DECODE) | named(features)


def test_a_page_table_is_compared_with_the_bound_of_keys() -> None:
    """The page table has room for 96 keys."""
    for bound, is_beyond in ((80, True), (81, False)):
        found = read(DECODE, max_seq_len=bound)
        assert (found["max_kv_len"], "table_beyond_bound" in found) == (bound, is_beyond)


def test_a_call_of_a_pass_has_the_lengths_of_its_case_and_its_own_entries() -> None:
    arguments = sparse_arguments(latent_batch([1, 1], [140, 140]), [[0, 1], [1, -1]], 256)
    of_call, of_case = features_of_call(MLA, arguments, CallLog()), CallFeatures.of_lengths({}, [9, 9], [1, 1])
    found = of_call.of_pass(of_case)
    assert [(each["kv_len"], "gap" in each) for each in found.of_requests] == [(9, False), (9, True)]
    several = CallFeatures.of_lengths({}, [9, 9], [1, 2])  # the call has other requests
    assert of_call.of_pass(several).of_requests == several.of_requests
    assert of_call.of_pass(CallFeatures({})).of_requests == of_call.of_requests


def test_each_value_that_is_read_has_a_text_and_each_text_a_value() -> None:
    arguments = ARGUMENTS[DECODE] | {"sinks": FOUR, "mask": packed(1, 3, 1, 3), "q_len_per_req": 2}
    decode = DecodeCall(**arguments).problem()
    of_call = reading._read_call(DECODE, arguments, decode, decode.kv_lens(), decode.q_lens())
    sparse = MLADecodeCall(**sparse_arguments(latent_batch([2], [5]), [[0, -1, 3, 1]] * 2)).problem()
    of_rank = replace(sparse, num_visible=torch.ones(2, dtype=torch.int32))
    of_sparse = reading._read_call(MLA, {}, of_rank, of_rank.kv_lens(), of_rank.q_lens())
    paged = MLADecodeCall(**ARGUMENTS[MLA]).problem()
    (of_selection,), (of_pages,) = (read_pages(each, each.kv_lens(), each.page_size) for each in (sparse, paged))
    (of_bounds,) = read_bounds(paged, paged.kv_lens(), paged.q_lens())
    of_lengths = read_request(0, (1,), 1, 16, -1) | read_batch((1,), (1,), 16, -1) | next(read_earlier((1,), (1,), {}))
    names = [*FEATURES]
    of_cases = names[names.index("contents") : names.index("later_call")]
    (of_values,) = CallFeatures({}, ({},), (1,)).with_values(truth_of([[0.5]], [[1.0]])).of_requests
    read = (
        of_call | of_sparse | of_selection | of_pages | of_bounds | of_lengths | of_values | CallLog().read(arguments)
    )
    assert read.keys() == {*FEATURES} - {*of_cases, "result"}


def truth_of(outputs: list[list[float]], lse: list[list[float]]) -> Truth:
    """The expected results of rows, each with a head of as many outputs, and its LSE."""
    expected, of_rows = torch.tensor(outputs, dtype=torch.float64)[:, None], torch.tensor(lse, dtype=torch.float64)
    return Truth(expected, expected, of_rows, torch.zeros(len(outputs), dtype=torch.int64), torch.bfloat16)


def test_the_size_of_a_requests_output_and_lse_are_features() -> None:
    truth = truth_of([[1, -450.5], [3, 2], [math.nan, 1e30]], [[-130.5], [7], [-math.inf]])
    names = ("largest_output", "lse_above_zero", "lse_below_zero")
    found = CallFeatures.of_lengths({}, [9, 9, 9], [2, 0, 1]).with_values(truth)
    assert [[each.get(name) for name in names] for each in found.of_requests] == [
        [451, 7, 131],
        [None] * 3,
        [0, 0, 0],
    ]
    of_two_rows = CallFeatures.of_lengths({}, [9], [2])  # which are not the rows of the results
    assert of_two_rows.with_values(truth) is of_two_rows


FOUR_REQUESTS = (9, 9, 5, 8), (4, 2, 4, 4)
BLOCKS_OF_SCALES = {"sage_rows": 4, "sage_keys": 16}


@pytest.mark.parametrize(
    ("kv_lens", "q_lens", "sizes", "expected"),
    [
        # Rows, keys and tiles of 64 keys are compared with those of all requests, and with those of earlier ones.
        (*FOUR_REQUESTS, {"group": 8}, {"packed_rows": [32, 16, 32, 32], "previous_q_len": [None, 4, 2, 4]}),
        (*FOUR_REQUESTS, {}, {"rows_before": [0, 4, 6, 10], "rows_so_far": [4, 6, 10, 14]}),
        (*FOUR_REQUESTS, {}, {"keys_before": [0, 9, 18, 23], "fewer_tiles": [0, 0, 0, 0]}),
        (*FOUR_REQUESTS, {}, {"after_fewer_rows": [0, 0, 1, 1], "after_shorter": [0, 0, 0, 1]}),
        ((64, 65, 128), (1, 1, 1), {}, {"fewer_tiles": [1, 0, 0]}),
        ((4,), (4,), {}, {"packed_rows": [None]}),  # a metadata builder's batch has no heads
        ((9, 9), (4, 2), {"num_kv_heads": 3}, {"work_items": [3, 6]}),
        ((17, 15, 4), (1, 3, 2), BLOCKS_OF_SCALES, {"rows_in_block": [0, 1, 0], "keys_in_block": [0, 1, 0]}),
        # Requests without rows or without keys.
        ((0, 5, 5), (1, 1, 1), {}, {"after_empty": [0, 1, 1], "after_no_rows": [0, 0, 0]}),
        ((5, 5, 5), (0, 1, 1), {}, {"after_empty": [0, 1, 1], "after_no_rows": [0, 1, 1]}),
        ((0, 5, 5), (1, 1, 1), {}, {"after_inner_no_rows": [0, 0, 0]}),
        ((5, 5, 5), (0, 1, 1), {}, {"after_inner_no_rows": [0, 0, 0]}),
        ((5, 5, 5, 5), (0, 1, 0, 1), {}, {"after_inner_no_rows": [0, 0, 0, 1]}),  # between the first and a later one
        ((5, 5, 5, 0, 5), (0, 1, 1, 0, 1), {}, {"after_unread_keys": [0, 1, 0, 0, 0]}),  # of the request just before
        # Blocks of rows do not begin anew in each request.
        ((20, 20), (16, 16), {}, {"late_block_of_16": [0, 0], "late_block_of_64": [0, 1]}),
        ((20, 20), (1, 15), {}, {"late_block_of_16": [0, 1], "late_block_of_64": [0, 1]}),
        ((20, 20, 20), (17, 1, 14), {}, {"late_block_of_16": [0, 1, 1], "late_block_of_64": [0, 1, 1]}),
        ((20, 20, 20), (1, 15, 0), {}, {"late_block_of_16": [0, 1, 0], "late_block_of_64": [0, 1, 0]}),
    ],
)
def test_a_request_is_compared_with_the_whole_batch_and_with_earlier_requests(
    kv_lens: tuple[int, ...], q_lens: tuple[int, ...], sizes: dict[str, int], expected: dict[str, list[int | None]]
) -> None:
    read = [*read_earlier(kv_lens, q_lens, sizes)]
    assert {name: [each[name] for each in read] for name in expected} == expected


SEVERAL = [-1] * 128


@pytest.mark.parametrize(
    ("columns", "features"),
    [
        ([0, 1, 3], ""),
        ([3, 1, 0], "unordered_entries"),
        ([1, 3, -1], "gap"),
        ([1, -1, 3], "gap gap_before_entry"),
        ([-1, 3, 1], "gap gap_before_entry unordered_entries"),
        ([-1, -1, -1], "gap no_entry empty_tile"),
        ([*SEVERAL, 1], "gap gap_before_entry empty_tile"),
        ([*SEVERAL[1:], 1], "gap gap_before_entry"),
        ([1, 3, 1], "unordered_entries repeated_entry"),
    ],
)
def test_a_request_has_features_of_the_entries_that_its_rows_select(columns: list[int], features: str) -> None:
    """The second request has two rows, the first of which selects entries in order."""
    ordered = [*range(len(columns))]
    rows = [ordered, ordered, columns]
    arguments = sparse_arguments(latent_batch([1, 2], [140, 140]), rows, 256, ragged=True)
    of_requests = features_of_call(MLA, arguments, CallLog()).of_requests
    names = {"no_entry", "empty_tile", "gap", "gap_before_entry", "unordered_entries", "repeated_entry"}
    found = [{name for name in names & each.keys() if each[name]} for each in of_requests]
    assert found == [set(), {*features.split()}]
    assert [each.get("no_key_seen", False) for each in of_requests] == ["no_entry" in each for each in found]
    assert [each["num_entries"] for each in of_requests] == [len(columns)] * 2


def test_a_request_has_its_largest_page_and_may_fill_its_bounds() -> None:
    """A request of 40 keys uses the first three columns of its row of the page table, one of 24 keys the first two."""

    def of_requests(**changes: Any) -> tuple[Any, ...]:
        return features_of_call(DECODE, ARGUMENTS[DECODE] | changes, CallLog()).of_requests

    tables = ints(7, 2, 5, 9, 9, 9, 1, 3, 9, 9, 9, 9).view(2, 6)
    assert [each["largest_page"] for each in of_requests(block_tables=tables)] == [7, 3]
    assert [each["num_entries"] for each in of_requests()] == [40, 24]  # a row without a selection reads all keys
    assert [["at_kv_bound" in each for each in of_requests(max_seq_len=most)] for most in (40, 41)] == [
        [True, False],
        [False] * 2,
    ]
    fewer = [
        ["fewer_rows_than_bound" in each for each in of_requests(**offsets(2, *ends))]
        for ends in ((0, 1, 3), (0, 0, 2))
    ]
    assert fewer == [[True, False], [False, False]]


@pytest.mark.parametrize(
    ("pages", "conditions"),
    [
        ((7, 2, 5, 1, 3), ["unordered_pages", ""]),
        ((1, 2, 5, 5, 6), ["consecutive_pages", "shared_page consecutive_pages"]),
        ((1, 4, 4, 4, 4), ["repeated_page", "repeated_page shared_page"]),
    ],
)
def test_pages_of_a_request_may_be_unordered_repeated_or_shared(pages: tuple[int, ...], conditions: list[str]) -> None:
    """The pages of the first request, which has three, and of the second, which has two."""
    tables = torch.tensor([*pages[:3], 9, 9, 9, *pages[3:], 0, 0, 0, 0], dtype=torch.int32).view(2, 6)
    of_requests = features_of_call(DECODE, ARGUMENTS[DECODE] | {"block_tables": tables}, CallLog()).of_requests
    names = {"unordered_pages", "consecutive_pages", "repeated_page", "shared_page"}
    assert [names & each.keys() for each in of_requests] == [{*each.split()} for each in conditions]


def test_a_sparse_call_has_features_of_its_arguments() -> None:
    batch = latent_batch([1], [20])

    def features(columns: list[int], **options: Any) -> dict[str, Any]:
        arguments = sparse_arguments(batch, [columns], 16, **options)
        found = features_of_call(MLA, arguments, CallLog()).features
        names = ("top_k", "selects_entries", "top_k_lens", "first_slot", "block_tables_gaps")
        return {name: found[name] for name in names if name in found}

    assert features([1, 2, 3]) == {"top_k": 3, "selects_entries": True}
    assert features([1, 2, 3, -1], lens=[2]) == {"top_k": 4, "selects_entries": True, "top_k_lens": True}
    assert features([1, 2], width=3).keys() == {"top_k", "selects_entries"}  # of one row, there is no gap
    assert features_of_call(MLA, mla_arguments(batch), CallLog()).features.get("top_k") is None
    first = sparse_arguments(batch, [[1, 2, 3]], 16)
    first["block_tables"].zero_()
    found = features_of_call(MLA, first, CallLog())
    assert found.features["first_slot"]
    assert ("gap" in found.of_requests[0], found.of_requests[0]["num_entries"]) == (False, 3)


def test_the_form_of_a_result_and_of_scale_factors_is_a_feature() -> None:
    assert "lse_of_three_axes" not in read(MLA, lse=torch.empty(1, 4), return_lse=True)
    assert "lse_of_three_axes" in read(MLA, lse=torch.empty(1, 1, 4), return_lse=True)
    problem = DecodeCall(**ARGUMENTS[DECODE]).problem()
    for factors, is_one in ((torch.empty(1), True), ((torch.empty(1), torch.empty(1)), False), (None, False)):
        found = reading._read_pages(DECODE, ARGUMENTS[DECODE] | {"kv_cache_sf": factors}, problem)
        assert found["one_factor_tensor"] is is_one


def test_sizes_of_a_case_make_features_of_its_call() -> None:
    assert read(DECODE)["page_elements"] == 16 * 64
    three_rows = arguments_of(replace(PLAIN, q_lens=(3, 3))) | {"mask": torch.ones(2, 3, 2, dtype=torch.uint16)}
    assert features_of_call(DECODE, three_rows, CallLog()).features["mask_words"] == 2
    one_row = arguments_of(replace(PLAIN, kv_lens=(40,), q_lens=(1,)))
    found = features_of_call(DECODE, one_row | {"mask": torch.ones(1, 1, 2, dtype=torch.uint16)}, CallLog()).features
    assert ("mask" in found, "odd_mask_words" in found) == (True, False)


@pytest.mark.parametrize(
    ("visible", "is_unseen"),
    [((9, 9), [False] * 2), ((0, 9), [True, False]), ((9, 0), [False] * 2), (None, [False] * 2)],
)
def test_a_row_that_sees_none_of_its_requests_keys_on_a_rank_is_a_feature(
    visible: tuple[int, int] | None, is_unseen: list[bool]
) -> None:
    """The second request has no keys, of which its row sees none."""
    arguments = arguments_of(AttentionCase(DECODE, (20, 0), (1, 1), num_kv_heads=1, group=2))
    seen = None if visible is None else torch.tensor(visible, dtype=torch.int32)
    problem = replace(DecodeCall(**arguments).problem(), num_visible=seen)
    read = [*read_bounds(problem, problem.kv_lens(), problem.q_lens())]
    assert [bool(each["unseen_keys"]) for each in read] == is_unseen
    assert [bool(each["no_key_seen"]) for each in read] == [is_unseen[0], True]


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_before_all_keys_sees_none_if_the_call_is_causal(causal: bool) -> None:
    given = arguments_of(AttentionCase(AttentionCall.CONTEXT, (2, 0, 0, 3), (3, 0, 2, 3), num_kv_heads=1, group=1))
    problem = ContextCall(**given | {"causal": causal}).problem()
    read = read_bounds(problem, problem.kv_lens(), problem.q_lens())
    assert [each["no_key_seen"] for each in read] == [causal, False, True, False]


@pytest.mark.parametrize(("columns", "apart"), [(4, [False, False, False]), (3, [False, True, True])])
def test_a_row_of_the_page_table_begins_at_a_multiple_of_four_elements_or_not(columns: int, apart: list[bool]) -> None:
    problem = DecodeCall(**arguments_of(AttentionCase(DECODE, (20,) * 3, (1,) * 3, num_kv_heads=1, group=2))).problem()
    problem = replace(problem, k_block_tables=torch.zeros(3, columns, dtype=torch.int32))
    read = read_pages(problem, problem.kv_lens(), problem.page_size)
    assert [each["table_row_apart"] for each in read] == apart


def test_strides_of_scale_factors_are_compared_with_those_of_the_cache() -> None:
    call = built_call(Configuration(DECODE, {"dtypes": DtypePair("bf16/nvfp4"), "num_kv_heads": 2}, 1), Ranges(), CPU)
    assert "other_factor_strides" not in features_of_call(DECODE, call.given, CallLog()).features
    assert reading._strides(torch.zeros(1, 2, 3, 5), 8) == [8 * 15, 8 * 5]  # without that of the only page
    k_factors, v_factors = call.given["kv_cache_sf"]
    apart = torch.stack((v_factors, v_factors), dim=1)[:, 0]
    for changed in ((apart, v_factors), (k_factors, apart)):
        found = features_of_call(DECODE, {**call.given, "kv_cache_sf": changed}, CallLog()).features
        assert found["other_factor_strides"]


@pytest.mark.parametrize(
    ("q_lens", "padding", "is_uneven"), [((3, 1), 0, True), ((2, 1), 0, False), ((2, 1), 1, True), ((2, 2), 0, False)]
)
def test_shares_of_rows_may_be_whole_and_uneven(q_lens: tuple[int, int], padding: int, is_uneven: bool) -> None:
    given = arguments_of(AttentionCase(AttentionCall.CONTEXT, (9, 9), q_lens, num_kv_heads=1, group=1))
    given["query"] = torch.cat([given["query"], given["query"][:padding]])
    found = features_of_call(AttentionCall.CONTEXT, given, CallLog()).features
    assert ("uneven_shares" in found) is is_uneven


@pytest.mark.parametrize(
    ("kv_len", "cells", "lens", "features"),
    [
        # Entries may follow the columns in use.
        (20, [4, 5, 6, 7, -1], [4], ""),
        (20, [4, 5, 6, 7, 8], [4], "entry_after_last unused_first_columns"),
        (20, [4, 5, 6, 7, 8], [5], ""),
        (20, [4, -1, 6, -1, -1], [3], ""),
        (20, [4, 5, 6, -1, 8], [3], "entry_after_last unused_first_columns"),
        (20, [4, -1, -1, 0], [3], "entry_after_last unused_first_columns"),
        # Rows may use equally many columns or not.
        (200, [0] * 128, [64, 64], "entry_after_last unused_first_columns"),
        (200, [0] * 128, [128, 64], "columns_differ entry_after_last unused_first_columns"),
        (200, [0] * 128, [64, 128], "columns_differ entry_after_last unused_first_columns"),
        # Blocks of 32 and 64 columns.
        (200, [1] * 48, [32], "entry_after_last unused_first_columns"),
        (200, [*[1] * 32, *[-1] * 16], [20], "entry_after_last unused_first_columns"),
        (200, [*[-1] * 32, 1, *[-1] * 31], [64], "empty_block_of_32"),
        (200, [*[-1] * 64, 1, *[-1] * 63], [128], "empty_block_of_32 empty_block_of_64"),
        (200, [1, *[-1] * 62, 1], [64], ""),
        (200, [1, *[-1] * 63], [64], ""),
        # Of the first 128 columns, some are not in use and hold entries.
        (200, [*[1] * 128, *[-1] * 16], [112], "entry_after_last unused_first_columns"),
        (200, [1] * 144, [128], "entry_after_last"),
        (200, [*[1] * 112, *[-1] * 32], [112], ""),
    ],
)
def test_the_columns_of_a_request_s_rows_are_features(
    kv_len: int, cells: list[int], lens: list[int], features: str
) -> None:
    names = {"entry_after_last", "unused_first_columns", "empty_block_of_32", "empty_block_of_64", "columns_differ"}
    arguments = sparse_arguments(latent_batch([len(lens)], [kv_len]), [[0] * len(cells)] * len(lens), 256, lens=lens)
    arguments["block_tables"] = torch.tensor([[cells] * len(lens)], dtype=torch.int32)
    (only,) = features_of_call(MLA, arguments, CallLog()).of_requests
    assert (only["fewest_columns"], only["most_columns"]) == (min(lens), max(lens))
    assert names & only.keys() == {*features.split()}


@pytest.mark.parametrize(
    ("cells", "lens", "features"),
    [
        ({0: 3, 128: 3}, (129, 129), ""),
        ({0: 3}, (129, 129), "no_compressed_entry"),
        ({128: 3}, (129, 129), "no_window_entry"),
        ({0: 99, 128: 31}, (129, 129), ""),
        ({0: 3, 128: 32}, (129, 129), "entry_past_window_page"),
        ({0: 3, 128: 32}, (129, 129), "entry_past_window_page entry_past_window_pool"),
        ({0: 3, 128: 32}, (128, 128), "no_compressed_entry"),
        ({0: 3, 128: 3}, (130, 129), "other_lens_at_request"),
    ],
)
def test_the_entries_of_both_pools_are_features(cells: dict[int, int], lens: tuple[int, int], features: str) -> None:
    """A request of 140 keys has two rows. A page of the pool of recent tokens has 32 of them."""
    call = built_call(Configuration(AttentionCall.DSV4_DECODE, {"head_dim": 64, "q_len": 2}, 1), Ranges(), CPU)
    given = {**call.given, "seq_lens": ints(140), "cum_seq_lens_q": None, "sparse_topk_lens": ints(*lens)}
    given |= {"query": given["query"].reshape(-1, 2, *given["query"].shape[-2:])[:1]}
    given["sparse_indices"] = torch.full_like(given["sparse_indices"][:2], -1)
    if "entry_past_window_pool" in features:
        given["swa_kv_cache"] = given["swa_kv_cache"][:1]
    for column, cell in cells.items():
        given["sparse_indices"][:, column] = cell
    found = features_of_call(AttentionCall.DSV4_DECODE, given, CallLog())
    names = {"no_window_entry", "no_compressed_entry", "entry_past_window_page", "entry_past_window_pool"}
    names |= {"other_lens_at_request"}
    (only,) = found.of_requests
    assert names & only.keys() == {*features.split()}


def test_pools_of_two_page_sizes_are_a_feature() -> None:
    problem = MLADecodeCall(**ARGUMENTS[MLA]).problem()
    for page_size in (problem.page_size, 2 * problem.page_size):
        object.__setattr__(problem, "window_cache", torch.zeros(1, 1, page_size, 1))
        found = reading._read_pages(AttentionCall.DSV4_DECODE, {}, problem)
        assert found["other_page_size"] is (page_size > problem.page_size)


@pytest.mark.parametrize(
    ("case", "features"),
    [
        # Keys and the steps of a draft may fill pages, and the last page of a prefix may make the steps reach another.
        (DraftListsCase((5, 13), topk=2, page_size=16), "steps_fill_pages"),
        (DraftListsCase((5, 14), topk=2, page_size=16), "steps_reach_page"),
        (DraftListsCase((2,), num_steps=15, topk=2, page_size=16), "steps_reach_page"),
        (DraftListsCase((32,), num_steps=17, topk=2, page_size=16), ""),
        (DraftListsCase((13,), topk=2), ""),
        (DraftListsCase((14,), topk=2), ""),
        # Prefixes are compared with the window and the sinks.
        (DraftListsCase((4, 0), window_size=4, sink_size=2), "shorter_than_window"),
        (DraftListsCase((5, 0), window_size=4, sink_size=2), "shorter_than_window window_meets_sinks"),
        (DraftListsCase((6, 0), window_size=4, sink_size=2), ""),
        (DraftListsCase((1,), window_size=0, sink_size=2), ""),
        (DraftListsCase((3,), window_size=4, sink_size=0), "shorter_than_window"),
        # Tokens that seq_lens leaves out, and padding rows, may reach a new page.
        (VERIFY, ""),
        (replace(VERIFY, prefix_lens=(13, 1)), "uncounted_reach_page"),
        (replace(VERIFY, prefix_lens=(16, 1)), "uncounted_reach_page"),
        (replace(VERIFY, prefix_lens=(13, 1), mode=ForwardMode.EXTEND), ""),
        (DRAFT_EXTEND, ""),
        (replace(DRAFT_EXTEND, prefix_lens=(13, 1)), "padding_reaches_page"),
        (replace(DRAFT_EXTEND, prefix_lens=(15, 1)), "padding_reaches_page"),
        (replace(DRAFT_EXTEND, prefix_lens=(16, 1)), ""),
        (replace(DRAFT_EXTEND, prefix_lens=(13, 1), q_lens=(4, 4)), ""),
    ],
    ids=repr,
)
def test_a_builder_s_case_has_features_of_its_lengths_and_pages(case: Any, features: str) -> None:
    names = {"steps_fill_pages", "steps_reach_page", "shorter_than_window", "window_meets_sinks"}
    names |= {"uncounted_reach_page", "padding_reaches_page"}
    assert names & features_of_case(case).features.keys() == {*features.split()}


@pytest.mark.parametrize(("lens", "fewest", "is_more"), [([2, 3], 2, False), ([1, 4], 1, True), ([3, 3], 3, True)])
def test_the_columns_of_rows_are_compared_with_their_keys(lens: list[int], fewest: int, is_more: bool) -> None:
    """The two rows of the request have two and three keys."""
    arguments = sparse_arguments(latent_batch([2], [3]), [[0] * 4] * 2, lens=lens)
    (only,) = features_of_call(MLA, arguments, CallLog()).of_requests
    assert (only["fewest_columns"], "columns_after_row" in only) == (fewest, is_more)


@pytest.mark.parametrize(
    ("place", "backend", "is_used"),
    [
        (0, "xqa", False),  # counters, which the lab's checks watch
        (SEMAPHORE_BYTES, "xqa", True),
        (SEMAPHORE_BYTES + 63, "xqa", True),
        (SEMAPHORE_BYTES + 64, "xqa", False),  # only the beginning is read
        (0, "trtllm-gen", True),
        (63, "trtllm-gen", True),
        (64, "trtllm-gen", False),
        (SEMAPHORE_BYTES, "trtllm-gen", True),
    ],
)
def test_scratch_was_used_if_its_beginning_is_not_zero(place: int, backend: str, is_used: bool) -> None:
    workspace = torch.zeros(SEMAPHORE_BYTES + 128, dtype=torch.uint8)
    workspace[place] = 1
    added = {"used_scratch": True} if is_used else {}
    assert read(DECODE, backend=backend, workspace_buffer=workspace) == read(DECODE, backend=backend) | added


def test_a_call_that_the_lab_refuses_has_the_features_of_earlier_calls_alone() -> None:
    assert read(DECODE, window_left=-2) == {"calls_before": 0}


@pytest.mark.parametrize(
    ("kv_len", "q_len", "window_left", "page_size", "conditions"),
    [
        (64, 1, -1, TILE, ""),
        (65, 1, -1, TILE, "partial_page"),
        (64, 1, -1, 1, ""),
        (33, 1, -1, 16, "partial_page"),
        (1, 1, -1, 16, "partial_page no_prefix"),
        (257, 1, -1, 512, "partial_page"),
        (256, 1, -1, 512, "partial_page"),
        (1, 1, -1, 1, "no_prefix"),
        (
            512,
            1,
            -1,
            TILE,
            "",
        ),
        (0, 1, -1, TILE, "no_keys fewer_keys"),
        (0, 0, -1, TILE, "no_keys no_rows no_prefix"),
        (70, 0, -1, TILE, "partial_page no_rows"),
        (3, 3, -1, TILE, "partial_page no_prefix"),
        (24, 24, -1, TILE, "partial_page no_prefix"),
        (48, 48, -1, TILE, "partial_page no_prefix rows_in_tiles_of_32"),
        (4, 6, -1, TILE, "partial_page fewer_keys rows_before_keys"),
        (20, 1, 19, TILE, "partial_page"),
        (20, 1, 18, TILE, "partial_page hidden_keys window_in_page"),
        (20, 1, 0, TILE, "partial_page hidden_keys window_in_page"),
        (40, 1, 7, 16, "partial_page hidden_keys hidden_page window_with_page first_window_with_page"),
        (40, 2, 7, 16, "partial_page hidden_keys hidden_page window_in_page window_with_page window_at_page_end"),
        (40, 1, 23, 16, "partial_page hidden_keys hidden_page window_with_page first_window_with_page"),
        (40, 1, 24, 16, "partial_page hidden_keys window_in_page window_at_page_end"),
        (40, 1, 25, 16, "partial_page hidden_keys window_in_page"),
        (40, 4, 21, 16, "partial_page hidden_keys window_in_page window_with_page window_at_page_end"),
        (80, 1, 15, 256, "partial_page hidden_keys hidden_tile hidden_tile_of_64 window_in_page"),
        (80, 1, 16, 256, "partial_page hidden_keys window_in_page"),
    ],
)
def test_the_lengths_of_a_request_say_its_conditions(
    kv_len: int, q_len: int, window_left: int, page_size: int, conditions: str
) -> None:
    (only,) = CallFeatures.of_lengths({}, (kv_len,), (q_len,), window_left, page_size).of_requests
    found = {name for name, value in only.items() if value is True} - OF_POSITIONS
    assert only["prefix_len"] == max(kv_len - q_len, 0)
    assert found == {"first_request", "last_request", *conditions.split()}


OF_POSITIONS = {"prefix", "rows_reach_page", "windows_in_tiles_of_32", "windows_in_tiles_of_64"}


@pytest.mark.parametrize(
    ("kv_len", "q_len", "window_left", "conditions"),
    [
        (16, 16, -1, ""),
        (17, 17, -1, ""),
        (17, 1, -1, "prefix rows_reach_page"),
        (18, 1, -1, "prefix"),
        (18, 0, -1, ""),
        (18, 3, -1, "prefix rows_reach_page"),
        (32, 16, -1, "prefix rows_reach_page"),
        (20, 30, -1, ""),
        (100, 4, 68, ""),
        (100, 4, 67, "windows_in_tiles_of_32"),
        (98, 4, 66, ""),
        (100, 4, 71, ""),
        (140, 4, 75, "windows_in_tiles_of_32 windows_in_tiles_of_64"),
        (140, 4, 76, ""),
        (5, 4, 3, ""),
    ],
)
def test_the_positions_of_rows_and_windows_are_conditions(
    kv_len: int, q_len: int, window_left: int, conditions: str
) -> None:
    (only,) = CallFeatures.of_lengths({}, (kv_len,), (q_len,), window_left, 16).of_requests
    names = OF_POSITIONS if window_left < 0 else {name for name in OF_POSITIONS if name.startswith("windows")}
    assert names & only.keys() == {*conditions.split()}


@pytest.mark.parametrize(
    ("kv_lens", "pages", "conditions"),
    [
        ((20, 20, 32), [2, 2, 2], ["first_request", "", "last_request"]),
        ((20, 0, 5), [2, 0, 1], ["first_request before_no_keys", "", "after_no_keys last_request"]),
    ],
)
def test_requests_are_distinguished_by_their_places_and_neighbours(
    kv_lens: tuple[int, ...], pages: list[int], conditions: list[str]
) -> None:
    of_requests = features_of_case(replace(CASE, kv_lens=kv_lens)).of_requests
    assert [(each["request"], each["pages"]) for each in of_requests] == [*enumerate(pages, 1)]
    assert [each.get("previous_kv_len") for each in of_requests] == [None, *kv_lens[:-1]]
    places = {"first_request", "last_request", "after_no_keys", "before_no_keys"}
    assert [places & each.keys() for each in of_requests] == [{*each.split()} for each in conditions]


@pytest.mark.parametrize(
    ("kv_lens", "q_lens", "conditions"),
    [
        ((5, 5), (1, 1), ""),
        ((5, 6), (1, 1), "unequal_kv_lens not_descending"),
        ((6, 5), (1, 1), "unequal_kv_lens"),
        ((5, 5), (1, 2), "unequal_q_lens"),
        ((5, 0), (1, 1), "unequal_kv_lens some_no_keys some_empty mixed_prefixes"),
        ((5, 1), (1, 1), "unequal_kv_lens mixed_prefixes"),
        ((0, 0), (1, 1), "some_no_keys all_no_keys some_empty"),
        ((5, 5), (0, 1), "unequal_q_lens some_no_rows some_empty"),
        ((5, 5), (0, 0), "some_empty"),
        ((), (), "all_no_keys"),
    ],
)
def test_the_lengths_of_a_batch_say_its_conditions(
    kv_lens: tuple[int, ...], q_lens: tuple[int, ...], conditions: str
) -> None:
    numbers = {"page_size": TILE, "requests": len(kv_lens), "rows_of_batch": sum(q_lens)}
    numbers |= {"longest_kv_len": max(kv_lens, default=0), "most_q_len": max(q_lens, default=0)}
    numbers |= {"first_kv_len": kv_lens[0], "first_pages": -(-kv_lens[0] // TILE)} if kv_lens else {}
    assert CallFeatures.of_lengths({}, kv_lens, q_lens).features == numbers | named(conditions)


@pytest.mark.parametrize("group", [1, 3])
def test_a_case_and_its_plain_call_have_the_same_features(group: int) -> None:
    case = replace(CASE, group=group)
    run = CaseRun(references, case, CPU)
    run.call(run.build())
    of_case, of_call = features_of_case(case), run.called
    of_pages = {"largest_page", "repeated_page", "shared_page", "unordered_pages", "consecutive_pages"}
    only_of_call = {"no_key_seen", "table_row_apart"} | of_pages
    of_requests = [{name: each[name] for name in each.keys() - only_of_call} for each in of_call.of_requests]
    assert [*of_case.of_requests] == of_requests
    assert (of_case.q_lens, of_call.q_lens) == ((2, 2, 2), (2, 2, 2))
    shared = of_case.features.keys() & of_call.features.keys()
    assert {*["window_left", "group", "head_dim", "requests", "contents", "function", "dtype", "page_size"]} <= shared
    assert {name: of_case.features[name] for name in shared} == {name: of_call.features[name] for name in shared}
    for found in (of_case, of_call):
        assert found.features["group"] == group


def test_a_call_has_the_contents_of_its_own_inputs() -> None:
    run = CaseRun(references, CASE, CPU)
    run.call(run.build(replace(CASE, contents=Contents.COUNTED)))
    assert run.called.features["contents"] == "counted"


@pytest.mark.parametrize("kind", ["output", "return", "other", "lists", "metadata", "memory", "invariants"])
def test_a_result_of_a_whole_call_has_the_features_of_any_of_its_requests(kind: str) -> None:
    run = CaseRun(references, CASE, CPU)
    run.call(run.build())
    run.expect("a result", [], kind)
    assert ("kv_len" in run.results[-1].features) is (kind not in ("memory", "invariants"))


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

    assert found(ForwardMode.DECODE) == named("mode=decode uncounted=none query_rows=one")
    step = "mode=decode uncounted=draft_step leaves_out_tokens query_rows=one draft_step=1"
    assert found(ForwardMode.DECODE, draft_step=1) == named(step)
    assert found(ForwardMode.DECODE, draft_step=FROZEN_KV_STEP)["uncounted"] == "none"
    extend = "mode=draft_extend uncounted=none query_rows=accepted extends_draft"
    assert found(ForwardMode.DRAFT_EXTEND) == named(extend)
    for mode, is_prefill in ((ForwardMode.EXTEND, True), (ForwardMode.TARGET_VERIFY, False)):
        assert ("prefill" in features_of_case(ForwardCase(mode, "tiny", (3,), (1,))).features) is is_prefill


@pytest.mark.parametrize(
    ("values", "apart"),
    [
        ({"query": "heads apart", "group": 2}, True),
        ({"query": "rows apart", "group": 2}, False),
        ({"query": "rows apart"}, False),
    ],
)
def test_heads_of_a_query_may_lie_apart(values: dict[str, Any], apart: bool) -> None:
    arguments = built_call(Configuration(DECODE, values), Ranges(), torch.device("cpu")).given
    alone = {**arguments, "query": torch.empty_strided(arguments["query"].shape, (1000, 80, 1), dtype=torch.bfloat16)}
    assert ("query_heads_apart" in features_of_call(DECODE, arguments, CallLog()).features) is apart
    has_several = arguments["query"].shape[1] > 1
    assert ("query_heads_apart" in features_of_call(DECODE, alone, CallLog()).features) is has_several


@pytest.mark.parametrize(("window_left", "hides"), [(-1, False), (0, True), (2, True), (3, False)])
def test_a_window_may_hide_rows_of_its_own_request(window_left: int, hides: bool) -> None:
    assert read_request(0, (20,), 4, 16, window_left)["hidden_rows"] is hides


@pytest.mark.parametrize(("kv_len", "several"), [(16, False), (17, True), (19, True), (20, False), (3, False)])
def test_rows_of_a_request_may_lie_in_several_pages(kv_len: int, several: bool) -> None:
    assert read_request(0, (kv_len,), 4, 16, -1)["rows_in_pages"] is several
    assert not read_request(0, (kv_len,), 0, 16, -1)["rows_in_pages"]


@pytest.mark.parametrize(("kv_lens", "is_first"), [((4, 9), True), ((9, 4), False), ((), False)])
def test_the_first_request_may_have_no_prefix(kv_lens: tuple[int, ...], is_first: bool) -> None:
    assert read_batch(kv_lens, (4,) * len(kv_lens), 16, -1)["first_no_prefix"] is is_first


def test_a_configuration_has_the_values_that_are_not_default() -> None:
    found = features_of_case(Configuration(DECODE, {"group": 3})).features
    assert found == {"function": "decode", "group=3": True}


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
            Number: lambda: ("==", ">=", "<=", *RELATIONS),
            Choice: lambda: ("==", "!="),
        }[type(feature)]
        phrases = [feature.phrase(operator, 3) for operator in dict.fromkeys(operators())]
        assert len(set(phrases)) == len(phrases)
        assert not any(set("{|}") & set(phrase) or "  " in phrase for phrase in phrases)


@pytest.mark.parametrize(
    ("feature", "values", "tests"),
    [
        (Choice("it"), ("a", None, "b"), [("==", "a", 1), ("==", "b", 1)]),
        (Choice("it"), "aba", [("==", "a", 1), ("==", "b", 1)]),
        (Choice("it"), "abc", [(op, name, math.log2(3) + bits) for name in "abc" for op, bits in CHOICES]),
        (Choice("it", is_negated=False), "abcd", [("==", name, 2) for name in "abcd"]),
        (Condition("it"), (True, None), [("is", True, 0), ("is not", True, 2.5)]),
        (Number("it"), (3, None, 1), [(op, step, 1 + more) for step in (1, 3) for op, more in NUMBERS]),
        (
            Number("it", several="several"),
            (1, 3),  # there is no 2: three or more are several
            [(">=", 2, 0.5) if (op, n) == (">=", 3) else (op, n, 1 + more) for n in (1, 3) for op, more in NUMBERS],
        ),
        (
            Number("it"),
            range(12),
            [(op, step, 2.5 + bits + uneven(op, step)) for step in range(12) for op, bits in NUMBERS],
        ),
        (  # the first number above a power of 2 that the same values exceed; 16 and 20 stay, since 17 is among the values
            Number("it", is_divided=True),
            (9, 16, 17, 20, 128, 261),
            [
                (op, named if op == ">=" else step, 2.5 + bits + uneven(op, named))
                for step, named in ((9, 9), (16, 16), (17, 17), (20, 20), (128, 65), (261, 257))
                for op, bits in NUMBERS
            ],
        ),
        (Number("it"), range(13), of_steps({0, 1, 2, 3, 5, 9, 12}, {0, 1, 2, 4, 8, 12})),
        (Number("it"), range(0, 130, 4), of_steps({0, 4, 8, 12, 20, 36, 68, 128}, {0, 4, 8, 16, 32, 64, 128})),
    ],
)
def test_the_tests_of_a_feature_and_their_bits(feature: CaseFeature, values: Any, tests: list[Any]) -> None:
    """Of many numbers, intervals begin next after a power of two, where kernels change, or end at one."""
    trivial = [
        next((each for each in order if each[0] == op), None) for op, order in ((">=", tests), ("<=", tests[::-1]))
    ]
    expected = tests if not isinstance(feature, Number) else [each for each in tests if each not in trivial]
    assert list(feature.tests(feature.column(values))) == expected


def test_the_divisors_and_relations_of_a_number_and_their_bits() -> None:
    heads, keys = Number("it", Cost.DERIVED, "heads"), Number("it", Cost.VALUE, "keys", is_divided=True)
    of_remainders = {"multiple": 4.0, "no multiple": 4.0}
    assert {operator: bits for operator, _, bits in heads.divisions()} == of_remainders | {"no power": 4.0}
    assert {operator: bits for operator, _, bits in Number("it", Cost.DERIVED, "sizes").divisions()} == of_remainders
    assert {divisor for _, divisor, _ in keys.divisions()} == {4, 16, 32, 64, 128, 256}
    assert {operator: bits for operator, _, bits in keys.divisions()} == dict.fromkeys(REMAINDERS, 3.5)
    assert not [
        *Number("it", Cost.VALUE, "pages").divisions(),
        *Number("it", Cost.POSITION, is_divided=True).divisions(),
    ]
    others = {">": 3.5, "<": 3.5, "==": 3.5, "differs": 6.0}
    assert dict(heads.relations(Number("it", Cost.VALUE, "keys heads"))) == others
    divisor = Number("it", Cost.VALUE, "keys heads", is_divisor=True)
    assert dict(heads.relations(divisor)) == others | dict.fromkeys(REMAINDERS, 3.5)
    assert dict(divisor.relations(heads)) == others
    assert not dict(heads.relations(keys))


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
        ("kv_len", "after multiple", 64, "a request's number of keys is 1 more than a multiple of 64"),
        ("group", "no power", 2, "the number of query heads per K/V head is no power of 2"),
        ("window_left", "multiple", "page_size", "window_left is a multiple of page_size"),
        ("page_size", "==", "num_kv_heads", "page_size is equal to num_kv_heads"),
        ("dtype", "==", "fp16", "the query's dtype is fp16"),
        ("dtype", "!=", "fp16", "the query's dtype is not fp16"),
        ("contents", "==", "low", "the data of the case is “all logits about -200,000, equal in a request”"),
        ("sinks=some minus infinity", "is", True, "sinks is “some minus infinity”"),
        ("group=3", "is", True, "group is “3”"),
        ("group=3", "is not", True, "group is not “3”"),
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
    elements = map(int, example.where.split("elements ")[1].split(", "))
    shown = dict(zip(elements, example.got, strict=True))
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
    assert later() == {"same_seq_lens"}
    assert later(bmm1_scale=0.1251) == {"same_seq_lens", "other_bmm1_scale"}
    assert later(bmm1_scale=torch.tensor([0.125])) == {"same_seq_lens"}
    assert later(bmm1_scale_log2=torch.tensor([1.0])) == {"same_seq_lens", "other_bmm1_scale"}
    assert later(attention_sinks=torch.zeros(3)) == {"same_seq_lens", "other_sinks"}
    assert later(window_left=4) == {"same_seq_lens", "other_window_left"}
    assert later(seq_lens=torch.tensor([20, 0, 31])) == {"other_seq_lens", "shorter_request"}
    assert later(seq_lens=torch.tensor([20, 1, 32])) == {"other_seq_lens", "longer_request"}


def test_a_call_is_compared_with_the_lengths_of_all_earlier_ones() -> None:
    log, arguments = CallLog(), arguments_of(CASE)

    def read(*lens: int) -> set[str]:
        found = log.read(arguments | {"seq_lens": ints(*lens)})
        return {name for name in ("same_seq_lens", "fewer_requests", "shorter_request") if found[name]}

    assert read(5, 5) == set()
    assert read(5, 5) == {"same_seq_lens"}
    assert read(6, 7, 8) == set()
    assert read(5, 5) == {"fewer_requests", "shorter_request"}
    assert read(9, 9, 9) == set()


def test_a_value_is_compared_with_all_earlier_values_of_its_tensor_and_with_none_of_a_tensor_that_is_gone() -> None:
    log, arguments = CallLog(), arguments_of(CASE)
    scale = torch.tensor([0.5])
    log.read(arguments | {"bmm1_scale": scale})
    storage = scale.untyped_storage()
    del scale  # where the next tensor lies depends on the allocator, and the features must not
    other = torch.empty(0).set_(storage, 0, (1,)).mul_(2)  # type: ignore[call-overload]
    assert not log.read(arguments | {"bmm1_scale": other})["written_bmm1_scale"]
    assert log.read(arguments | {"bmm1_scale": other.div_(2)})["written_bmm1_scale"]
    assert log.read(arguments | {"bmm1_scale": other.mul_(2)})["written_bmm1_scale"]  # it had another value between


def test_a_call_knows_what_was_written_since_an_earlier_one() -> None:
    log, arguments = CallLog(), arguments_of(CASE)
    log.read(arguments)
    arguments["seq_lens"][2] = 30
    arguments["kv_cache"][0][0] = 0
    found = log.read(arguments)
    written = {name for name, value in found.items() if value and name.startswith("written")}
    assert written == {"written_seq_lens", "written_kv_cache"}
    features = features_of_call(DECODE, arguments, log).features
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


def test_a_block_sparse_call_has_the_lengths_of_its_longest_heads() -> None:
    case = AttentionCase(DECODE, (100, 16, 37), (1, 1, 1), head_pages=HeadPages.SOME_NONE)
    arguments = arguments_of(case)
    found = features_of_call(case.interface, arguments, CallLog())
    assert found.features["block_sparse"] is found.features["head_lengths_differ"] is True
    assert [request["kv_len"] for request in found.of_requests] == arguments["seq_lens"].amax(dim=0).tolist()
    alike = features_of_call(case.interface, arguments_of(replace(case, head_pages=HeadPages.ALL)), CallLog()).features
    assert (alike["block_sparse"], "head_lengths_differ" in alike) == (True, False)
