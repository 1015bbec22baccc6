"""An attention lab: it judges whether a kernel is right, and measures how far it is from the hardware's limit."""

__version__ = "0.1.0"
