"""What is run: geometries of real models and batches drawn from real traces."""

from lab.workloads.geometries import GEOMETRIES, Geometry, geometry

__all__ = ["GEOMETRIES", "Geometry", "geometry"]
