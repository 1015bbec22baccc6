"""Other projects' kernels under FlashInfer's TRT-LLM function names: FA2, FA3, FlashAttention-4, FlashMLA and others."""
