"""Streaming DiLoCo as a Lightning strategy, for either distribution of Lightning.

Purpose: a Trainer that trains several worker groups, with nothing else changed. In: Lightning's
calls, and users' settings. Out: launches and landings of an engine, checkpoints, logged numbers,
records. This package knows Lightning and every package below it; it imports no distribution,
because there are two. It must not know the tools above it, bypass ``comm`` for collectives, or
touch a private Lightning name that ``host.py`` does not list.

``strategy.py`` has every override and no state; its [Note: parts of a strategy] says which part
owns what.
"""
