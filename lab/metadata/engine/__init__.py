"""The parts of a serving engine that all attention backends use: forward modes, batches, K/V pools, caches, and CUDA graphs."""
