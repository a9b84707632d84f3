"""The version of the package, which checkpoints and run configs tell; the same as in pyproject.toml."""

VERSION = "0.1.0"
