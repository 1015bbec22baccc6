"""The portable kernel compiled for a GPU: larger shapes, CUDA graphs, equal bits, no synchronisation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.kernels import portable
from lab.kernels.portable import paged
from lab.metadata.engine.capture import capturing
from tests.cases import context_arguments, decode_arguments, pack_mask, random_batch, running_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU that Triton compiles for"),
]

DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# A weight rounded to 16 bits and an output rounded once, each at most one unit roundoff of its vector, times two.
BOUND = {BF16: 4 * 2.0**-8, FP16: 4 * 2.0**-11}
# Many long sums in float32, of products of numbers about 1.
LSE_TOLERANCE = 1e-4

Arguments = dict[str, Any]


def on_gpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on_gpu(item) for item in value)
    return value.cuda() if isinstance(value, Tensor) else value


def posed(function: str, q_lens: list[int], kv_lens: list[int], page_size: int = 64, **changes: Any) -> Arguments:
    """The call of a random batch, on the GPU; 8 query and 2 K/V heads of 128 unless changed."""
    options = {"heads": (8, 2), "head_dim": 128, "dtype": BF16}
    options |= {name: changes.pop(name) for name in ("heads", "head_dim", "dtype", "kv_dtype") if name in changes}
    batch = random_batch(q_lens, kv_lens, **options)
    make = decode_arguments if function == DECODE else context_arguments
    defaults = {"out_dtype": None, "bmm1_scale": options["head_dim"] ** -0.5}
    arguments = make(batch, page_size, poison=float("nan"), foreign_id=0, **defaults | changes)
    return {name: on_gpu(value) for name, value in arguments.items()}


def assert_right(function: str, arguments: Arguments) -> tuple[Tensor, Tensor]:
    out, lse = getattr(portable, function)(**arguments)
    truth, truth_lse = getattr(references, function)(
        **arguments | {"out": None, "out_dtype": torch.float64, "lse": None}
    )
    dtype = FP16 if arguments["query"].dtype == FP16 else BF16
    bound = BOUND[dtype] if out.dtype != E4M3 else 2 * 2.0**-4
    assert float(references.relative_l2(out, truth).max()) <= bound
    torch.testing.assert_close(lse.double(), truth_lse.double(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    return out, lse


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
def test_uint32_lengths_compile(function: str) -> None:
    """The interpreter lets a variable change its dtype in a loop; the compiler does not."""
    arguments = posed(function, [1, 1], [700, 33], return_lse=True)
    assert_right(function, arguments | {"seq_lens": arguments["seq_lens"].to(torch.uint32)})


def skip_without_e4m3() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton compiles e4m3 for SM89 and later")


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("q_len", [1, 4, 8])
def test_decode_and_verify(page_size: int, q_len: int) -> None:
    """Lengths around pages and tiles, and long ones that are split."""
    kv_lens = [q_len, 63, 64, 65, 127, 128, 129, 1000, 4095, 4097]
    assert_right(DECODE, posed(DECODE, [q_len] * len(kv_lens), kv_lens, page_size))


@pytest.mark.parametrize(
    "heads", [(2, 2), (8, 4), (3, 1), (10, 2), (64, 8)], ids=lambda heads: f"{heads[0]}/{heads[1]}"
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    sinks = torch.linspace(-2.0, 6.0, heads[0])
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
    scales = {"bmm1_scale": 0.05, "bmm2_scale": 1.3}
    arguments = posed(DECODE, [2] * 3, [17, 300, 3000], dtype=dtype, kv_dtype=kv_dtype, out_dtype=out_dtype, **scales)
    assert_right(DECODE, arguments)


def test_scales_in_tensors() -> None:
    scales = {"bmm1_scale": torch.tensor([0.05]), "bmm2_scale": torch.tensor(0.7)}
    assert_right(DECODE, posed(DECODE, [2] * 3, [17, 300, 3000], **scales))


def test_e4m3_output_saturates() -> None:
    skip_without_e4m3()
    arguments = posed(DECODE, [1] * 2, [40, 3000], bmm2_scale=1e5, out_dtype=E4M3)
    out = portable.trtllm_batch_decode_with_kv_cache(**arguments)[0].float()
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) == 448.0


@pytest.mark.parametrize(
    "options", [{}, {"window_left": 500}, {"causal": False}], ids=["causal", "window", "not causal"]
)
def test_context(options: Arguments) -> None:
    assert_right(CONTEXT, posed(CONTEXT, [0, 1, 700, 33, 300], [5, 900, 700, 4000, 1100], 32, **options))


def test_tree_mask() -> None:
    masks = (torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.4).tolist()
    for window_left in (-1, 100):
        arguments = posed(DECODE, [20] * 3, [20, 200, 2000], mask=pack_mask(masks), window_left=window_left)
        assert_right(DECODE, arguments)


def test_rows_without_a_key_are_zero() -> None:
    out, lse = assert_right(DECODE, posed(DECODE, [4] * 3, [0, 2, 3000]))
    assert not out[:6].any()
    assert bool((lse[:6] == -float("inf")).all())


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
    out, _ = portable.trtllm_batch_decode_with_kv_cache(**arguments | {"kv_cache": tuple(far)})
    assert out.equal(expected)


# Launches.


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
def test_repeated_launches_give_the_same_bits(function: str) -> None:
    arguments = posed(function, [3] * 4, [3, 100, 5000, 9000], sinks=torch.linspace(-2.0, 6.0, 8))
    first = getattr(portable, function)(**arguments)
    for _ in range(20):
        for got, expected in zip(getattr(portable, function)(**arguments), first, strict=True):
            assert got.equal(expected)


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
        results["out"].fill_(float("nan"))
        graph.replay()
        assert copied.equal(out)


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    """Any call that waits for the GPU raises."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
def test_a_call_does_not_synchronise(function: str, request: pytest.FixtureRequest) -> None:
    scales = {"bmm1_scale": torch.tensor([0.05]), "bmm2_scale": torch.tensor([0.7])}
    arguments = posed(function, [3] * 3, [30, 100, 5000], **scales)
    getattr(portable, function)(**arguments)  # compiles
    request.getfixturevalue("_no_synchronisation")
    getattr(portable, function)(**arguments)


def graph_of(function: str, arguments: Arguments) -> torch.cuda.CUDAGraph:
    """The call, captured after one run of it on a side stream, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        getattr(portable, function)(**arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        getattr(portable, function)(**arguments)
    return graph


LATER_LENGTHS = [[4000, 4096, 3000, 4001], [3, 64, 65, 4096], [2, 0, 1, 128]]


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_graph_replays_other_lengths_and_tables(q_len: int) -> None:
    """The same pool and output; longer, shorter, and with rows before the first key: bit for bit as eager."""
    arguments = posed(DECODE, [q_len] * 4, LATER_LENGTHS[0])
    rows, heads = arguments["query"].shape[:2]
    results = {"out": torch.empty_like(arguments["query"]), "lse": torch.empty(rows, heads, device="cuda")}
    captured = arguments | results
    graph = graph_of(DECODE, captured)
    for lengths in [*LATER_LENGTHS, LATER_LENGTHS[0]]:
        arguments["seq_lens"].copy_(torch.tensor(lengths))
        arguments["block_tables"].copy_(arguments["block_tables"].roll(1, dims=0))
        arguments["query"].copy_(torch.randn_like(arguments["query"]))
        arguments["kv_cache"][0].nan_to_num_(0.0)
        arguments["kv_cache"][1].nan_to_num_(0.0)
        graph.replay()
        out, lse = portable.trtllm_batch_decode_with_kv_cache(**arguments)
        assert results["out"].equal(out)
        assert results["lse"].equal(lse)
        truth = references.trtllm_batch_decode_with_kv_cache(**arguments | {"out_dtype": torch.float64})[0]
        assert float(references.relative_l2(out, truth).max()) <= BOUND[BF16]


def test_a_graph_replays_other_row_offsets() -> None:
    q_lens, later = [5, 100, 1, 30], [[100, 5, 30, 1], [0, 36, 0, 100]]
    arguments = posed(CONTEXT, q_lens, [200, 300, 400, 100])
    captured = arguments | {"out": torch.empty_like(arguments["query"])}
    graph = graph_of(CONTEXT, captured)
    for widths in later:
        arguments["cum_seq_lens_q"].copy_(running_sum(widths))
        graph.replay()
        out, _ = portable.trtllm_batch_context_with_kv_cache(**arguments)
        assert captured["out"].equal(out)


def test_lengths_compile_nothing_new() -> None:
    """A new length, bound or window, or a batch up to the same power of 2, must not compile again amid serving."""
    compiled = paged._attention_kernel.device_caches
    portable.trtllm_batch_decode_with_kv_cache(**posed(DECODE, [1] * 3, [4000, 4000, 4000]))
    before = {device: len(cache[0]) for device, cache in compiled.items()}
    for kv_lens in ([4000, 3999, 5], [4000, 1, 3999, 7], [4096, 4000, 9]):
        arguments = posed(DECODE, [1] * len(kv_lens), kv_lens, window_left=17 + len(kv_lens))
        width = arguments["block_tables"].shape[1]
        arguments["block_tables"] = torch.nn.functional.pad(arguments["block_tables"], (0, 96 - width))
        portable.trtllm_batch_decode_with_kv_cache(**arguments)
    after = {device: len(cache[0]) for device, cache in compiled.items()}
    assert sum(after.values()) <= sum(before.values()) + 1  # of the table's stride, a multiple of 16 or not
