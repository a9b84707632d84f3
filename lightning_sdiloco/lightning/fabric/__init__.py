"""Streaming DiLoCo as a strategy of Fabric, whose users write the training loop themselves.

In: what ``fabric.setup`` gives the strategy, and every ``optimizer.step()``. Out: inner steps of an engine, and
checkpoints with a file per rank. It is made of the parts of the Trainer's strategy that do not know a fit.
"""
