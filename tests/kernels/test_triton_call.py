"""Prepared calls of the portable kernels: the same results as whole calls, the same launches, less to do for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.capture import capturing
from lab.kernels import portable, prepare
from lab.kernels.triton_call import Launch, PreparedCall
from lab.timing.host_time import host_time
from tests.cases import context_arguments, decode_arguments, random_batch
from tests.devices import DEVICES, ON_GPU
from tests.kernels.every_triton_kernel import mla_arguments, on_gpu
from tests.references.test_trtllm_ragged import ragged_arguments, ragged_batch

Arguments = dict[str, Any]
DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
MLA, RAGGED = "trtllm_batch_decode_with_kv_cache_mla", "trtllm_ragged_attention_deepseek"


def decode(q_len: int, heads: tuple[int, int] = (4, 2), **options: Any) -> Arguments:
    batch = random_batch([q_len] * 2, [q_len + 3, 150], heads=heads, head_dim=64, dtype=torch.bfloat16, **options)
    return decode_arguments(batch, 64, out_dtype=None, bmm1_scale=0.125)


def context() -> Arguments:
    batch = random_batch([3, 20], [70, 30], heads=(4, 2), head_dim=64, dtype=torch.bfloat16)
    return context_arguments(batch, 16, out_dtype=None, bmm1_scale=0.125)


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "decode": (DECODE, lambda: decode(1)),
    "128 rows": (DECODE, lambda: decode(16, (16, 2))),
    "e4m3": (DECODE, lambda: decode(2, kv_dtype=torch.float8_e4m3fn)),
    "context": (CONTEXT, context),
    "mla": (MLA, lambda: mla_arguments(2, 8, [5, 70])),
    "mla, lse in base e": (MLA, lambda: mla_arguments(1, 16, [5, 70]) | {"return_lse_base": "basee"}),
    "ragged": (RAGGED, lambda: ragged_arguments(ragged_batch([3, 20], [40, 20], dims=(192, 128)), out=None)),
}


@pytest.fixture(params=CALLS)
def posed(request: pytest.FixtureRequest) -> tuple[str, Arguments]:
    function, make = CALLS[request.param]
    return function, make()


def change_contents(arguments: Arguments) -> None:
    """Other rows, and other lengths where the call reads them on the device."""
    arguments["query"].copy_(arguments["query"].flip(0))
    if "block_tables" in arguments:
        arguments["seq_lens"].sub_(1)
    if arguments.get("cum_seq_lens_kv") is not None and "block_tables" in arguments:
        arguments["cum_seq_lens_kv"][1:] = arguments["seq_lens"].cumsum(0)


@pytest.mark.parametrize("device", DEVICES)
def test_every_call_of_a_prepared_one_is_the_whole_call(device: str, posed: tuple[str, Arguments]) -> None:
    function, arguments = posed
    if device == "cuda":
        arguments = {name: on_gpu(value) for name, value in arguments.items()}
    call = prepare(portable, function, **arguments)
    assert isinstance(call, PreparedCall)
    for _ in range(3):
        change_contents(arguments)
        results = call()
        expected = getattr(portable, function)(**arguments)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        assert all(again is first for again, first in zip(call(), results, strict=True))
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_call_refuses_is_refused_when_it_is_prepared(device: str) -> None:
    arguments = {name: on_gpu(value) if device == "cuda" else value for name, value in decode(1).items()}
    arguments |= {"query": arguments["query"][..., :32], "kv_cache": tuple(c[..., :32] for c in arguments["kv_cache"])}
    with pytest.raises(NotImplementedError, match="head_dim 64, 128 and 256, not 32"):
        prepare(portable, DECODE, **arguments)


class FakeKernel:
    """A kernel of parameters `tensor, count, SIZE, WIDE` that is compiled by its first launch, if at all."""

    arg_names = ("tensor", "count", "SIZE", "WIDE")

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.events: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **named: Any) -> Any:
            self.events.append(("launched", grid, arguments, named))
            return FakeCompiled(self.events) if self.compiles else None

        return launch


class FakeCompiled:
    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self.events = events

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.events.append(("repeated", grid, arguments))


def fake_call(kernel: FakeKernel, tensor: torch.Tensor) -> PreparedCall:
    launch = Launch(kernel, (5, 2), tensor, 7, WIDE=True, SIZE=64, num_warps=4)
    return PreparedCall(tensor.device, [launch], "results", lambda: kernel.events.append(("finished",)))


def test_a_compiled_kernel_is_launched_again_at_the_same_addresses() -> None:
    kernel, tensor = FakeKernel(compiles=True), torch.zeros(3)
    call = fake_call(kernel, tensor)
    assert kernel.events == []
    assert [call(), call(), call()] == ["results"] * 3
    first = ("launched", (5, 2), (tensor, 7), {"WIDE": True, "SIZE": 64, "num_warps": 4})
    again = ("repeated", (5, 2, 1), (tensor.data_ptr(), 7, 64, True))
    assert kernel.events == [first, ("finished",), again, ("finished",), again, ("finished",)]


def test_what_compiles_nothing_is_launched_as_before() -> None:
    kernel, tensor = FakeKernel(compiles=False), torch.zeros(3)
    call = fake_call(kernel, tensor)
    call()
    call()
    launched, finished, again, _ = kernel.events
    assert launched == again == ("launched", (5, 2), (tensor, 7), {"WIDE": True, "SIZE": 64, "num_warps": 4})
    assert finished == ("finished",)


@pytest.mark.parametrize("first", ["before the graph", "in the graph"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_graph_of_a_prepared_call_replays_other_contents(
    device: str, first: str, posed: tuple[str, Arguments]
) -> None:
    function, arguments = posed[0], {name: on_gpu(value) for name, value in posed[1].items()}
    getattr(portable, function)(**arguments)  # nothing is compiled in a capture
    call = prepare(portable, function, **arguments)
    if first == "before the graph":
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        results = call()
    for _ in range(2):
        change_contents(arguments)
        graph.replay()
        expected = getattr(portable, function)(**arguments)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_prepared_call_costs_the_host_less_than_half(device: str) -> None:
    arguments = {name: value.to(device) if hasattr(value, "to") else on_gpu(value) for name, value in decode(1).items()}
    whole = portable.trtllm_batch_decode_with_kv_cache
    times = host_time({"whole": lambda: whole(**arguments), "prepared": prepare(portable, DECODE, **arguments)})
    medians = {name: time.median_us for name, time in times.items()}
    print(f"\nhost time per call, µs: {medians}")
    assert medians["prepared"] <= medians["whole"] / 2
