"""The models of split keys and of draft lists are right; test_matrix.py shows that each mutant is not."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.models.draft_lists import DraftListsModel
from corpus.models.split_kv import SplitKV
from corpus.wrong import CONTEXT, DECODE
from lab import references
from lab.calls.problem import NVFP4_BLOCK
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.references import generate_draft_decode_kv_indices
from lab.references import trtllm_batch_context_with_kv_cache as reference_context
from lab.references import trtllm_batch_decode_with_kv_cache as reference_decode
from lab.references.errors import compare, eager_attention
from lab.references.softmax_attention import visible_keys
from tests import latent_cases
from tests.cases import Batch, context_arguments, decode_arguments, pack_mask, random_batch

DECODE_RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 70},
    "narrow window": {"window_left": 0},
    "sinks": {"sinks": torch.tensor([3.0, -2.0, 0.5, 6.0])},
    "window and sinks": {"window_left": 33, "sinks": torch.tensor([3.0, -math.inf, 0.5, 4.0])},
    "scales": {"bmm1_scale": 0.3, "bmm2_scale": -2.5},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LENGTHS = {
    "boundaries": (1, (1, 63, 64, 65, 16, 128)),
    "zero": (1, (0, 200, 17)),
    "verify": (4, (130, 4, 65, 300)),
    "verify, shorter than its rows": (5, (3, 0, 5, 66)),
}


def assert_right(function: str, batch: Batch, arguments: dict[str, Any], masks: Any = None) -> None:
    """The model's output is within the judge's bound of the reference's in float64, and its LSE is the reference's."""
    out_dtype = arguments.pop("out_dtype")
    truth, lse = getattr(references, function)(**arguments | {"out": None, "lse": None}, out_dtype=torch.float64)
    got = getattr(SplitKV(), function)(**arguments, out_dtype=out_dtype)
    assert_within_bounds(batch, arguments, got, (truth, lse), out_dtype, masks)


def assert_within_bounds(
    batch: Batch,
    arguments: dict[str, Any],
    got: tuple[Tensor, Tensor],
    truth: tuple[Tensor, Tensor],
    out_dtype: torch.dtype,
    masks: Any = None,
) -> None:
    """Output and LSE of all rows, by the control that eager arithmetic of the batch's dtype makes."""
    rule = {name: arguments.get(name, default) for name, default in (("causal", True), ("window_left", -1))}
    numbers = {name: arguments[name] for name in ("sinks", "bmm1_scale", "bmm2_scale") if name in arguments}
    controls = []
    for request, sides in enumerate(zip(batch.queries, batch.keys, batch.values, strict=True)):
        rows, keys, _ = sides
        if len(keys) == 0:  # the control of e4m3 has no answer here
            controls.append(torch.zeros(*rows.shape[:2], sides[2].shape[2], dtype=out_dtype))
            continue
        lens = torch.tensor([len(keys)])
        positions = [torch.arange(n).unsqueeze(0) for n in (len(rows), len(keys))]
        positions[0] += len(keys) - len(rows)
        visible = visible_keys(*positions, lens, **rule | {"causal": rule["causal"] and masks is None})
        if masks is not None:
            shown = torch.ones(len(rows), len(keys), dtype=torch.bool)
            shown[:, len(keys) - len(rows) :] = masks[request]
            visible = visible & shown
        batched = [side.unsqueeze(0) for side in sides]
        controls.append(eager_attention(*batched, visible, arithmetic=rows.dtype, out_dtype=out_dtype, **numbers)[0])
    groups = torch.tensor([request for request, q_len in enumerate(batch.q_lens) for _ in range(q_len)])
    comparison = compare(got[0], truth[0], torch.cat(controls), groups)
    assert comparison.passed, comparison.worst(4)
    torch.testing.assert_close(got[1], truth[1], rtol=1e-5, atol=1e-5)


DTYPES = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
    ids=["bf16", "fp16", "bf16 and e4m3", "e4m3"],
)


@pytest.mark.parametrize("rule", DECODE_RULES)
@pytest.mark.parametrize("lengths", LENGTHS)
@DTYPES
def test_decode_is_right(rule: str, lengths: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    q_len, kv_lens = LENGTHS[lengths]
    batch = random_batch([q_len] * len(kv_lens), kv_lens, dtype=dtype, kv_dtype=kv_dtype)
    rules = DECODE_RULES[rule]
    out_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    arguments = decode_arguments(batch, poison=math.nan, foreign_id=-1, out_dtype=out_dtype, **rules)
    assert_right(DECODE, batch, arguments)


@pytest.mark.parametrize("rule", DECODE_RULES)
@pytest.mark.parametrize("storage", ["HND", "NHD", "separate tables", "large pages"])
def test_storage_changes_nothing(rule: str, storage: str) -> None:
    batch = random_batch([3, 3, 3], [7, 64, 290], heads=(6, 2))
    rules = dict(DECODE_RULES[rule])
    if "sinks" in rules:
        rules["sinks"] = torch.cat((rules["sinks"], torch.tensor([1.0, 2.0])))
    how: dict[str, Any] = {
        "HND": {},
        "NHD": {"kv_layout": "NHD"},
        "separate tables": {"separate_tables": True},
        "large pages": {"page_size": 256},
    }[storage]
    arguments = decode_arguments(batch, **how, poison=math.nan, foreign_id=2**30, out_dtype=torch.bfloat16, **rules)
    assert_right(DECODE, batch, arguments)


@pytest.mark.parametrize("q_len", [2, 4, 18, 33])
@pytest.mark.parametrize("window_left", [-1, 20])
def test_draft_masks_are_right(q_len: int, window_left: int) -> None:
    batch = random_batch([q_len, q_len], [q_len + 100, q_len])
    generator = torch.Generator().manual_seed(q_len)
    drawn = (torch.rand(2, q_len, q_len, generator=generator) < 0.5) | torch.eye(q_len, dtype=torch.bool)
    rule = {"mask": pack_mask(drawn.tolist()), "window_left": window_left}
    assert_right(DECODE, batch, decode_arguments(batch, poison=math.nan, out_dtype=torch.bfloat16, **rule), drawn)


@pytest.mark.parametrize("rule", [*DECODE_RULES, "not causal"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_context_is_right(rule: str, kv_dtype: torch.dtype) -> None:
    batch = random_batch([70, 1, 5, 130], [70, 90, 3, 300], kv_dtype=kv_dtype)
    rules = {"causal": False} if rule == "not causal" else DECODE_RULES[rule]
    arguments = context_arguments(batch, poison=math.nan, foreign_id=-1, out_dtype=torch.bfloat16, **rules)
    assert_right(CONTEXT, batch, arguments)


def test_ragged_decode_and_padding_rows() -> None:
    batch = random_batch([1, 4, 2], [80, 4, 130])
    arguments = decode_arguments(batch, ragged=True, out_dtype=torch.bfloat16)
    assert_right(DECODE, batch, dict(arguments))
    arguments["query"] = torch.cat((arguments["query"], torch.ones(2, 4, 16, dtype=torch.bfloat16)))
    out, lse = SplitKV().trtllm_batch_decode_with_kv_cache(**arguments)
    assert (out[7:] == 0).all()
    assert (lse[7:] == -math.inf).all()


MLA_RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "base e": {"return_lse_base": "basee"},
    "sinks": {"sinks": torch.tensor([3.0, -math.inf, 0.5, 6.0]), "return_lse_base": "basee"},
    "scales": {"bmm1_scale": torch.tensor([0.3]), "bmm2_scale": torch.tensor(-2.5)},
}


def assert_mla_right(mla_batch: latent_cases.LatentBatch, arguments: dict[str, Any], **results: Any) -> None:
    """As `assert_right`, with `results` for the model; rows behind the last request's are zero."""
    truth = references.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    got = SplitKV().trtllm_batch_decode_with_kv_cache_mla(**arguments | results)
    assert got[0].shape == truth[0].shape
    entries = [each.unsqueeze(1) for each in mla_batch.entries]
    batch = Batch(mla_batch.queries, entries, [each[..., : mla_batch.rank] for each in entries])
    num_rows = sum(batch.q_lens)
    rows, true_rows = ((out.flatten(0, -3)[:num_rows], lse.flatten(0, -2)[:num_rows]) for out, lse in (got, truth))
    assert_within_bounds(batch, arguments, rows, true_rows, got[0].dtype)
    assert (got[0].flatten(0, -3)[num_rows:] == 0).all()


@pytest.mark.parametrize("rule", MLA_RULES)
@pytest.mark.parametrize("lengths", [*LENGTHS, "eight rows"])
@DTYPES
def test_mla_is_right(rule: str, lengths: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    q_len, kv_lens = LENGTHS.get(lengths, (8, (300, 8, 2)))
    batch = latent_cases.latent_batch([q_len] * len(kv_lens), kv_lens, dtype=dtype, kv_dtype=kv_dtype)
    arguments = latent_cases.mla_arguments(batch, poison=math.nan, foreign_id=-1, **MLA_RULES[rule])
    assert_mla_right(batch, arguments, out=None)
    out, lse = (torch.full(arguments["out"].shape[:-1] + last, math.nan) for last in ((latent_cases.RANK,), ()))
    assert_mla_right(batch, arguments, out=out, lse=lse)
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("rule", MLA_RULES)
def test_ragged_mla_and_padding_rows(rule: str) -> None:
    batch = latent_cases.latent_batch([5, 0, 8], [300, 8, 2])
    arguments = latent_cases.mla_arguments(batch, ragged=True, poison=math.nan, foreign_id=-1, **MLA_RULES[rule])
    arguments |= {name: torch.nn.functional.pad(arguments[name], (0, 0, 0, 0, 0, 3)) for name in ("query", "out")}
    assert_mla_right(batch, arguments, out=None)


def test_mla_uses_the_workspace_and_leaves_it_in_order() -> None:
    workspace = torch.full((SEMAPHORE_BYTES + 2**20,), 255, dtype=torch.uint8)
    workspace[:SEMAPHORE_BYTES] = 0
    arguments = latent_cases.mla_arguments(latent_cases.latent_batch([2, 2], [300, 65]))
    expected, _ = SplitKV().trtllm_batch_decode_with_kv_cache_mla(**arguments | {"out": None})
    shared = arguments | {"out": None, "return_lse": False, "workspace_buffer": workspace}
    assert torch.equal(SplitKV().trtllm_batch_decode_with_kv_cache_mla(**shared), expected)
    assert not workspace[:SEMAPHORE_BYTES].any()
    assert (workspace[SEMAPHORE_BYTES:] != 255).any()


def nvfp4_arguments(page_size: int = 16) -> dict[str, Any]:
    """A decode over a random NVFP4 cache of one long and one short request."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (2, 30, 2, page_size, 16), generator=generator, dtype=torch.uint8)
    factors = (torch.rand(2, 30, 2, page_size, 32 // NVFP4_BLOCK, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    return {
        "query": torch.randn(2, 4, 32, generator=generator).to(torch.bfloat16),
        "kv_cache": (packed[0], packed[1]),
        "kv_cache_sf": (factors[0], factors[1]),
        "workspace_buffer": None,
        "block_tables": torch.randperm(30, generator=generator).view(2, 15).to(torch.int32),
        "seq_lens": torch.tensor([200, 33], dtype=torch.int32),
        "max_seq_len": 240,
        "bmm1_scale": 0.1,
        "return_lse": True,
        "backend": "xqa",
    }


@pytest.mark.parametrize("backend", ["xqa", "trtllm-gen"])
def test_nvfp4_is_right(backend: str) -> None:
    arguments = nvfp4_arguments() | {"backend": backend}
    truth = reference_decode(**arguments, out_dtype=torch.float32)
    out = SplitKV().trtllm_batch_decode_with_kv_cache(**arguments, out_dtype=torch.float32)
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("contents", [0, 255])
def test_the_workspace_is_used_and_left_in_order(contents: int) -> None:
    """Partial results go to the scratch, whatever it held; counters are zero again; nothing else changes."""
    batch = random_batch([2, 2], [300, 65])
    workspace = torch.zeros(SEMAPHORE_BYTES + 2**20, dtype=torch.uint8)
    workspace[SEMAPHORE_BYTES:] = contents
    before = workspace.clone()
    out = torch.full((4, 4, 16), math.nan, dtype=torch.bfloat16)
    lse = torch.full((4, 4), math.nan)
    arguments = decode_arguments(batch, out_dtype=torch.bfloat16, out=out, lse=lse, workspace_buffer=workspace)
    assert_right(DECODE, batch, arguments)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert not workspace[:SEMAPHORE_BYTES].any()
    assert not torch.equal(workspace, before)


def test_a_split_is_not_merged_while_its_counter_is_wrong() -> None:
    """What a kernel does with a workspace that nobody zeroed."""
    batch = random_batch([1], [100])
    workspace = torch.ones(SEMAPHORE_BYTES + 2**20, dtype=torch.uint8)
    out = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    arguments = decode_arguments(batch, out_dtype=None, out=out, workspace_buffer=workspace)
    SplitKV().trtllm_batch_decode_with_kv_cache(**arguments)
    assert not out.any()


def test_long_sequences_and_extreme_logits() -> None:
    batch = random_batch([1, 1], [8192, 5000], heads=(2, 1), magnitude=8.0)
    arguments = decode_arguments(batch, page_size=64, out_dtype=torch.float32)
    truth = reference_decode(**arguments)
    torch.testing.assert_close(SplitKV().trtllm_batch_decode_with_kv_cache(**arguments), truth, rtol=1e-3, atol=1e-3)


def test_context_agrees_with_the_reference_on_views() -> None:
    """Non-contiguous query and table, uint32 lengths, scales as tensors."""
    batch = random_batch([3, 2], [50, 70])
    arguments = context_arguments(batch, out_dtype=torch.float32)
    query = torch.cat((arguments["query"], arguments["query"]), dim=1)[:, :4]
    table = torch.nn.functional.pad(arguments["block_tables"], (0, 3))[:, :-3]
    arguments |= {
        "query": query,
        "block_tables": table,
        "seq_lens": arguments["seq_lens"].to(torch.uint32),
        "bmm1_scale": torch.tensor([0.25]),
        "bmm2_scale": torch.tensor(3.0),
    }
    out = SplitKV().trtllm_batch_context_with_kv_cache(**arguments)
    torch.testing.assert_close(out, reference_context(**arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("topk", "page_size", "dtype"), [*itertools.product((1, 3), (1, 4), (torch.int32, torch.int64))]
)
def test_draft_lists_are_right(topk: int, page_size: int, dtype: torch.dtype) -> None:
    lens = torch.tensor([5, 0, 17], dtype=torch.int32)
    req_to_token = torch.randint(1000, (6, 40), dtype=dtype)
    rows = torch.tensor([4, 1, 2], dtype=torch.int32)
    positions = lens.repeat_interleave(topk)
    truth = generate_draft_decode_kv_indices(
        rows, req_to_token, lens, positions, num_steps=3, topk=topk, page_size=page_size
    )
    kv_indices, kv_indptr = (torch.full((3, 200), -7, dtype=dtype) for _ in range(2))
    DraftListsModel().generate_draft_decode_kv_indices(
        rows, req_to_token, lens, kv_indices, kv_indptr, positions, topk=topk, page_size=page_size
    )
    for step, (slots, boundaries) in enumerate(zip(*truth, strict=True)):
        torch.testing.assert_close(kv_indices[step, : len(slots)].long(), slots)
        assert (kv_indices[step, len(slots) :] == -7).all()
        torch.testing.assert_close(kv_indptr[step, 1 : len(boundaries)].long(), boundaries[1:])
        assert kv_indptr[step, 0] == -7
