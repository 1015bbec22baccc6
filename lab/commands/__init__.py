"""The command `lab`: one module for each of its commands, which parses options, calls the lab's function and prints.

torch and what else is heavy is imported by the command that needs it, when it runs, so that help and completion are quick.
"""
