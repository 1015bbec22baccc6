"""The GPU's clocks, power and temperature while it was timed, and what held it back, if anything did. Read through NVML."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml
import torch

# Reasons that make a time wrong, by NVML's names. Idling, and clocks that someone set, do not.
HOLDING_BACK = {
    "SwPowerCap": "software power cap",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": "sync boost",
    "SwThermalSlowdown": "software thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "hardware power brake",
}
# Counters of the time that a limit held the clocks down; they see what falls between two readings.
LIMITS = {"power limit": pynvml.NVML_PERF_POLICY_POWER, "thermal limit": pynvml.NVML_PERF_POLICY_THERMAL}


@dataclass
class DeviceState:
    """Readings of a GPU while something ran; every field is empty where NVML does not say.

    Attributes:
        sm_clocks_mhz, memory_clocks_mhz, powers_w, temperatures_c: the readings.
        throttled_by: what held the clocks back, in words; None as long as nothing says whether anything did.
    """

    sm_clocks_mhz: list[int] = field(default_factory=list)
    memory_clocks_mhz: list[int] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    temperatures_c: list[int] = field(default_factory=list)
    throttled_by: set[str] | None = None

    def facts(self) -> dict[str, Any]:
        """Return the range of the SM clock and the highest of the others, units in the keys; None for what is not known."""
        return {
            "sm_clock_mhz": [min(self.sm_clocks_mhz), max(self.sm_clocks_mhz)] if self.sm_clocks_mhz else None,
            "memory_clock_mhz": max(self.memory_clocks_mhz, default=None),
            "power_w": max(self.powers_w, default=None),
            "temperature_c": max(self.temperatures_c, default=None),
            "throttled_by": None if self.throttled_by is None else sorted(self.throttled_by),
        }

    def read(self, device_index: int) -> None:
        """Add a reading. It is meaningful only while the GPU works."""
        handle = _handle(device_index)
        if handle is None:
            return
        self.sm_clocks_mhz += _asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
        self.memory_clocks_mhz += _asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)
        self.powers_w += [milliwatts / 1000 for milliwatts in _asked(pynvml.nvmlDeviceGetPowerUsage, handle)]
        self.temperatures_c += _asked(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        for bits in _asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle):
            self.held_back_by(throttle_reasons(bits))

    def held_back_by(self, reasons: set[str]) -> None:
        """Add reasons why the clocks were held back; an empty set says that none were."""
        self.throttled_by = (self.throttled_by or set()) | reasons


def throttle_reasons(bits: int) -> set[str]:
    """Return the words for NVML's bits of clock event reasons that make a time wrong."""
    return {
        words for name, words in HOLDING_BACK.items() if bits & int(getattr(pynvml, f"nvmlClocksEventReason{name}"))
    }


@contextmanager
def watched(device_index: int) -> Iterator[DeviceState]:
    """Watch a GPU: what is timed inside calls `read` while it runs; a limit that held the clocks down is noticed at the end."""
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
        for status in _asked(pynvml.nvmlDeviceGetViolationStatus, handle, policy)
    }


def _asked(question: Any, *arguments: Any) -> list[Any]:
    """Return NVML's answer in a list, or nothing where this GPU or driver has none."""
    try:
        return [question(*arguments)]
    except pynvml.NVMLError:
        return []


@functools.cache
def _handle(device_index: int) -> Any:
    """Return NVML's handle of a torch device, by UUID because CUDA_VISIBLE_DEVICES renumbers; None where there is no NVML."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device_index).uuid}")
    except pynvml.NVMLError:
        return None
