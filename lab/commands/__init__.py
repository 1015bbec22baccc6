"""Define the command `lab`. Each module defines some subcommands: it parses their options, calls functions of the lab and
prints the results.

Torch and other large packages are imported only when a command runs, so that help and completion are quick.
"""
