"""Speculative decoding: draft steps, verify masks, draft extend in a graph, one launch for an iteration."""
