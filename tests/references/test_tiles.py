"""Attention by tiles of keys and pieces of a batch: their number must not matter, and at most a tile of K or V is float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.references import attention, relative_l2, softmax_attention, trtllm_batch_decode_with_kv_cache
from lab.references.softmax_attention import PIECE_ELEMENTS, TILE_ELEMENTS, Tile, tiles
from tests.cases import assert_same, decode_arguments, expected, pack_mask, random_batch
from tests.references.test_quantization import nvfp4_case
from tests.references.test_trtllm_keys_seen import MASKS

CPU = torch.device("cpu")


@pytest.fixture(params=[(1, None), (500, None), (3000, None), (None, 1), (None, 300), (None, 2000), (None, 10_000)])
def few_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one page, of some, and of unequal widths; or pieces of one row, of some, and of several requests."""
    of_a_tile, of_a_piece = request.param
    if of_a_tile is not None:
        monkeypatch.setattr(softmax_attention, "TILE_ELEMENTS", of_a_tile)
    else:
        monkeypatch.setitem(PIECE_ELEMENTS, "cpu", of_a_piece)


def test_tiles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 keys of 2 elements at a time: 8 of each of three requests, 24 of the last one, and what is left of it."""
    monkeypatch.setattr(softmax_attention, "TILE_ELEMENTS", 48)
    assert tiles([8, 8, 44], 2, CPU, step=4) == [Tile(0, 0, 8), Tile(2, 8, 32), Tile(2, 32, 44)]
    assert tiles([4, 12], 100, CPU, step=4) == [Tile(0, 0, 4), Tile(1, 4, 8), Tile(1, 8, 12)]  # a page, if need be
    assert tiles([0, 0], 2, CPU) == tiles([], 2, CPU) == []


@pytest.mark.usefixtures("few_elements")
def test_tiles_and_pieces_of_masked_drafts() -> None:
    """`test_every_call.py` has the other rules."""
    batch = random_batch([9] * 5, [3, 40, 1, 0, 170], magnitude=2.0)
    masks = [MASKS["binary tree"](9)] * 5
    arguments = decode_arguments(batch, 4, poison=math.nan, mask=pack_mask(masks))
    assert_same(trtllm_batch_decode_with_kv_cache(**arguments), expected(batch, masks=masks))


@pytest.mark.usefixtures("few_elements")
@pytest.mark.parametrize("order", ["xqa", "trtllm-gen"])
def test_tiles_of_nvfp4(order: str) -> None:
    batch, cache = nvfp4_case(order)
    assert_same(trtllm_batch_decode_with_kv_cache(**decode_arguments(batch, backend=order) | cache), expected(batch))


# A long request


class Float64Seen(TorchDispatchMode):
    """Records the elements of the largest float64 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("lengths", [[20_001], [3, 1000, 6000, 9000]])
def test_no_more_than_a_tile_of_a_long_request_is_float64(lengths: list[int]) -> None:
    batch = random_batch([1] * len(lengths), lengths, heads=(8, 2), head_dim=64)
    assert max(lengths) * 2 * 64 > 2 * TILE_ELEMENTS
    arguments = decode_arguments(batch, 16, bmm1_scale=0.125, poison=math.nan)
    with Float64Seen() as seen:
        out, _ = trtllm_batch_decode_with_kv_cache(**arguments)
    assert seen.elements <= max(TILE_ELEMENTS, len(lengths) * 8 * (max(lengths) + 16))  # or all scores
    assert relative_l2(out, expected(batch, bmm1_scale=0.125)[0]).max() < 1e-13


def test_plain_keys_and_values_too() -> None:
    batch = random_batch([1], [20_001], heads=(8, 2), head_dim=64)
    query, keys, values = (torch.stack(side) for side in (batch.queries, batch.keys, batch.values))
    with Float64Seen() as seen:
        out, _ = attention(query, keys, values, torch.ones(1, 1, 20_001, dtype=torch.bool), bmm1_scale=0.125)
    assert seen.elements <= TILE_ELEMENTS
    assert relative_l2(out[0], expected(batch, bmm1_scale=0.125)[0]).max() < 1e-13


def test_arguments_may_require_a_gradient_and_get_none() -> None:
    """As the sinks of a model's layer do."""
    batch = random_batch([1, 1], [7, 30])
    sinks = torch.nn.Parameter(torch.linspace(-1, 2, 4))
    arguments = decode_arguments(batch, sinks=sinks)
    arguments["query"].requires_grad_()
    result = trtllm_batch_decode_with_kv_cache(**arguments)
    assert not result[0].requires_grad
    assert_same(result, expected(batch, sinks=sinks.detach()))
    out, _ = attention(arguments["query"].unsqueeze(1), *(torch.ones(2, 3, 2, 16),) * 2, torch.ones(2, 1, 3).bool())
    assert not out.requires_grad


def test_an_empty_batch() -> None:
    keys = torch.ones(0, 3, 2, 16)
    out, lse_log2 = attention(torch.ones(0, 1, 4, 16), keys, keys, torch.ones(0, 1, 3).bool())
    assert out.shape == (0, 1, 4, 16)
    assert lse_log2.shape == (0, 1, 4)
