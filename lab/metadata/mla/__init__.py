"""The TRT-LLM MLA (latent attention) backend: metadata, attention calls, and buffers for CUDA graphs."""
