"""How long it takes, and on what."""

from lab.timing.gpu_time import DeviceClock, GpuTime, copy_bandwidth_gbps, graph_time

__all__ = ["DeviceClock", "GpuTime", "copy_bandwidth_gbps", "graph_time"]
