"""The features that problems ask for: every field is classified, and every feature is seen where it begins."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from lab.calls import ContextCall, DecodeCall, Feature, MLADecodeCall, RaggedAttention, RaggedContextCall
from lab.calls.dsv4_decode import TwoPools
from lab.calls.features import FIELDS
from lab.calls.problem import AttentionProblem
from tests.cases import context_arguments, decode_arguments, latent_batch, random_batch, sparse_arguments
from tests.kernels.adapter_calls import ragged


def test_every_field_is_declared_and_no_other() -> None:
    names = {field.name for problem in (TwoPools, RaggedAttention) for field in fields(problem)}
    assert names == set(FIELDS)


def test_every_feature_can_be_asked_for() -> None:
    asked = {feature for asks in FIELDS.values() for feature in asks}
    assert asked == set(Feature) - {Feature.UNDECLARED}


def posed(call: str = "decode", q_len: int = 1, **changes: Any) -> AttentionProblem:
    """The problem of a plain call of two requests, 4/2 heads of 64, keys up to 20, with some arguments changed."""
    batch = random_batch([q_len] * 2, [5, 20], head_dim=64)
    given = {"out_dtype": None, "return_lse": False, "bmm2_scale": 1.0} | changes
    if call == "context":
        return ContextCall(**context_arguments(batch, 16, **given)).problem()
    return DecodeCall(**decode_arguments(batch, 16, **given)).problem()


def nvfp4(page_size: int, backend: str) -> dict[str, Any]:
    packed = torch.zeros(20, 2, page_size, 32, dtype=torch.uint8)
    factors = torch.zeros(20, 2, page_size, 4).to(torch.float8_e4m3fn)
    tables = torch.zeros(2, -(-20 // page_size), dtype=torch.int32)
    return {"kv_cache": (packed, packed), "kv_cache_sf": (factors, factors), "block_tables": tables, "backend": backend}


STACKED = torch.zeros(5, 2, 2, 16, 64, dtype=torch.bfloat16)
OTHER_V = (STACKED[:, 0], torch.zeros(5, 2, 16, 64, dtype=torch.bfloat16))
ASKED: list[tuple[dict[str, Any], set[Feature]]] = [
    ({}, set()),
    ({"bmm1_scale": 0.5}, set()),
    ({"sinks": torch.zeros(4)}, {Feature.SINKS}),
    ({"bmm1_scale": torch.ones(1)}, {Feature.TENSOR_SCALES}),
    ({"bmm2_scale": torch.ones(1)}, {Feature.TENSOR_SCALES, Feature.V_SCALE}),
    ({"bmm2_scale": 0.5}, {Feature.V_SCALE}),
    ({"window_left": 0}, {Feature.WINDOW}),
    ({"window_left": 19}, {Feature.WINDOW}),
    ({"window_left": 20}, set()),  # as wide as the longest request
    ({"out": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}, {Feature.OUT}),
    ({"return_lse": True}, {Feature.LSE}),
    ({"skip_softmax_threshold_scale_factor": 1e-30}, {Feature.SKIP_SOFTMAX}),
    ({"skip_softmax_threshold_scale_factor": 0.0}, set()),
    ({"bf16q_fp8kv_transform_mode": "k_only", "o_scale": None}, set()),
    ({"lse": torch.zeros(2, 4)}, {Feature.LSE}),
    ({"lse": torch.zeros(2, 8)[:, ::2]}, {Feature.LSE, Feature.STRIDED_LSE}),
    ({"query": torch.zeros(2, 8, 64, dtype=torch.bfloat16)[:, ::2]}, {Feature.STRIDED_QUERY}),
    ({"separate_tables": True}, {Feature.SEPARATE_TABLES}),
    ({"kv_cache": STACKED}, set()),
    ({"kv_cache": OTHER_V}, {Feature.OTHER_V_STRIDES}),
    (
        {
            "enable_block_sparse_attention": True,
            "block_tables": torch.zeros(2, 2, 2, dtype=torch.int32),
            "seq_lens": torch.full((2, 2), 20, dtype=torch.int32),
        },
        {Feature.BLOCK_SPARSE},
    ),
    ({"ragged": True}, {Feature.RAGGED_ROWS}),
    ({"q_len": 2}, {Feature.SEVERAL_ROWS}),
    ({"q_len": 2, "mask": torch.zeros(2, 2, 2, dtype=torch.uint16)}, {Feature.SEVERAL_ROWS, Feature.MASK}),
    ({"call": "context", "q_len": 2}, {Feature.SEVERAL_ROWS, Feature.RAGGED_ROWS}),
    ({"call": "context", "causal": False}, {Feature.NON_CAUSAL, Feature.RAGGED_ROWS}),
    (nvfp4(2, "xqa"), {Feature.NVFP4, Feature.PLAIN_FACTORS}),  # pages that trtllm-gen does not interleave
    (nvfp4(4, "trtllm-gen"), {Feature.NVFP4, Feature.INTERLEAVED_FACTORS}),
]


@pytest.mark.parametrize(("changes", "features"), ASKED)
def test_a_call_asks_for_what_departs_from_the_plain_one(changes: dict[str, Any], features: set[Feature]) -> None:
    assert posed(**changes).features() == features


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({}, {Feature.TOP_K}),
        ({"width": 5}, {Feature.TOP_K, Feature.STRIDED_TOP_K}),
        ({"lens": [1, 3]}, {Feature.TOP_K, Feature.TOP_K_LENS}),
    ],
)
def test_a_call_with_selected_entries_asks_for_them(options: dict[str, Any], features: set[Feature]) -> None:
    arguments = sparse_arguments(latent_batch([1, 1], [5, 20]), [[0, 1, 2, 3]] * 2, **options)
    features_of_mla = {Feature.OTHER_V_STRIDES, Feature.OUT, Feature.LSE}
    assert MLADecodeCall(**arguments).problem().features() - features_of_mla == features


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window_left", [0, 6, 7, 8])
def test_a_ragged_call_asks_for_its_rows_and_window(is_causal: bool, window_left: int) -> None:
    given = ragged() | {"is_causal": is_causal, "window_left": window_left if is_causal else -1}
    given |= {"seq_lens": torch.tensor([7], dtype=torch.int32), "max_kv_len": 7, "batch_size": 1, "max_q_len": 2}
    offsets = {"cum_seq_lens_q": torch.tensor([0, 2], dtype=torch.int32)}
    offsets |= {"cum_seq_lens_kv": torch.tensor([0, 7], dtype=torch.int32)}
    features = RaggedContextCall(**given | offsets).problem().features()
    of_rule = {Feature.NON_CAUSAL} if not is_causal else {Feature.WINDOW} if window_left < 7 else set()
    assert features - {Feature.OUT, Feature.V_SCALE} == of_rule | {Feature.SEVERAL_ROWS, Feature.RAGGED_ROWS}
