"""What a run's verdicts say together: features of cases and calls, rules over them, and the diagnosis."""
