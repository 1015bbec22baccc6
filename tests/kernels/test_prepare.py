"""`lab.kernels.prepare`: a ready call of any implementation, and what an implementation may do beforehand."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import AttentionCall
from lab.kernels import PlannedOnce, portable, prepare, trtllm
from tests.cases import decode_arguments, random_batch

DECODE = "trtllm_batch_decode_with_kv_cache"


def test_one_that_prepares_nothing_is_called_each_time() -> None:
    arguments = decode_arguments(random_batch([1, 1], [5, 20], head_dim=64), out_dtype=None)
    call = prepare(references, DECODE, **arguments)
    assert call()[0].equal(getattr(references, DECODE)(**arguments)[0])
    arguments["seq_lens"].fill_(3)
    assert call()[0].equal(getattr(references, DECODE)(**arguments)[0])


def test_one_that_plans_on_the_host_is_planned_once_on_request() -> None:
    plans = SimpleNamespace(
        plan_attention=lambda **arguments: lambda: ("planned", arguments), attention=lambda **_: "called"
    )
    assert prepare(plans, "attention", query=1)() == "called"
    assert prepare(PlannedOnce(plans), "attention", query=1)() == ("planned", {"query": 1})
    assert (
        PlannedOnce(portable).prepare_trtllm_batch_decode_with_kv_cache
        is portable.prepare_trtllm_batch_decode_with_kv_cache
    )
    assert PlannedOnce(portable).__name__ == portable.__name__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = PlannedOnce(portable).nothing


def test_one_that_prepares_does_so_once() -> None:
    events: list[Any] = []

    def prepare_attention(**arguments: Any) -> Any:
        events.append(arguments)
        return lambda: events.append("called")

    def attention(**arguments: Any) -> None:
        pytest.fail("called unprepared")

    call = prepare(
        SimpleNamespace(attention=attention, prepare_attention=prepare_attention), "attention", query=1, out=2
    )
    assert events == [{"query": 1, "out": 2}]
    call()
    call()
    assert events[1:] == ["called", "called"]


def test_nothing_is_called_before_it_is_asked_for() -> None:
    implementation = SimpleNamespace(attention=lambda **arguments: pytest.fail("called"))
    prepare(implementation, "attention", query=torch.zeros(1))


def test_an_implementation_without_the_function_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_call"):
        prepare(references, "no_such_call")


def test_any_argument_name_will_do() -> None:
    call = prepare(SimpleNamespace(attention=lambda **arguments: arguments), "attention", name=1, implementation=2)
    assert call() == {"name": 1, "implementation": 2}


@pytest.mark.parametrize("implementation", [portable, trtllm], ids=["portable", "trtllm"])
@pytest.mark.parametrize("name", [call.value for call in AttentionCall])
def test_a_call_has_the_parameters_and_the_documentation_of_its_preparation(implementation: Any, name: str) -> None:
    call, preparation = getattr(implementation, name), getattr(implementation, f"prepare_{name}")
    assert (call.__name__, call.__qualname__) == (name, name)
    assert inspect.signature(call) == inspect.signature(preparation) == inspect.signature(getattr(references, name))
    assert call.__doc__.startswith(f"Make the call of `prepare_{name}` once")
    assert call.__doc__.endswith(preparation.__doc__)
