"""The TRT-LLM MLA (latent attention) backend: metadata, calls, graph buffers."""
