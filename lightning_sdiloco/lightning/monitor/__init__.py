"""Tells what a run does: logged scalars, the progress bar, a record of every rank, and a timeline of all ranks.

In come the landings that the engine reports, and the hooks of a trainer. Out go numbers for loggers and progress bars,
and files: records (JSON lines) that `read_run` reads back as a `Run`, and a trace. Nothing here changes training, waits
for another rank in the middle of it, or sends anything between groups, and nothing here knows what `sdiloco report`
makes of a run.
"""
