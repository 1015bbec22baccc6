"""Recorded results for people: one reader, tables and pictures, in the terminal, Markdown and HTML."""
