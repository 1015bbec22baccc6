"""The tensors of a ragged call: padding that no row sees, and factors and a part of the keys that count in both sides."""

from dataclasses import replace

import torch

from lab import references
from lab.calls.problem import E4M3
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.ragged import PADDED, PADDING, RaggedCase, RaggedInputs, build_ragged, padded

CASE = RaggedCase((20, 0, 3), (5, 7, 0))


def build() -> RaggedInputs:
    return build_ragged(CASE, torch.device("cpu"))


def output_of(inputs: RaggedInputs) -> torch.Tensor:
    out = references.trtllm_ragged_attention_deepseek(**inputs.arguments())
    return out[: sum(inputs.q_lens)]


def test_padding_follows_the_last_request() -> None:
    inputs = build()
    with_padding, without = inputs.arguments(), replace(inputs, with_padding=False).arguments()
    for name, tokens in (("query", 12), ("key", 35), ("value", 35)):
        assert len(without[name]) == tokens
        assert torch.equal(with_padding[name][:tokens], without[name])
        assert with_padding[name][tokens:].shape[0] == PADDING
        assert bool((with_padding[name][tokens:] == torch.tensor(PADDED).to(CASE.dtype)).all())
    assert inputs.kv_lens == (25, 7, 3)
    assert with_padding["seq_lens"].tolist() == [25, 7, 3]
    assert with_padding["cum_seq_lens_kv"].tolist() == [0, 25, 32, 35]


def test_factors_and_causality_are_in_the_call_and_in_what_it_must_give() -> None:
    inputs = build()
    for changed in (
        replace(inputs, factors=(0.5, 1.0)),
        replace(inputs, factors=(1.0, 0.5)),
        replace(inputs, causal=False),
    ):
        out = output_of(changed)
        assert made(changed.truth()).compare(out).passed
        assert not made(inputs.truth()).compare(out).passed


def test_sinks_are_in_the_call_and_in_what_it_must_give() -> None:
    plain = build()
    inputs = replace(plain, sinks=torch.full((CASE.num_heads,), 3.0))
    out = output_of(inputs)
    assert made(inputs.truth()).compare(out).passed
    assert not made(plain.truth()).compare(out).passed


def test_the_same_rows_over_a_part_of_the_keys() -> None:
    inputs = build()
    sides = zip(inputs.parts, CASE.prefix_lens, strict=True)
    new = replace(inputs, parts=[(keys[prefix:], values[prefix:]) for (keys, values), prefix in sides])
    assert new.kv_lens == CASE.q_lens
    assert made(new.truth()).compare(output_of(new)).passed
    assert not made(inputs.truth()).compare(output_of(new)).passed


def test_rows_of_a_byte_are_padded() -> None:
    rows = torch.tensor([[[1.0, -2.0]]]).to(E4M3)
    assert len(padded(rows[:0], 1.0)) == PADDING
