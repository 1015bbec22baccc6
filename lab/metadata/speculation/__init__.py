"""Speculative decoding: draft steps, verify masks, draft extends in CUDA graphs, and plans of a verify pass."""
