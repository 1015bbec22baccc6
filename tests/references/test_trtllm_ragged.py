"""The ragged context reference against a dense second formula, by hand, in chunks that merge, and on bad input."""

import math

import pytest
import torch

from lab.references import trtllm_ragged_attention_deepseek
from tests.cases import (
    Arguments,
    Batch,
    assert_same,
    chunk,
    expected,
    merged,
    ragged_arguments,
    ragged_batch,
)

ragged = trtllm_ragged_attention_deepseek
E4M3 = torch.float8_e4m3fn


# By hand


@pytest.mark.parametrize(
    ("queries", "keys", "values", "changes", "out", "lse"),
    [
        ([2.0], [3.0], [7.0], {}, [7.0], [6.0 / math.log(2.0)]),
        # Row i of 2 rows over 3 keys sits at position 1 + i; Q = 0 makes the output a mean.
        ([0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0], {}, [1.5, 3.0], [1.0, math.log2(3.0)]),
        ([0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0], {"is_causal": False}, [3.0, 3.0], [math.log2(3.0)] * 2),
        # Weights 1 and 3, and the output doubled.
        ([math.log(3.0)], [0.0, 1.0], [4.0, 8.0], {"bmm2_scale": 2.0}, [2 * (4 + 3 * 8) / 4], [2.0]),
        # A row at position p sees p - 1 and p: 2 keys, and row 0 of 3 its own alone.
        ([0.0] * 3, [1.0] * 3, [1.0, 3.0, 9.0], {"window_left": 1}, [1.0, 2.0, 6.0], [0.0, 1.0, 1.0]),
    ],
    ids=["one key", "causal", "not causal", "weights and scales", "window"],
)
def test_by_hand(
    queries: list[float], keys: list[float], values: list[float], changes: Arguments, out: list[float], lse: list[float]
) -> None:
    """One request of one head whose keys have one element, and values two: the number and its negative."""
    query, key, value = (torch.tensor(each, dtype=torch.float64).view(-1, 1, 1) for each in (queries, keys, values))
    batch = Batch([query], [key], [torch.cat((value, -value), dim=2)])
    got, got_lse = ragged(**ragged_arguments(batch, bmm1_scale=1.0, **changes))
    assert torch.equal(got[..., 1], -got[..., 0])
    assert got[:, 0, 0].tolist() == pytest.approx(out)
    assert got_lse[:, 0].tolist() == pytest.approx(lse)


# Against the dense formula


RULES: dict[str, Arguments] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window_left": 4},
    "window of the row's own key": {"window_left": 0},
    "sinks": {"sinks": torch.tensor([0.0, -2.0, 3.0])},
    "sinks, not causal": {"sinks": torch.tensor([0.0, -math.inf, 30.0]), "causal": False},
    "scales": {"bmm1_scale": 0.375, "bmm2_scale": -1.75},
}
NAMES = {"causal": "is_causal", "sinks": "attention_sinks"}  # of `expected`'s arguments in the call


@pytest.mark.parametrize("name", RULES)
def test_lengths_and_rules(name: str) -> None:
    """Rows fewer than keys, as many, more; requests without rows, and without keys."""
    batch = ragged_batch([1, 3, 5, 0, 4, 2, 0], [1, 20, 5, 7, 2, 0, 0])
    rule = RULES[name]
    call = {NAMES.get(key, key): value for key, value in rule.items()}
    assert_same(ragged(**ragged_arguments(batch, **call)), expected(batch, **rule))


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
