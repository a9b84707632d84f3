"""The ``sdiloco`` command and its subcommands, one file or folder for each.

A subcommand is a function: its arguments are the command-line options, and it returns text, after
writing JSON, pictures or pages if asked. `cli` turns these functions into subcommands; a
`ValueError` is a message for the user. This package may use every package below it, and may know
Lightning and the environment, but no other package may import it.
"""
