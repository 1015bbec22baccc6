"""The parts that all attention backends share: forward modes and batches, the K/V pool, CUDA graphs, the plan stream."""
