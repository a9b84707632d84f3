"""Implements the ``sdiloco`` command, with each subcommand in a separate file or folder.

A subcommand is a function whose arguments are the command-line options. The function returns the
text to print and, if requested, writes JSON, pictures or pages. `cli` turns these functions into
subcommands and shows users the message of any `ValueError`. This subpackage may use all lower
subpackages, Lightning and the environment, but no other subpackage may import the tools.
"""
