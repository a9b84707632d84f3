"""Checks that the numbers on the pages are those in the files of results; see `__main__`."""
