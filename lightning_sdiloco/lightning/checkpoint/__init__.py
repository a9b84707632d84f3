"""Checkpoints: an ordinary file of the outer model, and beside it a folder with what every rank holds.

In: the state of engine, requests and loops. Out: files that load without this package, and exact resumes from them.
"""
