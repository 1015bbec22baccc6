"""What the lab's pictures have in common."""

DOTS_PER_INCH = 150  # half as many again as are shown
# Told apart by people who see fewer colours: Okabe and Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TEXT_COLOUR = "#333333"
