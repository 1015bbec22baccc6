"""Read recorded benchmarks, judge reports and experiments; show them as tables and pictures in a terminal, Markdown
and HTML.
"""
