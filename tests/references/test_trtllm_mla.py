"""What only the MLA decode has: forms of its cache, bases and shapes of its LSE; `test_every_call.py` has the rest."""

import math

import pytest
import torch

from lab.references import trtllm_batch_decode_with_kv_cache_mla
from tests.cases import RANK, ROPE, assert_same, expected, latent_batch, mla_arguments

mla = trtllm_batch_decode_with_kv_cache_mla


def test_a_cache_without_the_dimension_of_the_only_head() -> None:
    batch = latent_batch([2] * 4, [0, 1, 16, 37])
    arguments = mla_arguments(batch)
    assert_same(mla(**arguments | {"kv_cache": arguments["kv_cache"].squeeze(1)}), expected(batch))


def test_a_cache_that_is_a_view_of_a_wider_pool() -> None:
    batch = latent_batch([1, 1], [9, 30])
    arguments = mla_arguments(batch)
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat((cache, torch.full_like(cache, math.nan)), dim=-1)[..., : RANK + ROPE]
    assert_same(mla(**arguments), expected(batch))


def test_sinks_in_a_sequence() -> None:
    batch, sinks = latent_batch([3] * 2, [2, 25]), torch.tensor([0.0, 0.5, -1.0, 3.0])
    for wrapped in ([sinks], (sinks,)):
        assert_same(mla(**mla_arguments(batch, sinks=wrapped)), expected(batch, sinks=sinks))


@pytest.mark.parametrize("base", [None, "base2", "basee"])
@pytest.mark.parametrize("shape", [None, (6, 4), (3, 2, 4)])
def test_lse(base: str | None, shape: tuple[int, ...] | None) -> None:
    batch = latent_batch([2] * 3, [1, 7, 30])
    lse = None if shape is None else torch.full(shape, math.nan)
    _, returned = mla(**mla_arguments(batch, lse=lse, return_lse_base=base))
    assert lse is None or returned is lse
    assert returned.dtype == torch.float32
    assert returned.shape == (shape or (6, 4))
    truth = expected(batch)[1] * (math.log(2.0) if base == "basee" else 1.0)
    torch.testing.assert_close(returned.reshape(6, 4).double(), truth, rtol=1e-6, atol=1e-6)


def test_results_of_a_ragged_call() -> None:
    batch = latent_batch([1, 3], [7, 30])
    given = torch.full((4, 4), math.nan)
    out, lse = mla(**mla_arguments(batch, ragged=True, out=None, lse=given, return_lse_base="basee"))
    assert out.shape == (4, 4, RANK)
    assert lse is given
    torch.testing.assert_close(lse.double(), expected(batch)[1] * math.log(2.0), rtol=1e-6, atol=1e-6)
