"""What NVML's readings become."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lab.timing import device_state
from lab.timing.device_state import watched


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose readings are taken from lists, the power limit's counter among them."""
    gpu = SimpleNamespace(clocks=[1980, 1830], violations_ns=[5, 5, 5, 5], reasons=1)

    def answer(values: list[int]) -> int:
        return values.pop(0) if len(values) > 1 else values[0]

    def no_answer(*arguments: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(device_state, "_handle", lambda index: gpu)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: answer(gpu.clocks))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: 654_321)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", no_answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: gpu.reasons)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetViolationStatus",
        lambda handle, policy: SimpleNamespace(violationTime=answer(gpu.violations_ns)),
    )
    return gpu


def test_readings_become_ranges_and_what_is_not_known_is_none(nvml: SimpleNamespace) -> None:
    with watched(0) as state:
        state.read(0)
        nvml.clocks = [1755]
        state.read(0)
    assert state.facts() == {
        "sm_clock_mhz": [1755, 1980],
        "memory_clock_mhz": 1830,
        "power_w": 654.321,
        "temperature_c": None,
        "throttled_by": [],
    }


def test_a_limit_that_bit_between_two_readings_is_noticed(nvml: SimpleNamespace) -> None:
    nvml.violations_ns = [5, 5, 9, 5]  # power and thermal before, power and thermal after
    with watched(0) as state:
        pass
    assert state.facts()["throttled_by"] == ["power limit"]


def test_a_reason_that_a_reading_names_is_noticed(nvml: SimpleNamespace) -> None:
    """Neither an idle GPU nor clocks that a user has set hold it back."""
    for name in ("SwPowerCap", "HwThermalSlowdown", "GpuIdle", "ApplicationsClocksSetting"):
        nvml.reasons |= getattr(pynvml, f"nvmlClocksEventReason{name}")
    with watched(0) as state:
        state.read(0)
        nvml.reasons = pynvml.nvmlClocksEventReasonGpuIdle
        state.read(0)
    assert state.facts()["throttled_by"] == ["hardware thermal slowdown", "software power cap"]


def test_without_nvml_nothing_is_known_and_nothing_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "_handle", lambda index: None)
    with watched(0) as state:
        state.read(0)
    assert set(state.facts().values()) == {None}
