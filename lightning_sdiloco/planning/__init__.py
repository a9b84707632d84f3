"""Predicts the performance that a link between worker groups allows, and recommends settings for
it.

The inputs are plain numbers: the parameters of a model, step time and size of the groups,
bandwidth, round trip and loss of the link, and `Settings`. The results are bytes, memory, compute
utilisation, the time of a run in which groups are slow or absent, and settings. Partition, schedule
and wire bytes come from `algorithm` and `compression`, so that a plan cannot contradict a run; only
time is modelled. Nothing here makes a module, opens a connection or uses the engine.
"""
