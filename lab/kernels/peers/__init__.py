"""Other people's kernels behind FlashInfer's TRT-LLM names: FlashInfer's own FA2 and FA3 wrappers."""
