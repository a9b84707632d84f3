"""Holds the command ``sdiloco`` with its subcommands, one file or folder for each.

A subcommand is a function: its arguments are the options of the command line, and it returns text,
after it has written JSON, pictures or pages if asked to. `cli` turns these functions into
subcommands; a `ValueError` is a message for the user. This room may use every room below it, and
may know Lightning and the environment, but no room may import it.
"""
