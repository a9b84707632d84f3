"""The engine: launches and lands the fragments of a model in any PyTorch training loop.

In comes a model, which an inner optimizer trains, and one call after every inner step; out goes the
outer model. Start reading at `rounds`, which is Algorithm 2, then `flight`, `fragments` and
`engine`. `shards` knows how a model holds its parameters, ``outer/`` is the outer optimizer.
Nothing here knows Lightning or the environment, and other ranks are reached only through what a
`Topology` holds.
"""
