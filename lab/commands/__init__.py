"""Define the command `lab`. A module per group of subcommands parses options, calls a function of the lab and prints the
result.

Torch and other large packages are imported only when a command runs, so that help and completion are quick.
"""
