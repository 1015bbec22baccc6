"""Attention calls that an engine made and somebody recorded.

A recorded call has no history of its requests' tokens: it is judged by its own page table, and a wrong table as it stands.
"""
