"""The TRT-LLM MHA backend: metadata, calls, graph buffers."""
