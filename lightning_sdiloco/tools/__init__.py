"""Holds what people run: the command ``sdiloco`` with its subcommands, one folder or function for
each.

In come the options of a command line. Out go text, JSON, pictures and pages, as return values of
the functions that `cli` turns into subcommands; a `ValueError` is a message for the user. Every
room below may be used and Lightning and the environment known, but no room may import this one.
"""
