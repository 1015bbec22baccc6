"""GPU and host times by a stated method, the hardware's limits, and the comparison of samples."""

from lab.extras import require

require("lab.timing", "numpy", "pynvml", "scipy")

from lab.timing.gpu_time import DeviceClock, GpuTime, measure, measure_interleaved
from lab.timing.method import L2, Clock, Method, method_named
from lab.timing.roofline import Ceilings, Roofline, measure_ceilings, roofline
from lab.timing.work import GpuWork

__all__ = [
    "L2",
    "Ceilings",
    "Clock",
    "DeviceClock",
    "GpuTime",
    "GpuWork",
    "Method",
    "Roofline",
    "measure",
    "measure_ceilings",
    "measure_interleaved",
    "method_named",
    "roofline",
]
