"""Files of a run that can be resumed: one per rank, a manifest, and an ordinary file of what all have in common."""
