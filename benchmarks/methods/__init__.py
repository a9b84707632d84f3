"""Measures the effect of each method on loss and bytes with a language model. Run it with `python
-m benchmarks.methods`.
"""
