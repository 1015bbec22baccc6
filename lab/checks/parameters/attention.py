"""Attention cases over the values of ranges: each value as often as any other, or drawn."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lab.calls.problem import NVFP4
from lab.ranges import DRAWN_AXES, SEEDS, Ranges
from lab.workloads.attention_case import AttentionCase, Storage
from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

NUM_BUILDS = 24  # as often each of 8 groups, of 8 numbers of rows, of 3 dtypes, and of 4 page sizes


def balanced(ranges: Ranges, interface: Interface, count: int, seed: int = 0) -> Iterator[AttentionCase]:
    """Cases in which every value of every axis comes as often as any other, lengths at edges, each of one of the builds."""
    seed += SEEDS * ranges.seed
    rng = random.Random(f"{interface.name} {seed}")
    all_builds, first = builds(ranges, interface), rng.randrange(NUM_BUILDS)
    rest = [] if interface is Interface.MLA_DECODE else [ranges.num_kv_heads, ranges.kv_layouts]
    columns = [_dealt(rng, axis, count) for axis in rest]
    make = _mla if interface is Interface.MLA_DECODE else _mha
    for number in range(count):
        build = all_builds[(first + number) % NUM_BUILDS]
        yield make(ranges, interface, rng, number + seed, *build, *(column[number] for column in columns))


def balanced_nvfp4(ranges: Ranges, interface: Interface, count: int, seed: int) -> Iterator[AttentionCase]:
    """The cases of `covering` over an NVFP4 cache; none where the ranges or the interface has no such cache."""
    if interface is not Interface.MLA_DECODE and True in ranges.nvfp4:
        for case in balanced(ranges, interface, count, seed):
            yield replace(case, kv_dtype=NVFP4, arithmetic=None)


def builds(ranges: Ranges, interface: Interface) -> list[tuple[Any, ...]]:
    """Return the combinations of what kernels are compiled for, in which every value comes as often as any other.

    They are few, and the same for all checks, since many kernels are compiled for each. K18 judges the others, in pairs.
    """
    if interface is Interface.MLA_DECODE:
        axes: list[Sequence[Any]] = [
            ranges.dtypes,
            ranges.mla_head_dims,
            ranges.mla_heads,
            ranges.mla_page_sizes,
            ranges.q_lens,
        ]
    else:
        axes = [
            ranges.dtypes,
            ranges.groups,
            ranges.head_dims,
            ranges.page_sizes,
            ranges.q_lens,
            ranges.windows,
            ranges.sinks,
        ]
    rng = random.Random(f"{interface.name} {ranges.seed}")
    return list(zip(*(_dealt(rng, axis, NUM_BUILDS) for axis in axes), strict=True))


def drawn_cases(ranges: Ranges, interface: Interface) -> "SearchStrategy[AttentionCase]":
    """Hypothesis's strategy over the same axes; smaller lengths and first values are simpler."""
    from hypothesis import strategies as st

    @st.composite
    def cases(draw: "st.DrawFn") -> AttentionCase:
        values = {name: draw(st.sampled_from(getattr(ranges, name))) for name in DRAWN_AXES}
        dtype, kv_dtype = values["dtypes"]
        q_len = values["q_lens"]
        count = draw(st.integers(1, 4))
        lens = st.integers(q_len, ranges.longest)
        kv_lens = tuple(draw(st.lists(lens, min_size=count, max_size=count)))
        if interface is Interface.CONTEXT:
            q_lens = tuple(draw(st.integers(1, min(kv_len, 80))) for kv_len in kv_lens)
        else:
            q_lens = (q_len,) * count
        case = AttentionCase(
            Interface.DECODE,
            kv_lens,
            (q_len,) * count,
            dtype=dtype,
            kv_dtype=kv_dtype,
            arithmetic=ranges.arithmetic(kv_dtype),
            seed=draw(st.integers(0, 9)),
        )
        if interface is Interface.MLA_DECODE:
            head_dim, v_head_dim = values["mla_head_dims"]
            return replace(
                case,
                interface=interface,
                num_kv_heads=1,
                group=values["mla_heads"],
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                storage=Storage(page_size=values["mla_page_sizes"]),
            )
        return replace(
            case,
            interface=interface,
            q_lens=q_lens,
            group=values["groups"],
            num_kv_heads=values["num_kv_heads"],
            head_dim=values["head_dims"],
            window_left=draw(st.integers(0, ranges.longest)) if values["windows"] else -1,
            sinks=values["sinks"],
            storage=Storage(page_size=values["page_sizes"], kv_layout=values["kv_layouts"]),
        )

    return cases()


def _mha(
    ranges: Ranges,
    interface: Interface,
    rng: random.Random,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    group: int,
    head_dim: int,
    page_size: int,
    q_len: int,
    window: bool,
    sinks: bool,
    num_kv_heads: int,
    kv_layout: str,
) -> AttentionCase:
    is_context = interface is Interface.CONTEXT
    q_lens = tuple(rng.choice((1, q_len, 17, 65)) if is_context else q_len for _ in range(4))
    edges = edge_lengths(page_size, ranges.longest)
    kv_lens = tuple(max(rng.choice(edges), rows) for rows in q_lens[:-1])
    # The last request is long, so that a window truncates something.
    kv_lens = (*kv_lens, max(ranges.longest - rng.randrange(page_size), q_lens[-1]))
    return AttentionCase(
        interface,
        kv_lens,
        q_lens,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        arithmetic=ranges.arithmetic(dtypes[1]),
        window_left=rng.choice((0, 1, page_size - 1, page_size, 100, 127)) if window else -1,
        sinks=sinks,
        seed=seed,
        storage=Storage(page_size=page_size, kv_layout=kv_layout, page_seed=seed),
    )


def _mla(
    ranges: Ranges,
    interface: Interface,
    rng: random.Random,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
    heads: int,
    page_size: int,
    q_len: int,
) -> AttentionCase:
    edges = edge_lengths(page_size, ranges.longest)
    kv_lens = tuple(max(rng.choice(edges), q_len) for _ in range(3))
    return AttentionCase(
        interface,
        kv_lens,
        (q_len,) * 3,
        num_kv_heads=1,
        group=heads,
        head_dim=head_dims[0],
        v_head_dim=head_dims[1],
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        arithmetic=ranges.arithmetic(dtypes[1]),
        seed=seed,
        storage=Storage(page_size=page_size, page_seed=seed),
    )


def edge_lengths(page_size: int, longest: int) -> list[int]:
    """Lengths at which something changes: a page, a tile of 64, 128, 256 or 512 keys, and one more or less."""
    edges = {1, 2, page_size, 2 * page_size, 64, 128, 256, 512, longest}
    return sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 < near <= longest})


def _dealt(rng: random.Random, axis: Sequence[Any], count: int) -> list[Any]:
    """`count` values of an axis, each as often as any other, in a drawn order."""
    values: list[Any] = []
    while len(values) < count:
        round_ = list(axis)
        rng.shuffle(round_)
        values += round_
    return values[:count]
