"""767 wrong kernels that were made to prove that each of the judge's checks can fail."""
