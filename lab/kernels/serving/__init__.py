"""Triton kernels that write metadata: the ragged K/V lists of draft steps, and page tables and lengths of forward passes."""
