"""Explain a run's verdicts: features (properties) of cases and calls, rules for where results are wrong, and a diagnosis."""
