"""The parameters of each call (its axes and the forms of its arguments), and the cases that cover them."""
