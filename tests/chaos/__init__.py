"""Chaos: a hub and some sites as real processes, and faults by chance. `python -m tests.chaos`
runs it.
"""
