"""An attention lab: is a kernel right, and how far is it from the hardware's limit?"""

__version__ = "0.1.0"
