"""Run the judge: judge cases in worker processes, handle calls that a kernel refuses, and mark known failures."""
