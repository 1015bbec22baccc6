"""What simulated GPUs reach."""

from lab.timing import Ceilings

CEILINGS = Ceilings(bandwidth_gbps=4000.0, matrix_rate_tflops=800.0)
SLOW = Ceilings(bandwidth_gbps=4.0, matrix_rate_tflops=0.02)  # floors of µs for what a CPU can afford
