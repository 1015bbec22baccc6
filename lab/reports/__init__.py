"""Read recorded results and present them as tables and pictures, in a terminal, in Markdown and in HTML."""
