"""Work to judge and to time: real models' geometries, batches written down or drawn from traces, named passes over them."""

from lab.workloads.batches import Batch, parse_batch, sweep
from lab.workloads.forward_case import ForwardCase
from lab.workloads.geometries import GEOMETRIES, Geometry, geometry
from lab.workloads.scenarios import DEFAULT_SCENARIOS, scenario
from lab.workloads.traces import TracedRequest, own_trace, read_azure, read_mooncake, read_trace, snapshot

__all__ = [
    "DEFAULT_SCENARIOS",
    "GEOMETRIES",
    "Batch",
    "ForwardCase",
    "Geometry",
    "TracedRequest",
    "geometry",
    "own_trace",
    "parse_batch",
    "read_azure",
    "read_mooncake",
    "read_trace",
    "scenario",
    "snapshot",
    "sweep",
]
