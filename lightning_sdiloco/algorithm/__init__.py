"""Streaming DiLoCo as arithmetic: when fragments launch and land, what is in them, and how they are
averaged.

In come settings, sizes and tensors; out come schedules, partitions, payloads and means. All that
ranks must agree on is decided here. This room sends nothing, owns no state of a training, and knows
neither models nor Lightning.

Users may decide about a round with their own object: a `LaunchSchedule` says when fragments launch,
a `Weighing` how much each group counts in a mean, a `LandingRule` how a group takes the outer
parameters in, and a `Route` with whom it exchanges. All are frozen dataclasses with pure functions.
What changes from round to round is their *state*, plain JSON, which the engine holds, saves, and
changes only when a flight lands. They decide only from numbers that travelled, which are the same
in all groups.
"""
