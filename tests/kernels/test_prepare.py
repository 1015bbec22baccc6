"""`lab.kernels.prepare`: a ready call of any implementation, and what an implementation may do beforehand."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

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
    any_names = {"query": 1, "name": 2, "implementation": 3}
    assert prepare(plans, "attention", **any_names)() == "called"
    assert prepare(PlannedOnce(plans), "attention", **any_names)() == ("planned", any_names)
    name = f"prepare_{DECODE}"
    assert getattr(PlannedOnce(portable), name) is getattr(portable, name)
    assert PlannedOnce(portable).__name__ == portable.__name__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = PlannedOnce(portable).nothing


def test_one_that_prepares_does_so_once_and_nothing_is_called_before() -> None:
    events: list[Any] = []

    def prepare_attention(**arguments: Any) -> Any:
        events.append(arguments)
        return lambda: events.append("called")

    implementation = SimpleNamespace(attention=lambda **arguments: pytest.fail("called"))
    prepare(implementation, "attention", query=1)
    implementation.prepare_attention = prepare_attention
    call = prepare(implementation, "attention", query=1, out=2)
    assert events == [{"query": 1, "out": 2}]
    call()
    call()
    assert events[1:] == ["called", "called"]


def test_an_implementation_without_the_function_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_call"):
        prepare(references, "no_such_call")


@pytest.mark.parametrize("implementation", [portable, trtllm], ids=["portable", "trtllm"])
@pytest.mark.parametrize("name", [call.value for call in AttentionCall])
def test_a_call_has_the_parameters_and_the_documentation_of_its_preparation(implementation: Any, name: str) -> None:
    call, preparation = getattr(implementation, name), getattr(implementation, f"prepare_{name}")
    assert (call.__name__, call.__qualname__) == (name, name)
    assert inspect.signature(call) == inspect.signature(preparation) == inspect.signature(getattr(references, name))
    assert call.__doc__.startswith(f"Make the call of `prepare_{name}` once")
    assert call.__doc__.endswith(preparation.__doc__)
