"""Each call's parameters with their values (its model), and the cases that cover all values and pairs of values."""
