"""The TRT-LLM MHA backend: metadata, attention calls, and buffers for CUDA graphs."""
