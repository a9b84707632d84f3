"""Policies: what a user may decide about a round by an object of their own, and those that are built in.

A `Pace` says when fragments launch, a `Weighing` how much each group counts in a mean, a `LandingRule` how a group
takes the outer parameters in, and a `Route` with whom it exchanges. All are frozen dataclasses with pure functions:
what changes from round to round is their *state*, plain JSON, which the engine holds, saves, and changes only when a
flight lands. They decide only from numbers that travelled, which are the same in all groups.
"""
