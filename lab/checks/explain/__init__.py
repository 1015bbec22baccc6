"""Explain a run's verdicts: features (properties) of cases and calls, rules that say where results are wrong,
and the diagnosis.
"""
