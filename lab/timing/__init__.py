"""How long it takes, and on what."""

from lab.timing.gpu_time import DeviceClock, GpuTime, copy_bandwidth_gbps, graph_time
from lab.timing.provenance import environment

__all__ = ["DeviceClock", "GpuTime", "copy_bandwidth_gbps", "environment", "graph_time"]
