"""What any attention backend has: forward modes and batches, the K/V pool, CUDA graphs and their buffers, the plan stream."""
