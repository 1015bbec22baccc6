"""The portable kernels compiled for a GPU: larger shapes, CUDA graphs, equal bits, no synchronisation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.kernels import portable
from lab.kernels.portable import mla_decode, paged, ragged_context
from lab.metadata.engine.capture import capturing
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments, pack_mask, running_sum
from tests.devices import ON_GPU, graph_of, synchronisation_is_an_error
from tests.kernels.held import BF16, E4M3, FP16, FP32, ROUNDOFF
from tests.kernels.portable_calls import NAN, PortableKernel, sinks_of, truth_of

pytestmark = [*ON_GPU]

FOUR = pytest.mark.parametrize("function", [DECODE, CONTEXT, MLA, RAGGED])
PAGED = pytest.mark.parametrize("function", [DECODE, CONTEXT])
LARGE: dict[str, Arguments] = {
    DECODE: {"heads": (8, 2), "head_dim": 128, "bmm1_scale": 128**-0.5},
    CONTEXT: {"heads": (8, 2), "head_dim": 128, "bmm1_scale": 128**-0.5},
    MLA: {"heads": 16, "rank": 512, "rope": 64, "bmm1_scale": 192**-0.5},
    RAGGED: {"heads": (16, 16), "dims": (192, 128), "bmm1_scale": 192**-0.5},
}
# A weight rounded to 16 bits and an output rounded once, each at most one unit roundoff of its vector, times two.
BOUND = 4 * ROUNDOFF[BF16]


def posed(function: str, q_lens: list[int], kv_lens: list[int], page_size: int = 64, **changes: Any) -> Arguments:
    """The call of a random batch on the GPU, of a model's sizes unless changed, with new results."""
    around = {} if function == RAGGED else {"poison": NAN, "foreign_id": 0}
    options = LARGE[function] | around | {"out": None, "lse": None} | changes
    return PortableKernel(function, "cuda").pose(q_lens, kv_lens, page_size, **options)


def assert_right(function: str, arguments: Arguments) -> tuple[Tensor, Tensor]:
    return PortableKernel(function, "cuda").hold(arguments)


def run(function: str, arguments: Arguments) -> Any:
    return getattr(portable, function)(**arguments)


def skip_without_e4m3() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton compiles e4m3 for SM89 and later")


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("q_len", [1, 4, 8])
def test_decode_and_verify(page_size: int, q_len: int) -> None:
    """Lengths around pages and tiles, and long ones that are split."""
    kv_lens = [q_len, 63, 64, 65, 127, 128, 129, 1000, 4095, 4097]
    assert_right(DECODE, posed(DECODE, [q_len] * len(kv_lens), kv_lens, page_size))


@pytest.mark.parametrize("heads", [(2, 2), (8, 4), (3, 1), (10, 2), (64, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    sinks = sinks_of(heads[0])
    arguments = posed(DECODE, [3] * 3, [3, 200, 2100], heads=heads, head_dim=head_dim, sinks=sinks, window_left=127)
    assert_right(DECODE, arguments)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "out_dtype"),
    [
        (FP16, FP16, FP16),
        (BF16, BF16, FP32),
        (BF16, E4M3, BF16),
        (FP16, E4M3, FP16),
        (E4M3, E4M3, BF16),
        (BF16, BF16, E4M3),
    ],
    ids=str,
)
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    if E4M3 in (dtype, kv_dtype, out_dtype):
        skip_without_e4m3()
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype, "bmm1_scale": 0.05, "bmm2_scale": 1.3}
    assert_right(DECODE, posed(DECODE, [2] * 3, [17, 300, 3000], **options))


def test_e4m3_output_saturates() -> None:
    skip_without_e4m3()
    out = run(DECODE, posed(DECODE, [1] * 2, [40, 3000], bmm2_scale=1e5, out_dtype=E4M3))[0].float()
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) == 448.0


@pytest.mark.parametrize(
    "options", [{}, {"window_left": 500}, {"causal": False}], ids=["causal", "window", "not causal"]
)
def test_context(options: Arguments) -> None:
    assert_right(CONTEXT, posed(CONTEXT, [0, 1, 700, 33, 300], [5, 900, 700, 4000, 1100], 32, **options))


@pytest.mark.parametrize("causal", [True, False])
def test_deepseek_prefill(causal: bool) -> None:
    """New tokens, and a long chunk."""
    assert_right(RAGGED, posed(RAGGED, [1000, 129, 3000], [1000, 129, 3000], is_causal=causal))


def test_tree_mask() -> None:
    masks = (torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.4).tolist()
    for window_left in (-1, 100):
        mask = pack_mask(masks)
        assert_right(DECODE, posed(DECODE, [20] * 3, [20, 200, 2000], mask=mask, window_left=window_left))


def test_a_head_stride_beyond_32_bits() -> None:
    """Four K/V heads 2 ** 30 elements apart: the offsets of the last two need 64 bits."""
    skip_without_e4m3()
    if torch.cuda.mem_get_info()[0] < 5 * 2**30:
        pytest.skip("needs 5 GiB of free memory")
    arguments = posed(DECODE, [1], [100], heads=(4, 4), kv_dtype=E4M3)
    expected, _ = assert_right(DECODE, arguments)
    storage = torch.zeros(2**32 + 2**20, dtype=torch.uint8, device="cuda").view(E4M3)
    k, v = arguments["kv_cache"]
    far = [torch.as_strided(storage, k.shape, (k.stride(0), 2**30, *k.stride()[2:]), start) for start in (0, 2**19)]
    for to, source in zip(far, (k, v), strict=True):
        to.view(torch.uint8).copy_(source.view(torch.uint8))
    assert run(DECODE, arguments | {"kv_cache": tuple(far)})[0].equal(expected)


# Launches.


@PAGED
def test_repeated_launches_give_the_same_bits(function: str) -> None:
    arguments = posed(function, [3] * 4, [3, 100, 5000, 9000], sinks=sinks_of(8))
    first = run(function, arguments)
    for _ in range(20):
        assert all(map(torch.equal, run(function, arguments), first))


@pytest.mark.parametrize(("prompt", "decode_keys"), [((700, 700), 30_000), ((3000, 3100), 500), ((200, 9000), 9000)])
def test_launches_for_two_kinds_of_requests_end_together(prompt: tuple[int, int], decode_keys: int) -> None:
    """Whichever kind ends last, what is launched next, a copy in a replayed graph, finds the results of both."""
    q_lens, kv_lens = [1, prompt[0], 1, 2, 40], [decode_keys, prompt[1], 65, decode_keys, 900]
    arguments = posed(CONTEXT, q_lens, kv_lens)
    out, _ = assert_right(CONTEXT, arguments)
    results = {"out": torch.empty_like(out)}
    copied = torch.empty_like(out)
    call = portable.prepare_trtllm_batch_context_with_kv_cache(**arguments | results)
    call()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        call()
        copied.copy_(results["out"])
    for _ in range(20):
        results["out"].fill_(NAN)
        graph.replay()
        assert copied.equal(out)


@FOUR
def test_a_call_does_not_synchronise(function: str) -> None:
    scales = {"bmm1_scale": torch.tensor([0.05]), "bmm2_scale": torch.tensor([0.7])}
    arguments = posed(function, [3] * 3, [30, 100, 5000], **scales)
    first = run(function, arguments)  # compiles
    with synchronisation_is_an_error():
        again = run(function, arguments)
    assert again[1].equal(first[1])


LENGTHS = [[4000, 4096, 3000, 4001], [3, 64, 65, 4096], [2, 0, 1, 128], [4000, 4096, 3000, 4001]]
RAGGED_LENGTHS = [([1, 200, 99], [700, 200, 600]), ([300, 0, 0], [0, 5, 1495]), ([9, 90, 201], [8, 1, 0])]
# What is captured (function, query rows and keys, options), and the contents of later replays.
REPLAYS: dict[str, tuple[tuple[str, list[int], list[int], Arguments], list[Arguments]]] = {
    **{
        f"{function}, {q_len}": (
            (function, [q_len] * 4, LENGTHS[0], {}),
            [{"seq_lens": torch.tensor(lengths)} for lengths in LENGTHS],
        )
        for function in (DECODE, MLA)
        for q_len in (1, 3)
    },
    "context": (
        (CONTEXT, [5, 100, 1, 30], [200, 300, 400, 100], {}),
        [{"cum_seq_lens_q": running_sum(widths)} for widths in ([100, 5, 30, 1], [0, 36, 0, 100])],
    ),
    **{
        f"ragged, {causal}": (
            (RAGGED, [100] * 3, [500] * 3, {"is_causal": causal, "max_q_len": 300, "max_kv_len": 1500}),
            [
                {
                    "seq_lens": torch.tensor(kv_lens),
                    "cum_seq_lens_q": running_sum(q_lens),
                    "cum_seq_lens_kv": running_sum(kv_lens),
                }
                for q_lens, kv_lens in RAGGED_LENGTHS
            ],
        )
        for causal in (True, False)
    },
}


@pytest.mark.parametrize("name", REPLAYS)
def test_a_graph_replays_other_lengths_and_tables(name: str) -> None:
    """The same pool and results; longer, shorter, and with rows before the first key: bit for bit as eager."""
    (function, q_lens, kv_lens, options), later = REPLAYS[name]
    new = {"out": None, "lse": None}
    out, lse = run(function, posed(function, q_lens, kv_lens, **options))
    arguments = posed(function, q_lens, kv_lens, **options) | {
        "out": torch.empty_like(out),
        "lse": torch.empty_like(lse),
    }
    for cache in arguments.get("kv_cache", ()):
        cache.nan_to_num_(0.0)
    graph = graph_of(lambda: run(function, arguments))
    for contents in later:
        for changed, value in contents.items():
            arguments[changed].copy_(value)
        if "block_tables" in arguments:
            arguments["block_tables"].copy_(arguments["block_tables"].roll(1, dims=0))
        arguments["query"].copy_(torch.randn_like(arguments["query"]))
        graph.replay()
        eager = run(function, arguments | new)
        assert arguments["out"].equal(eager[0])
        assert arguments["lse"].view(eager[1].shape).equal(eager[1])
        truth, _ = truth_of(function, arguments)
        assert float(references.relative_l2(eager[0], truth).max()) <= BOUND


# A first call, and others that must not compile again amid serving: (query rows, keys, options), and the most new kernels.
KERNELS: dict[str, Any] = {
    DECODE: paged._attention_kernel,
    MLA: mla_decode._mla_kernel,
    RAGGED: ragged_context._ragged_kernel,
}
COMPILED: dict[str, tuple[list[tuple[list[int], list[int], Arguments]], int]] = {
    # One for the table's stride, a multiple of 16 or not.
    DECODE: (
        [
            ([1] * len(kv_lens), kv_lens, {"window_left": 17 + len(kv_lens)})
            for kv_lens in ([4000, 3999, 5], [4000, 1, 3999, 7], [4096, 4000, 9])
        ],
        1,
    ),
    MLA: (
        [
            ([1] * len(kv_lens), kv_lens, {})
            for kv_lens in ([4000, 3999, 5], [4000, 1, 3999, 7], [4096] * 40, [300] * 16, [2000])
        ],
        0,
    ),
    RAGGED: (
        [
            (q_lens, kv_lens, {"window_left": window_left})
            for q_lens, kv_lens in (([200, 1], [3000, 1]), ([129] * 40, [130] * 40), ([1000], [1001]))
            for window_left in (-1, 0, 1, 16, 17)
        ],
        0,
    ),
}


@pytest.mark.parametrize("function", COMPILED)
def test_lengths_windows_and_batches_compile_nothing_new(function: str) -> None:
    def compiled() -> int:
        return sum(len(cache[0]) for cache in KERNELS[function].device_caches.values())

    first = ([200] * 3, [200] * 3, {"window_left": 33}) if function == RAGGED else ([1] * 3, [4000] * 3, {})
    run(function, posed(function, *first[:2], **first[2]))
    before = compiled()
    later, most_new = COMPILED[function]
    for q_lens, kv_lens, options in later:
        arguments = posed(function, q_lens, kv_lens, **options)
        if function == DECODE:
            width = arguments["block_tables"].shape[1]
            arguments["block_tables"] = torch.nn.functional.pad(arguments["block_tables"], (0, 96 - width))
        run(function, arguments)
    assert compiled() <= before + most_new
