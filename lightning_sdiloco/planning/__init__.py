"""Predicts the performance that a link between worker groups allows, and recommends settings for
it.

The inputs are `Settings` and plain numbers that describe the model, the worker groups and the link.
The results are bytes, memory, compute utilisation, recommended settings, and the time of a run in
which groups are slow or absent. Partition, schedule and wire bytes come from `algorithm` and
`compression`, so a plan always matches the run. Only time is modelled. This subpackage does not
create modules, open connections or use the engine.
"""
