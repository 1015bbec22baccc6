"""What all attention backends share: forward modes and batches, the K/V pool, CUDA graphs, and plans of verify passes."""
