"""The parts that every attention backend has: forward modes and batches, the K/V pool, CUDA graphs, the plan stream."""
