"""Triton kernels that write metadata: lists of K/V slots of draft steps, and page tables and lengths of forward passes."""
