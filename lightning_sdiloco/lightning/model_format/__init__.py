"""How the ranks of a worker group hold the model: whole, each of them, or in parts.

In: the arguments of a strategy, its model and its optimizers. Out: the shape of a group, a wrapped model, and what of
both goes into a checkpoint.
"""
