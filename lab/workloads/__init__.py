"""The work that is judged and timed: geometries of real models, batches (written down or drawn from traces), and
named passes.
"""

from lab.workloads.batches import Batch, parse_batch, sweep
from lab.workloads.forward_case import ForwardCase
from lab.workloads.geometries import GEOMETRIES, Geometry, geometry
from lab.workloads.scenarios import DEFAULT_SCENARIOS, scenario

__all__ = [
    "DEFAULT_SCENARIOS",
    "GEOMETRIES",
    "Batch",
    "ForwardCase",
    "Geometry",
    "geometry",
    "parse_batch",
    "scenario",
    "sweep",
]
