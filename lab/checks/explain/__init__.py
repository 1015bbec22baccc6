"""Explain the verdicts of a run: read the features (named properties) of calls, find rules over features that say where results
are wrong, and write the diagnosis.
"""
