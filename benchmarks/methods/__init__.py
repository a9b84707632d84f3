"""What each method does to loss and bytes on a language model. `python -m benchmarks.methods` runs
it.
"""
