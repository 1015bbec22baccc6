"""Triton kernels of metadata: the K/V lists of a draft, and the metadata of forward passes."""
