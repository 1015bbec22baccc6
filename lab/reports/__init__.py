"""Read recorded benchmarks, judge reports and experiments; show them in a terminal, Markdown, HTML and pictures."""
