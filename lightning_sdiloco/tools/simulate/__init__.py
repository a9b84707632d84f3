"""Runs worker groups in one process, each with a real Trainer: ``sdiloco simulate``.

[Note: one thread at a time] Every group is a thread that runs what its process would run: a
LightningCLI, a Trainer, the strategy. Only one thread runs at any time. It runs until it needs
something from another group, a message or a decision of all ranks; then the next thread takes its
turn. So nothing depends on the speed of threads, groups that wait for each other forever are found
at once, inner steps are timed while no other group computes, and all groups share one device. State
that Lightning and torch keep once per process, above all random numbers, switches with the thread.
"""
