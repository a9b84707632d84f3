"""Streaming DiLoCo as a Lightning strategy, for either distribution of Lightning.

A Trainer can train several worker groups with nothing else changed. The inputs are Lightning's
calls and users' settings; the results are launches and landings of an engine, checkpoints, logged
numbers, and records. This subpackage may use Lightning and every subpackage below it, but imports
no distribution, because there are two. It must not use the tools above it, bypass ``comm`` for
collectives, or touch a private Lightning name that ``host.py`` does not list.

``strategy.py`` has every override and no state; its [Note: parts of a strategy] says which part
owns what.
"""
