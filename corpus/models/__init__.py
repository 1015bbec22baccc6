"""Right models of the judged functions, in stages that wrong kernels change."""
