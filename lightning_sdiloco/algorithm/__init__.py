"""The arithmetic of Streaming DiLoCo: when fragments launch and land, what they contain, and how
they are averaged.

The inputs are settings, sizes and tensors. The outputs are schedules, partitions, payloads and
means. All decisions that ranks must agree on are made here. This package sends nothing, keeps no
training state, and does not depend on models or Lightning.

Users can control rounds with four kinds of policies. A `LaunchSchedule` decides when fragments
launch. A `Weighing` decides how much each group counts in a mean. A `LandingRule` decides how a
group applies the outer parameters. A `Route` decides which groups exchange. All policies are frozen
dataclasses with pure functions. Only a policy's *state*, which is plain JSON, changes from round to
round. The engine stores the state, saves it, and changes it only when a flight lands. Decisions
depend only on exchanged numbers, which are the same in all groups.
"""
