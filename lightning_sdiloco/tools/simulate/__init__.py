"""Runs worker groups with a real Trainer each in one process: ``sdiloco simulate``.

[Note: one thread at a time] Every group is a thread that runs the program of its process: a
LightningCLI, a Trainer, the strategy. Only one thread runs at any time. It runs until it needs
something from another group, a message or a decision of all ranks; then the next one has its turn.
So nothing depends on the speed of threads, groups that wait for each other forever are found at
once, the time of an inner step is measured while no other group computes, and all groups share one
device. State that Lightning and torch keep once per process, above all random numbers, changes with
the thread.
"""
