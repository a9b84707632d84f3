"""Checks the package on a GPU in ten minutes: correctness, cost, and learning; ``make gpu``."""
