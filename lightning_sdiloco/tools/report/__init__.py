"""Turns the records of a run into a page with pictures and a verdict: ``sdiloco report``."""
