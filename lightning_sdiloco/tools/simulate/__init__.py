"""Runs ``sdiloco simulate``, which trains worker groups in one process, each with a real Trainer.

[Note: one thread at a time] Every group is a thread that runs the same code as a real process: a
LightningCLI, a Trainer, the strategy. Only one thread runs at any time. It runs until it needs a
message from another group or a decision of all ranks; then the next thread takes its turn. So
nothing depends on the speed of threads, deadlocks between groups are found at once, inner steps are
timed while no other group computes, and all groups share one device. State that Lightning and torch
keep once per process, above all random numbers, is switched with the thread.
"""
