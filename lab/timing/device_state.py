"""Read the GPU's clocks, power and temperature through NVML during a measurement, and the reasons for reduced clocks."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml
import torch

# Throttle reasons that make a time wrong, by NVML's names. Idle clocks and clocks that a user set are none of them.
THROTTLE_REASONS = {
    "SwPowerCap": "software power cap",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": "sync boost",
    "SwThermalSlowdown": "software thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "hardware power brake",
}
# Counters of the time during which a limit lowered the clocks. They also count times between two readings.
LIMITS = {"power limit": pynvml.NVML_PERF_POLICY_POWER, "thermal limit": pynvml.NVML_PERF_POLICY_THERMAL}


@dataclass
class DeviceState:
    """Readings of a GPU during a measurement; empty without NVML. `throttled_by`: why clocks were reduced, None if unknown."""

    sm_clocks_mhz: list[int] = field(default_factory=list)
    memory_clocks_mhz: list[int] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    temperatures_c: list[int] = field(default_factory=list)
    throttled_by: set[str] | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "sm_clock_mhz": [min(self.sm_clocks_mhz), max(self.sm_clocks_mhz)] if self.sm_clocks_mhz else None,
            "memory_clock_mhz": max(self.memory_clocks_mhz, default=None),
            "power_w": max(self.powers_w, default=None),
            "temperature_c": max(self.temperatures_c, default=None),
            "throttled_by": None if self.throttled_by is None else sorted(self.throttled_by),
        }

    def read(self, device_index: int) -> None:
        handle = _handle(device_index)
        if handle is None:
            return
        self.sm_clocks_mhz += _if_supported(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
        self.memory_clocks_mhz += _if_supported(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)
        self.powers_w += [milliwatts / 1000 for milliwatts in _if_supported(pynvml.nvmlDeviceGetPowerUsage, handle)]
        self.temperatures_c += _if_supported(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        for bits in _if_supported(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle):
            self.held_back_by(throttle_reasons(bits))

    def held_back_by(self, reasons: set[str]) -> None:
        """Add reasons for reduced clocks to `throttled_by`. An empty set says that the clocks were not reduced."""
        self.throttled_by = (self.throttled_by or set()) | reasons


def throttle_reasons(bits: int) -> set[str]:
    return {
        words for name, words in THROTTLE_REASONS.items() if bits & int(getattr(pynvml, f"nvmlClocksEventReason{name}"))
    }


@contextmanager
def watched(device_index: int) -> Iterator[DeviceState]:
    """Yield a `DeviceState`. At the end of the `with` block, add the power or thermal limits that reduced the GPU's clocks."""
    state = DeviceState()
    before = _violations_ns(device_index)
    yield state
    for limit, ns in _violations_ns(device_index).items():
        state.held_back_by({limit} if ns > before.get(limit, ns) else set())


def _violations_ns(device_index: int) -> dict[str, int]:
    handle = _handle(device_index)
    if handle is None:
        return {}
    return {
        name: int(status.violationTime)
        for name, policy in LIMITS.items()
        for status in _if_supported(pynvml.nvmlDeviceGetViolationStatus, handle, policy)
    }


def _if_supported(function: Any, *arguments: Any) -> list[Any]:
    try:
        return [function(*arguments)]
    except pynvml.NVMLError:  # the GPU or the driver does not support the function
        return []


@functools.cache
def _handle(device_index: int) -> Any:
    try:
        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers devices, but keeps their UUIDs
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device_index).uuid}")
    except pynvml.NVMLError:
        return None
