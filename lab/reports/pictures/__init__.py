"""Draw pictures of recorded times, and define the style of all pictures of the lab. Needs the extra `plots`."""
