"""The parameters of each judged function with their values, and the choice of cases that cover all values and all pairs."""
