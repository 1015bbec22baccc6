"""Kernels that are known to be wrong, right or dishonest, and what finds them. Nothing of the lab imports it."""
