"""Attention work to judge and to time: geometries of models, batches as text or from traces, and named forward passes."""

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
