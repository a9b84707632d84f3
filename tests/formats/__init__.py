"""Stored files of each format, which later commits must open; `make` writes those of a new one."""
