"""The ragged context reference against a dense second formula, and in chunks that merge."""

import math

import pytest
import torch

from lab.references import trtllm_ragged_attention_deepseek
from tests.cases import (
    assert_same,
    chunk,
    expected,
    merged,
    ragged_arguments,
    ragged_batch,
)

ragged = trtllm_ragged_attention_deepseek


# Against the dense formula


@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256), (48, 32), (5, 3), (1, 1), (3, 7)], ids=str)
def test_sizes_of_real_models_and_others(dims: tuple[int, int]) -> None:
    batch = ragged_batch([3, 4], [3, 30], dims=dims)
    assert_same(ragged(**ragged_arguments(batch)), expected(batch))


def test_strided_rows_keys_and_values() -> None:
    """Values as an up-projection leaves them: after each head's part of the keys."""
    batch = ragged_batch([2, 3], [9, 30])
    arguments = ragged_arguments(batch)
    for name in ("query", "key", "value"):
        wide = torch.full((len(arguments[name]), 4, 30), math.nan, dtype=torch.bfloat16)
        view = wide[:, 1:, 7 : 7 + arguments[name].shape[2]]
        arguments[name] = view.copy_(arguments[name])
    assert_same(ragged(**arguments), expected(batch))


# Chunks


def test_new_tokens_and_chunks_of_the_prefix_merge_to_the_whole() -> None:
    """As SGLang prefills over a cached prefix: new tokens causal, two chunks not, some requests without a key in one."""
    new = [4, 1, 6, 3]
    prefixes = [11, 0, 25, 9]
    lengths = [prefix + rows for prefix, rows in zip(prefixes, new, strict=True)]
    batch = ragged_batch(new, lengths)
    middle = [min(prefix, 10) for prefix in prefixes]
    parts = [
        ragged(**ragged_arguments(chunk(batch, prefixes, lengths), is_causal=True)),
        ragged(**ragged_arguments(chunk(batch, [0] * 4, middle), is_causal=False, o_sf_scale=-1.0)),
        ragged(**ragged_arguments(chunk(batch, middle, prefixes), is_causal=False, o_sf_scale=-1.0)),
    ]
    truth = expected(batch)
    out, lse = merged(parts)
    # The LSE that weighs the parts is float32.
    torch.testing.assert_close(out, truth[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, truth[1], rtol=1e-6, atol=1e-6)
