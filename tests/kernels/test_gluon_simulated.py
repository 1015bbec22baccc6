"""The Gluon kernels in a simulator of their partitions and barriers, against the float64 references, per (row, head).

That each wait of the kernels is needed is `test_gluon_orders.py`'s.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import ContextCall, DecodeCall
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.kernels.portable import hopper
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.tiles import HopperTile
from tests.cases import CONTEXT, DECODE, MLA, Arguments
from tests.kernels.held import BF16, E4M3, FP16
from tests.kernels.portable_calls import NAN, PortableKernel, sinks_of, truth_of
from tests.kernels.simulated_gluon import simulate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gluon_gpu.py runs the kernels themselves")

CALLS: dict[str, Any] = {DECODE: DecodeCall, CONTEXT: ContextCall, MLA: MLADecodeCall}
SMALL = HopperTile(128, 64, stages=2, start_keys=128)
ONE_CONSUMER = HopperTile(64, 64, stages=2, start_keys=128, per_multiprocessor=2)
MLA_SMALL = HopperTile(64, 64, stages=2, start_keys=128)


@pytest.fixture(autouse=True)
def _few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda _device: 3)


def pose(function: str, q_lens: list[int], kv_lens: list[int], page_size: int = 64, **changes: Any) -> Arguments:
    """The call of a random batch; of MLA with offsets, and the least sizes whose halves are whole boxes."""
    options = {"poison": NAN, "foreign_id": 10**6, "bmm1_scale": 0.2}
    if function == MLA:
        options |= {"rank": 128, "rope": 64, "ragged": True, "bmm1_scale": 0.125}
    return PortableKernel(function).pose(q_lens, kv_lens, page_size, **options | changes)


def run(
    function: str,
    arguments: Arguments,
    *,
    shares: Shares | None = None,
    tile: HopperTile | None = None,
    seed: int = 0,
    least_q_len: int | None = None,
) -> None:
    """Make the call in the simulator, and hold every output vector and LSE to the reference's.

    With `least_q_len`, those of requests with so many rows; the others' stay as they were.
    """
    problem = CALLS[function](**arguments).problem()
    out, lse = problem.results()
    assert lse is not None
    out.fill_(NAN)
    lse.fill_(NAN)
    if function == MLA:
        launches = hopper.hopper_mla_launches(problem, (out, lse), tile or MLA_SMALL, shares or Shares(3))
    else:
        launches = hopper.hopper_launches(problem, (out, lse), tile or SMALL, shares, least_q_len)
    attention, *merge = launches
    simulate(attention, seed)
    for launch in merge:
        launch()
    truth, truth_lse = truth_of(function, arguments)
    written = torch.ones(len(out), dtype=torch.bool)
    if least_q_len is not None:
        q_lens = arguments["cum_seq_lens_q"].diff()
        written = (q_lens >= least_q_len).repeat_interleave(q_lens)
    assert out[~written].isnan().all()
    assert lse[~written].isnan().all()
    error = references.relative_l2(out[written], truth[written])
    assert float(error.max()) < 2.0**-7, error
    torch.testing.assert_close(lse[written].double(), truth_lse[written].double(), rtol=1e-5, atol=1e-5)


# (query rows, keys) of each request, heads, keys of a page, and what the call asks for beside them
CASES: dict[str, tuple[str, list[int], list[int], Any, int, Arguments]] = {
    "one tile, not causal": (CONTEXT, [128], [64], 1, 64, {"causal": False}),
    "causal, several tiles": (CONTEXT, [128], [200], 1, 64, {}),
    "blocks of a prefill": (CONTEXT, [100, 70], [100, 70], (4, 2), 64, {}),
    "ragged, without keys, without rows": (CONTEXT, [40, 0, 7, 130], [300, 5, 0, 140], (6, 2), 32, {}),
    "more rows than keys": (CONTEXT, [90], [40], 2, 16, {}),
    "window": (CONTEXT, [60, 33], [400, 190], (4, 2), 16, {"window_left": 70}),
    "small pages, separate tables, sinks": (
        *(CONTEXT, [50], [333], (8, 4), 16),
        {"separate_tables": True, "sinks": sinks_of(8)},
    ),
    "pages of two tiles": (CONTEXT, [33], [450], 4, 128, {"bmm1_scale": -0.3, "bmm2_scale": 0.5}),
    "no scale": (CONTEXT, [33], [100], 4, 64, {"bmm1_scale": 0.0}),
    "MLA, one tile": (MLA, [1], [64], 64, 64, {}),
    "MLA, lengths around tiles": (MLA, [1] * 5, [63, 64, 65, 128, 129], 64, 64, {}),
    "MLA, lengths around pages": (MLA, [1] * 4, [1, 15, 16, 17], 64, 16, {}),
    "MLA, pages of 32, and those without a key": (MLA, [1] * 4, [31, 32, 33, 97], 64, 32, {}),
    "MLA, pages of two tiles": (MLA, [2, 2], [64, 200], 32, 128, {}),
    "MLA, few rows": (MLA, [1, 1], [100, 300], 16, 64, {}),
    "MLA, several blocks": (MLA, [3, 3], [3, 190], 48, 64, {}),
    "MLA, ragged, without keys, without rows": (MLA, [4, 0, 1, 5], [300, 5, 0, 140], 24, 32, {}),
    "MLA, more rows than keys": (MLA, [9], [5], 16, 16, {}),
    "MLA, sinks": (MLA, [2, 1], [70, 0], 40, 64, {"sinks": sinks_of(40)}),
    "MLA, a negative scale": (MLA, [2], [150], 64, 64, {"bmm1_scale": -0.1, "bmm2_scale": 0.5}),
    "MLA, no scale": (MLA, [2], [70], 64, 64, {"bmm1_scale": 0.0}),
}


@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)], ids=str)
def test_cases(number: int, case: str) -> None:
    function, q_lens, kv_lens, heads, page_size, asked = CASES[case]
    dtype, shares = ((BF16, Shares(3)), (FP16, Shares(1)))[number % 2]
    arguments = pose(function, q_lens, kv_lens, page_size, heads=heads, dtype=dtype, seed=number, **asked)
    run(function, arguments, shares=shares if function == MLA else None, seed=number)


@pytest.mark.parametrize("count", [None, 2])
def test_pages_before_a_window_are_nobodys(count: int | None) -> None:
    """They may be other requests' by now, and hold anything."""
    q_lens, kv_lens, page_size, window_left = [33, 20], [400, 190], 16, 70
    arguments = pose(CONTEXT, q_lens, kv_lens, page_size, heads=(8, 2), window_left=window_left)
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        dead = arguments["block_tables"][request, : (kv_len - q_len - window_left) // page_size]
        assert len(dead) % (SMALL.keys // page_size) > 0, "a tile has pages on both sides"
        for cache in arguments["kv_cache"]:
            cache[dead.long()] = NAN
    run(CONTEXT, arguments, shares=None if count is None else Shares(count))


@pytest.mark.parametrize(
    ("function", "q_len", "heads", "count", "kv_lens"),
    [
        (DECODE, 17, (8, 1), 1, [300, 70]),
        (DECODE, 17, (8, 1), 3, [1000]),
        (DECODE, 17, (16, 2), 5, [300, 1, 64, 200]),
        (DECODE, 17, (16, 2), 2, [0, 129]),
        (MLA, 1, 64, 4, [1000]),
        (MLA, 2, 48, 7, [300, 2, 64, 200]),
        (MLA, 2, 48, 2, [0, 129]),
        (MLA, 1, 64, 17, [260, 100]),
    ],
)
def test_shares(function: str, q_len: int, heads: Any, count: int, kv_lens: list[int]) -> None:
    arguments = pose(function, [q_len] * len(kv_lens), kv_lens, heads=heads, bmm2_scale=0.5)
    run(function, arguments, shares=Shares(count))


@pytest.mark.parametrize(
    ("count", "q_lens"),
    [(None, [1, 3, 140, 0, 2, 70, 5, 90]), (None, [130, 1, 1]), (4, [1, 3, 70, 0, 2, 40, 5]), (1, [1, 2, 5])],
)
def test_requests_of_one_kind(count: int | None, q_lens: list[int]) -> None:
    """Those of 5 rows or more, beside others: the first, the last, some in between; in blocks of rows, and in shares."""
    kv_lens = [q_len + 60 * (index % 3) for index, q_len in enumerate(q_lens)]
    shares = None if count is None else Shares(count)
    run(CONTEXT, pose(CONTEXT, q_lens, kv_lens, heads=(4, 2)), shares=shares, least_q_len=5)


@pytest.mark.parametrize(
    ("function", "tile"),
    [
        (CONTEXT, HopperTile(128, 128, stages=2)),
        (CONTEXT, HopperTile(128, 64, stages=3)),
        (CONTEXT, HopperTile(128, 64, stages=2)),
        (MLA, MLA_SMALL),
        (MLA, MLA_SMALL._replace(stages=3)),
        (MLA, MLA_SMALL._replace(keys=128)),
    ],
    ids=str,
)
def test_tiles_and_many_orders(function: str, tile: HopperTile) -> None:
    if function == MLA:
        arguments, shares = pose(MLA, [2, 1], [500, 3], heads=32), Shares(2)
    else:
        arguments, shares = pose(CONTEXT, [70, 3], [500, 3], head_dim=128), None
    for seed in range(3):
        run(function, arguments, shares=shares, tile=tile, seed=seed)


@pytest.mark.parametrize("case", ["window", "blocks of a prefill", "ragged, without keys, without rows"])
def test_one_consumer(case: str) -> None:
    function, q_lens, kv_lens, heads, page_size, asked = CASES[case]
    run(function, pose(function, q_lens, kv_lens, page_size, heads=heads, **asked), tile=ONE_CONSUMER)


@pytest.mark.parametrize("tile", [ONE_CONSUMER, SMALL], ids=["one consumer", "two consumers"])
@pytest.mark.parametrize(("dtype", "seed"), [(BF16, 0), (FP16, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_e4m3(head_dim: int, dtype: torch.dtype, seed: int, tile: HopperTile) -> None:
    """Tiles are converted between their copy and the products; queries of bf16 are scaled for products in float16."""
    options = {"heads": (8, 2), "head_dim": head_dim, "dtype": dtype, "kv_dtype": E4M3, "bmm2_scale": 0.5}
    decode, context = (pose(function, [16, 16], [333, 130], **options) for function in (DECODE, CONTEXT))
    decode["query"][:8] *= 2.0**20 if dtype == BF16 else 1.0
    run(DECODE, decode, shares=Shares(3), tile=tile, seed=seed)
    run(CONTEXT, context, tile=tile, seed=seed + 2)


def of_a_choice(function: str, q_len: int, page_size: int = 64, **changes: Any) -> PagedAttention:
    """A problem of 8 query heads for one K/V head of 64, or of DeepSeek-V3's entries."""
    sizes = {"heads": 64, "rank": 512, "rope": 64, "ragged": False} if function == MLA else {"heads": 8}
    return CALLS[function](**pose(function, [q_len], [200], page_size, **sizes | changes)).problem()


MASK = torch.zeros(1, 16, 2, dtype=torch.uint16)
# A function, its choice of a tile, a problem that the Gluon kernel has, and changes of it with which the plain kernel has it.
CHOICES: list[tuple[str, Callable[..., Any], Arguments, list[Arguments]]] = [
    (DECODE, hopper.hopper_tiles, {"q_len": 9}, [{"q_len": 8}, {"mask": MASK, "q_len": 16}, {"head_dim": 32}]),
    (DECODE, hopper.hopper_tiles, {"q_len": 3, "kv_dtype": E4M3}, [{"q_len": 2}, {"kv_dtype": BF16}, {"page_size": 8}]),
    (MLA, hopper.hopper_mla_tile, {"q_len": 1}, [{"heads": 16}, {"page_size": 8}, {"kv_dtype": E4M3}]),
    (MLA, hopper.hopper_mla_tile, {"q_len": 4, "heads": 16}, [{"rank": 256}, {"rope": 32}]),
]


@pytest.mark.parametrize(
    ("function", "choice", "taken", "refused"), CHOICES, ids=["paged", "e4m3", "MLA", "MLA verify"]
)
def test_what_the_plain_kernel_has(
    function: str,
    choice: Callable[..., Any],
    taken: Arguments,
    refused: list[Arguments],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which tile it is otherwise, `tests/kernels/test_compiled_choices.py` has."""
    monkeypatch.setattr(hopper, "triton_interprets", lambda: False)
    monkeypatch.setattr(hopper, "capability_of", lambda _device: (9, 0))
    plain = of_a_choice(function, **taken)
    assert choice(plain) is not None
    for change in refused:
        assert choice(of_a_choice(function, **taken | change)) is None, change
    misplaced = torch.zeros(plain.k_cache.numel() + 1, dtype=plain.k_cache.dtype)[1:].view(plain.k_cache.shape)
    assert choice(replace(plain, k_cache=misplaced)) is None
    monkeypatch.setattr(hopper, "triton_interprets", lambda: True)
    assert choice(plain) is None
