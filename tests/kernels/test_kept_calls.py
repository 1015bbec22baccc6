"""Whole calls like an earlier one: the launches of a call that is checked anew, or its refusal, whatever was kept before.

No kernel runs: tensors on the CPU say that they are on an H200, and launches are written down.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lab.calls import made_at_once
from lab.kernels import portable
from lab.kernels.portable import hopper, kept_calls, triton_call
from lab.kernels.portable.hopper_attention import hopper_attention_kernel
from lab.kernels.portable.kept_calls import facts_of, kept, kept_at_once
from lab.kernels.portable.triton_call import TritonCall, TritonLaunch, new_scratch
from tests.calls.breaks import Bad
from tests.calls.test_calls import BAD, FUNCTIONS, good_arguments
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments
from tests.devices import ON_GPU
from tests.kernels.adapter_calls import case
from tests.kernels.every_triton_kernel import deepseek
from tests.kernels.test_triton_call import CALLS, USUAL, FakeKernel, context, decode, moved, ragged

H200 = torch.device("cuda", 0)
EMPTY = torch.empty
LEAST_ADDRESS = 2**26  # smaller numbers are lengths and strides; where the heap begins low, addresses are below 2**32
NOT_KEPT = ("scale in base 2", "mla, lse in base e", "mla, rows apart")  # they are more than launches
OWN_DEVICE = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]


def one_cache(arguments: Arguments) -> Arguments:
    """K and V in one tensor, a page of K before its page of V."""
    return arguments | {"kv_cache": torch.stack(arguments["kv_cache"], 1)}


def separate_tables() -> Arguments:
    arguments = decode(2)
    tables = torch.stack((arguments["block_tables"], arguments["block_tables"] + 1), 1)
    return arguments | {"block_tables": tables, "uses_shared_paged_kv_idx": False}


def ragged_decode() -> Arguments:
    return decode(1) | {"q_len_per_req": None, "max_q_len": 1, "cum_seq_lens_q": torch.arange(3, dtype=torch.int32)}


def from_one_buffer() -> Arguments:
    """Lengths and offsets side by side in one buffer, keys and values in one projection, as engines have them."""
    arguments = ragged()
    lengths = torch.cat([arguments[name] for name in ("cum_seq_lens_q", "cum_seq_lens_kv", "seq_lens")])
    both = torch.cat((arguments["key"], arguments["value"]), dim=2)
    names = {"cum_seq_lens_q": lengths[:3], "cum_seq_lens_kv": lengths[3:6], "seq_lens": lengths[6:]}
    return arguments | names | {"key": both[..., :192], "value": both[..., 192:]}


# As many blocks of rows as fill the GPU.
gluon_blocks = partial(case, CONTEXT, (1100, 3), (1100, 40), heads=(16, 1), page_size=64, **USUAL)
prompt_beside_decodes = partial(case, CONTEXT, (1, 70, 2), (50, 75, 9), page_size=64, **USUAL)


POSED: dict[str, tuple[str, Callable[[], Arguments]]] = {
    **{name: posed for name, posed in CALLS.items() if name not in NOT_KEPT},
    "prefill by descriptors": (CONTEXT, lambda: context() | {"max_q_len": 20}),
    "one cache": (DECODE, lambda: one_cache(decode(4))),
    "separate tables": (DECODE, separate_tables),
    "offsets": (DECODE, ragged_decode),
    "mla, 64 rows": (MLA, lambda: deepseek(4, 16, [69, 70])),
    "one buffer": (RAGGED, from_one_buffer),
    "prompt beside decodes": (CONTEXT, lambda: prompt_beside_decodes(kv_dtype=torch.float8_e4m3fn)),
    "gluon beside decodes": (CONTEXT, prompt_beside_decodes),
    "gluon, blocks of rows": (CONTEXT, gluon_blocks),
    "small batch, merged by a launch": (DECODE, lambda: decode(4, (5000, 5100), heads=(16, 2))),
    "gluon, shares": (DECODE, lambda: decode(17, heads=(8, 1))),
}


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_of(part)]
    return [value] if isinstance(value, torch.Tensor) else []


class Launches:
    """What calls launch and return, written down: addresses of what a call allocates by its order and a place in it."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.new: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []

    def empty(self, *shape: Any, device: object = None, **options: Any) -> torch.Tensor:
        self.new.append(EMPTY(*shape, **options))
        return self.new[-1]

    def zeros(self, *shape: Any, **options: Any) -> torch.Tensor:
        return self.empty(*shape, **options).zero_()

    def launch(self, launch: Any) -> None:
        """Stand for `TritonLaunch.__call__`."""
        launch.compiled = Compiled(self, launch._kernel)
        launch._bare_launch()(*triton_call._addressed(launch._arguments), *launch._constants())

    def named(self, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(self.named, argument))
        if hasattr(argument, "block_shape"):
            terms = argument.shape, argument.strides, argument.block_shape, argument.padding
            return self.named(argument.base.data_ptr()), terms
        if type(argument) is not int or argument < LEAST_ADDRESS:
            return argument
        for index, each in enumerate(self.new):
            if each.data_ptr() <= argument < each.data_ptr() + each.nbytes:
                return "new", index, argument - each.data_ptr()
        memory = [tensor.untyped_storage() for tensor in self.given]
        return argument if any(0 <= argument - each.data_ptr() < each.nbytes() for each in memory) else "of a copy"

    def of(self, call: Callable[..., Any], arguments: Arguments) -> Any:
        """Return what a call launches and returns, or the error that it raises."""
        self.events, self.new, self.given = [], [], tensors_of(tuple(arguments.values()))
        try:
            results = call(**arguments)
        except (TypeError, ValueError, RuntimeError) as error:  # torch's own too, where no check has a sentence
            return type(error), str(error), self.events
        results = results if isinstance(results, tuple) else (results,)
        described = [(self.named(each.data_ptr()), each.shape, each.stride(), each.dtype) for each in results]
        return described, self.events


class Compiled:
    def __init__(self, launches: Launches, kernel: Any) -> None:
        self.launches, self.kernel = launches, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.events.append((self.kernel, grid, self.launches.named(arguments)))


def device_of(tensor: torch.Tensor) -> torch.device:
    own = OWN_DEVICE(tensor)
    return H200 if own.type == "cpu" else own


@pytest.fixture
def launches() -> Iterator[Launches]:
    written = Launches()
    with (
        mock.patch.object(torch.Tensor, "device", property(device_of), create=True),
        mock.patch.object(
            torch.Tensor, "is_cuda", property(lambda tensor: device_of(tensor).type == "cuda"), create=True
        ),
        mock.patch.object(torch, "empty", written.empty),
        mock.patch.object(torch, "zeros", written.zeros),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)),
        mock.patch.object(TritonLaunch, "__call__", lambda launch: written.launch(launch)),
        mock.patch.object(hopper, "triton_interprets", return_value=False),
    ):
        yield written


class Counted:
    """A call's function that keeps calls of its own, the same that keeps none, and how often a call was prepared."""

    def __init__(self, function: str) -> None:
        prepare = getattr(portable, f"prepare_{function}")
        self.prepared = 0

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.prepared += 1
            return prepare(*args, **kwargs)

        counting.__name__ = prepare.__name__
        self.keeping, self.fresh = kept_at_once(counting), made_at_once(prepare)


def elsewhere(value: Any) -> Any:
    """Return an argument whose tensors are others of the same shapes, strides and contents."""
    if isinstance(value, tuple):
        return tuple(map(elsewhere, value))
    if not isinstance(value, torch.Tensor):
        return value
    room = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    aligned = torch.zeros(room + 16, dtype=value.dtype)[value.storage_offset() % 16 :]
    return aligned.as_strided(value.shape, value.stride()).copy_(value)


def moved_away(arguments: Arguments) -> Arguments:
    return {name: elsewhere(value) for name, value in arguments.items()}


@pytest.mark.parametrize("name", POSED)
def test_a_kept_call_launches_what_a_checked_one_does(launches: Launches, name: str) -> None:
    function, make = POSED[name]
    arguments, counted = make(), Counted(function)
    for new in ({}, {"out": None, "lse": None}):
        called = arguments | new
        for _ in range(2):
            assert launches.of(counted.keeping, called) == launches.of(counted.fresh, called)
        prepared = counted.prepared
        for again in (called, moved_away(called), moved_away(called)):
            launched = launches.of(counted.keeping, again)
            assert len(launched[1]) > 0
            assert name.startswith("gluon") <= (hopper_attention_kernel in [kernel for kernel, *_ in launched[1]])
            assert name.endswith("beside decodes") <= (len(launched[1]) > 2)
            assert len(launched[1]) == {"decode": 1, "small batch, merged by a launch": 2}.get(name, len(launched[1]))
            assert launched == launches.of(counted.fresh, again)
        assert counted.prepared == prepared


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_more_than_launches_is_checked_each_time(launches: Launches, name: str) -> None:
    function, make = CALLS[name]
    arguments, counted = make(), Counted(function)
    for times in (1, 2, 3):
        launches.of(counted.keeping, arguments)
        assert counted.prepared == times


def test_rows_that_contents_tell_are_read_each_time(launches: Launches) -> None:
    arguments, counted = deepseek(2, 8, [69, 70]), Counted(MLA)
    arguments |= {"query": arguments["query"].flatten(0, 1), "max_q_len": None, "return_lse_base": "base2"}
    for offsets in ([0, 2, 4], [0, 2, 4], [0, 1, 4], [0, 2, 4]):
        arguments["cum_seq_lens_q"] = torch.tensor(offsets, dtype=torch.int32)
        assert launches.of(counted.keeping, arguments) == launches.of(counted.fresh, arguments)
    assert counted.prepared == 4


def test_tensors_in_one_place_are_kept_from_being_confused(launches: Launches) -> None:
    """K and V are one tensor in the first call and two in the next: its launches do not tell one from the other."""
    arguments, counted = decode(1), Counted(DECODE)
    k_cache, v_cache = arguments["kv_cache"]
    one, two = (k_cache, k_cache), (k_cache, v_cache)
    for cache in (one, one, two, (v_cache, k_cache), (v_cache, v_cache)):
        called = arguments | {"kv_cache": cache}
        assert launches.of(counted.keeping, called) == launches.of(counted.fresh, called)
    assert counted.prepared == 3


@pytest.mark.parametrize(("call", "row"), BAD, ids=[f"{call}-{row[2]}" for call, row in BAD])
def test_bad_input_is_refused_after_a_good_call(launches: Launches, call: str, row: Bad) -> None:
    good, counted = good_arguments(call) | {"lse": torch.zeros(4, 4)}, Counted(FUNCTIONS[call])
    bad = good | row[0](good)
    expected = launches.of(counted.fresh, bad)  # launches where contents alone are wrong, which nobody reads on a GPU
    for arguments in (good, good, good, bad, bad, bad, good, bad):
        last = launches.of(counted.keeping, arguments)
    assert last == expected


def test_results_in_the_memory_of_an_input_are_refused_after_a_good_call(launches: Launches) -> None:
    """The input's alignment is that of the good call's output, so that only the addresses differ."""
    arguments, counted = decode(1), Counted(DECODE)
    good, bad = (arguments | {"out": out} for out in (torch.empty_like(arguments["query"]), arguments["query"]))
    expected = launches.of(counted.fresh, bad)
    assert "shares memory with query" in str(expected)
    for called in (good, good, good, bad):
        last = launches.of(counted.keeping, called)
    assert str(last) == str(expected)


def at(address: int, offset: int) -> torch.Tensor:
    """Return a tensor that begins so many bytes after a multiple of 16, and so many elements after its storage."""
    memory = bytearray(64)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(memory, dtype=torch.uint8, offset=(address - offset - begin) % 16)[offset : offset + 16]


def test_a_key_tells_what_checks_and_compilers_read(launches: Launches) -> None:
    tensor = at(0, 0)
    for one, other in (
        (tensor, at(2, 0)),
        (tensor, at(0, 2)),
        (tensor, tensor[:8]),
        (tensor, tensor[:, None]),
        (tensor.view(4, 4), tensor.view(4, 4).T),
        (tensor, tensor.view(torch.int8)),
        (tensor, torch.nn.Parameter(tensor, requires_grad=False)),
        ((tensor, tensor), [tensor, tensor]),
        ((tensor,), tensor),
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        ("auto", "xqa"),
        (None, torch.float16),
    ):
        assert facts_of(one, []) == facts_of(one, [])
        assert facts_of(one, []) != facts_of(other, [])
    assert facts_of(tensor, []) == facts_of(at(0, 0), [])
    of_one = facts_of(tensor, [])
    with mock.patch.object(torch.Tensor, "device", torch.device("cuda", 1)):
        assert facts_of(tensor, []) != of_one


def test_a_kept_call_allocates_what_its_launches_name(launches: Launches) -> None:
    """Scratch of several launches, and counters, zero again; a call with a tensor that they do not name is not kept."""
    query, out, other = torch.zeros(3), torch.zeros(2), torch.zeros(4)
    first, second = (new_scratch(H200, ((3,), torch.float32), ((5,), torch.int32)) for _ in range(2))
    counters = torch.ones(7, dtype=torch.int32)  # as a launch leaves them that was stopped

    def call(last: torch.Tensor) -> TritonCall:
        steps = (
            TritonLaunch(FakeKernel(True), (5,), query, (out, None), *first, scratch=first),
            TritonLaunch(FakeKernel(True), (1,), last, counters, *second, scratch=second, counters=[counters]),
        )
        made = TritonCall(H200, lambda: None, steps, (out,))
        made()
        return made

    again = kept(call(out), [query])
    assert again is not None
    launches.events, launches.new, launches.given = [], [], [query]
    again([query])
    (first_launch, second_launch), zeros = (event[2] for event in launches.events), launches.new[-1]
    assert first_launch == (query.data_ptr(), (("new", 0, 0), None), ("new", 1, 0), ("new", 1, 512))
    assert second_launch == (("new", 0, 0), ("new", 3, 0), ("new", 2, 0), ("new", 2, 512))
    assert zeros.shape == counters.shape
    assert not zeros.any()
    assert kept(call(other), [query]) is None


def test_no_tensor_is_kept_alive(launches: Launches) -> None:
    arguments, counted = decode(1) | {"out": None, "lse": None}, Counted(DECODE)
    for _ in range(3):
        launches.of(counted.keeping, arguments)
    tensors = [weakref.ref(tensor) for tensor in (arguments["query"], *arguments["kv_cache"], *launches.new)]
    launches.new, launches.given, arguments = [], [], {}
    gc.collect()
    assert counted.prepared == 2
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_few_calls_are_kept(launches: Launches) -> None:
    arguments, prepared = decode(1), []
    with mock.patch.object(kept_calls, "MOST_KEPT", 2):
        counted = Counted(DECODE)
    for bound in (150, 150, 150, 151, 151, 150, 152, 150, 151, 151):
        launches.of(counted.keeping, arguments | {"max_seq_len": bound})
        prepared.append(counted.prepared)
    assert prepared == [1, 2, 2, 3, 4, 4, 5, 5, 6, 7]
    counted.keeping.cache_clear()
    launches.of(counted.keeping, arguments)
    assert counted.prepared == 8


def test_a_refusal_has_no_other_error_as_its_context() -> None:
    with pytest.raises(TypeError, match="query must be") as raised:
        portable.trtllm_batch_decode_with_kv_cache(**decode(1) | {"query": [1.0]})
    assert raised.value.__context__ is None


def test_threads_make_calls_of_one_key(launches: Launches) -> None:
    counted, calls = Counted(RAGGED), [moved_away(ragged()) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda arguments: counted.keeping(**arguments), calls * 4))
    shape = (*calls[0]["query"].shape[:2], calls[0]["value"].shape[2])
    assert all(out.shape == shape for out, _ in results)
    assert 2 <= counted.prepared <= 8


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("name", CALLS)
def test_a_kept_call_is_right(device: str, name: str) -> None:
    function, make = CALLS[name]
    call = getattr(portable, function)
    fresh = made_at_once(getattr(portable, f"prepare_{function}"))
    for times in range(4):
        arguments = moved(make(), device)
        arguments["query"].mul_(1 + times)
        for called in (arguments, arguments | {"out": None, "lse": None}):
            pairs = zip(call(**called), [each.clone() for each in fresh(**called)], strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
