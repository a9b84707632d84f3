"""The ``sdiloco`` command and its subcommands, one file or folder for each.

A subcommand is a function whose arguments are the command-line options. It returns text, after
writing JSON, pictures or pages if requested. `cli` turns these functions into subcommands; a
`ValueError` is a message for the user. This subpackage may use every subpackage below it, Lightning
and the environment, but no other subpackage may import it.
"""
