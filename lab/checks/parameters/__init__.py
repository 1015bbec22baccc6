"""Describe the parameters of each call and their values, and choose cases that cover all values and all pairs of values."""
