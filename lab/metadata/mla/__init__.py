"""The TRT-LLM MLA backend: metadata, calls, graph buffers."""
