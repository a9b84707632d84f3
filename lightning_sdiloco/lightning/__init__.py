"""Streaming DiLoCo as a strategy of Lightning, whichever distribution of it.

Purpose: a Trainer that trains several worker groups, with nothing else changed. In: Lightning's
calls, and what users choose. Out: launches and landings of an engine, checkpoints, logged numbers,
records. This room knows Lightning and all rooms below; it imports no distribution, because there
are two. It must not know the tools above it, issue collectives past ``comm``, or touch a private
name of Lightning that ``host.py`` does not list.

``strategy.py`` has every override and no state; [Note: parts of a strategy] there says who owns
what.
"""
