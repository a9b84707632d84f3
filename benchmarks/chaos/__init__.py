"""Chaos: a hub and some sites as real processes, and faults by chance. `python -m benchmarks.chaos` runs it."""
