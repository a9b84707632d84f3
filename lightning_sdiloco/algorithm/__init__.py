"""Streaming DiLoCo as arithmetic: when fragments launch and land, what is in them, and how they are averaged.

In come settings, sizes and tensors; out come schedules, partitions, payloads and means. What ranks must agree on is
decided here. This room sends nothing, owns no state of a training, and knows neither models nor Lightning.
"""
