"""Prints and draws what the planner says: ``sdiloco plan``."""
