"""The command `lab`: one module for each of its commands, which parses options, calls the lab's function and prints.

A command imports torch and other heavy packages when it runs, so that help and completion are quick.
"""
