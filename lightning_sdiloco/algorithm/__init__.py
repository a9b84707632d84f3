"""Streaming DiLoCo as arithmetic: when fragments launch and land, what is in them, and how they are
averaged.

The inputs are settings, sizes and tensors; the outputs are schedules, partitions, payloads and
means. Everything on which ranks must agree is decided here. This package sends nothing, keeps no
training state, and depends on neither models nor Lightning.

Users may control rounds with their own objects: a `LaunchSchedule` decides when fragments launch, a
`Weighing` how much each group counts in a mean, a `LandingRule` how a group takes the outer
parameters, and a `Route` which groups exchange. All are frozen dataclasses with pure functions.
Only their *state* changes from round to round: plain JSON, which the engine keeps, saves, and
changes only when a flight lands. They decide only from numbers that were exchanged, which are the
same in all groups.
"""
