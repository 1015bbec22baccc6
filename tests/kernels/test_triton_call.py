"""Prepared calls of the portable kernels: the same results as whole calls, the same launches, less to do for them."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lab.kernels import portable, prepare
from lab.kernels.portable.triton_call import TritonCall, TritonLaunch
from lab.metadata.engine.capture import capturing
from lab.timing.host_time import host_time
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments, pack_mask
from tests.devices import IN_INTERPRETER, ON_GPU
from tests.kernels.adapter_calls import case
from tests.kernels.every_triton_kernel import deepseek
from tests.kernels.held import on

NEW_RESULTS: Arguments = {"out": None, "lse": None}


USUAL: Arguments = {"return_lse": True, "bmm1_scale": 0.125}


def decode(q_len: int, kv_lens: tuple[int, int] = (149, 150), **changes: Any) -> Arguments:
    """Two requests of as many pages each."""
    return case(DECODE, q_len, kv_lens, page_size=64, **USUAL | changes)


context = partial(case, CONTEXT, (3, 20), (70, 75), **USUAL)
ragged = partial(case, RAGGED, (3, 20), (40, 20), **USUAL)


def masked() -> Arguments:
    triangle = [[[token <= row for token in range(3)] for row in range(3)] for _ in range(2)]
    return decode(3, mask=pack_mask(triangle), window_left=100)


def given_results() -> Arguments:
    arguments = decode(2)
    rows, heads, _ = arguments["query"].shape
    return arguments | {"out": torch.empty_like(arguments["query"]), "lse": torch.empty(rows, heads)}


def tensor_scales() -> Arguments:
    sinks = torch.linspace(-1.0, 1.0, 4)
    return decode(1, bmm1_scale=torch.tensor([0.1]), bmm2_scale=torch.tensor([1.5]), sinks=sinks)


def strided_mla() -> Arguments:
    """A query whose rows are those of a wider one, so that no view has them in one dimension."""
    arguments = deepseek(2, 8, [69, 70])
    wider = torch.nn.functional.pad(arguments["query"], (0, 0, 0, 0, 0, 1))
    return arguments | {"query": wider[:, :2]}


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "decode": (DECODE, lambda: decode(1)),
    "128 rows": (DECODE, lambda: decode(16, heads=(16, 2))),
    "e4m3": (DECODE, lambda: decode(2, kv_dtype=torch.float8_e4m3fn)),
    "mask and window": (DECODE, masked),
    "given results": (DECODE, given_results),
    "scales in tensors": (DECODE, tensor_scales),
    "scale in base 2": (DECODE, lambda: decode(1, bmm1_scale_log2=torch.tensor([0.2]))),
    "one page, whose table's stride 1 is compiled in": (DECODE, lambda: decode(1, kv_lens=(60, 63))),
    "context": (CONTEXT, context),
    "window of a context": (CONTEXT, lambda: context(window_left=30)),
    "mla": (MLA, lambda: deepseek(2, 8, [69, 70])),
    "mla, lse in base e": (MLA, lambda: deepseek(1, 16, [69, 70]) | {"return_lse_base": "basee"}),
    "mla, rows apart": (MLA, strided_mla),
    "ragged": (RAGGED, ragged),
}


@pytest.fixture(params=CALLS)
def posed(request: pytest.FixtureRequest) -> tuple[str, Arguments]:
    function, make = CALLS[request.param]
    return function, make()


def moved(arguments: Arguments, device: str) -> Arguments:
    return {name: on(device, value) for name, value in arguments.items()}


def change_contents(arguments: Arguments) -> None:
    """Other rows, keys and pages, other lengths, scales and sinks: all that a call reads on the device."""
    arguments["query"].copy_(arguments["query"].flip(0))
    for name in ("bmm1_scale", "bmm2_scale", "bmm1_scale_log2", "sinks", "key", "value"):
        if isinstance(arguments.get(name), torch.Tensor):
            arguments[name].mul_(1.25)
    if "block_tables" in arguments:
        arguments["block_tables"].copy_(arguments["block_tables"].roll(1, dims=0))
        arguments["seq_lens"].sub_(1)
    if "block_tables" in arguments and arguments.get("cum_seq_lens_kv") is not None:
        arguments["cum_seq_lens_kv"][1:] = arguments["seq_lens"].cumsum(0)


def test_every_call_of_a_prepared_one_is_the_whole_call(device: str, posed: tuple[str, Arguments]) -> None:
    function, arguments = posed[0], moved(posed[1], device)
    call = prepare(portable, function, **arguments)
    assert isinstance(call, TritonCall)
    for _ in range(2):
        change_contents(arguments)
        results = call()
        expected = getattr(portable, function)(**arguments | NEW_RESULTS)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        assert all(again is first for again, first in zip(call(), results, strict=True))
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_what_a_call_refuses_is_refused_when_it_is_prepared(device: str) -> None:
    arguments = moved(decode(1), device)
    arguments |= {"query": arguments["query"][..., :32], "kv_cache": tuple(c[..., :32] for c in arguments["kv_cache"])}
    with pytest.raises(NotImplementedError, match="head_dim 64, 128 and 256, not 32"):
        prepare(portable, DECODE, **arguments)


@IN_INTERPRETER
def test_on_a_cpu_every_call_checks_contents() -> None:
    for function, arguments, name in (
        (DECODE, decode(1), "seq_lens"),
        (MLA, deepseek(1, 8, [69, 70]), "seq_lens"),
        (RAGGED, ragged(), "cum_seq_lens_q"),
    ):
        call = prepare(portable, function, **arguments)
        call()
        arguments[name].fill_(1000)
        with pytest.raises(ValueError, match=name):
            call()


@pytest.mark.parametrize("base", ["base2", "basee"])
def test_a_batch_without_rows(device: str, base: str) -> None:
    arguments = moved(deepseek(1, 8, [69, 70]), device)
    nobody = {name: arguments[name][:0] for name in ("query", "block_tables", "seq_lens")}
    call = prepare(portable, MLA, **arguments | nobody | {"return_lse_base": base})
    for _ in range(2):
        assert [tuple(result.shape) for result in call()] == [(0, 1, 8, 512), (0, 8)]


class FakeKernel:
    """A kernel of parameters `tensor, count, SIZE, WIDE` that is compiled by its first launch, if at all."""

    arg_names = ("tensor", "count", "SIZE", "WIDE")

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.fails = compiles, False
        self.events: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **named: Any) -> Any:
            if self.fails:
                raise RuntimeError("out of resources")
            self.events.append(("launched", grid, arguments, named))
            return FakeCompiled(self.events) if self.compiles else None

        return launch


class FakeCompiled:
    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self.events = events

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.events.append(("repeated", grid, arguments))


def fake_call(kernel: FakeKernel, tensor: torch.Tensor) -> TritonCall:
    launch = TritonLaunch(kernel, (5, 2), tensor, 7, WIDE=True, SIZE=64, num_warps=4)
    steps = [launch, lambda: kernel.events.append(("finished",))]
    return TritonCall(tensor.device, lambda: None, steps, "results")


def test_a_compiled_kernel_is_launched_again_at_the_same_addresses() -> None:
    """Also after a first launch that failed."""
    kernel, tensor = FakeKernel(compiles=True), torch.zeros(3)
    call = fake_call(kernel, tensor)
    kernel.fails = True
    with pytest.raises(RuntimeError, match="out of resources"):
        call()
    kernel.fails = False
    assert [call(), call(), call()] == ["results"] * 3
    first = ("launched", (5, 2), (tensor, 7), {"WIDE": True, "SIZE": 64, "num_warps": 4})
    again = ("repeated", (5, 2, 1), (tensor.data_ptr(), 7, 64, True))
    assert kernel.events == [first, ("finished",), again, ("finished",), again, ("finished",)]


def test_what_compiles_nothing_is_launched_as_before() -> None:
    kernel = FakeKernel(compiles=False)
    call = fake_call(kernel, torch.zeros(3))
    call()
    call()
    launched, finished, again, _ = kernel.events
    assert launched == again
    assert (launched[0], finished) == ("launched", ("finished",))


@pytest.mark.parametrize("first", ["before the graph", "in the graph"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_graph_of_a_prepared_call_replays_other_contents(
    device: str, first: str, posed: tuple[str, Arguments]
) -> None:
    function, arguments = posed[0], moved(posed[1], device)
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
        expected = getattr(portable, function)(**arguments | NEW_RESULTS)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times the host, which other workers use meanwhile")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_prepared_call_costs_the_host_less_than_half(device: str) -> None:
    arguments = moved(decode(1), device)
    whole = partial(portable.trtllm_batch_decode_with_kv_cache, **arguments)
    times = host_time({"whole": whole, "prepared": prepare(portable, DECODE, **arguments)})
    medians = {name: time.median_us for name, time in times.items()}
    print(f"\nhost time per call, µs: {medians}")
    assert medians["prepared"] <= medians["whole"] / 2
