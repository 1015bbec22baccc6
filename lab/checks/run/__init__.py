"""Run the judge: judge cases in worker processes, repeat calls that a kernel refuses, and mark known failures."""
