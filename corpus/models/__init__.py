"""Right models of the judged functions. Each is divided into stages, which wrong kernels replace."""
