"""Kernels of other projects under FlashInfer's TRT-LLM names: FA2, FA3, FlashAttention-4, torch, SGLang, vLLM."""
