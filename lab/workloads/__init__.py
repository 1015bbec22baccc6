"""What is run: geometries of real models and batches drawn from real traces."""

from lab.workloads.geometries import GEOMETRIES
from lab.workloads.geometries import Geometry
from lab.workloads.geometries import geometry

__all__ = ["GEOMETRIES", "Geometry", "geometry"]
