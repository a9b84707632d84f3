"""Worker groups of a real Trainer each, in one process: what a link and settings do to a training, without a cluster.

[Note: one thread at a time] Every group is a thread that runs what its process would run: a LightningCLI, a Trainer,
the strategy. Only one runs at any time. It runs until it needs something of another group, a message or a decision of
all ranks, and then the next one runs. So nothing depends on the speed of threads. What Lightning and torch keep for the
whole process, above all random numbers, is put aside with each group and taken up again.
"""
