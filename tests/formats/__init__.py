"""Files of each format, written by the version that introduced it; `make` writes those of a new
one.
"""
