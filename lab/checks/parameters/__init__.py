"""The parameters of each call: its axes and the forms of its arguments, declared once, and the cases that cover them."""
