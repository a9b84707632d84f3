"""Checks that the numbers of the pages are those of the files of results; see `__main__`."""
