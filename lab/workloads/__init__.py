"""What is run: geometries of real models, batches written down or drawn from real traces, and forward passes over them."""

from lab.workloads.forward_case import ForwardCase, Inputs
from lab.workloads.geometries import GEOMETRIES, Geometry, geometry

__all__ = ["GEOMETRIES", "ForwardCase", "Geometry", "Inputs", "geometry"]
