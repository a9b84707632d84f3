"""The version of the package: of its distribution, which is built with it, of checkpoints and of
run configs.
"""

VERSION = "0.1.0"
