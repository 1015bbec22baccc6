"""Tensors of calls and of forward passes, made from a case that is data, and what a kernel must give for them."""
