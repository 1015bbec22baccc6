"""Other people's kernels under FlashInfer's TRT-LLM names: FlashInfer's own FA2 and FA3 wrappers, and FlashAttention-4."""
