"""How the ranks of a worker group hold the model: each the whole of it, or each a part.

In: the arguments of a strategy, its model and its optimizers. Out: the shape of a group, a wrapped model, and what goes
into a checkpoint of model and optimizers.
"""
