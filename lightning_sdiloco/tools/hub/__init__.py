"""The commands ``sdiloco hub`` and ``sdiloco status``: serving a run to its sites, and looking at it."""
