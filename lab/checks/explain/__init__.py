"""Explain the verdicts of a run: read the features (named properties) of calls, find rules that say for which features
results are wrong, and write the diagnosis.
"""
