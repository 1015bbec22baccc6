"""Explain the verdicts of a run: features of cases and calls, rules over features, and the diagnosis."""
