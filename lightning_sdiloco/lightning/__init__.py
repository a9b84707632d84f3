"""Provides Streaming DiLoCo as a strategy for both distributions of Lightning.

Setting this strategy is the only change that a Trainer needs to train multiple worker groups. The
inputs are Lightning's calls and the user's settings. The outputs are the engine's launches and
landings, checkpoints, logged values, and records. This subpackage may use Lightning and every lower
subpackage, but it never imports either distribution directly. The subpackage must not use the
tools, issue collectives except through ``comm``, or use a private Lightning name that ``host.py``
does not list. All overrides are in ``strategy.py``, which has no state. [Note: parts of a strategy]
describes which part owns which state.
"""
