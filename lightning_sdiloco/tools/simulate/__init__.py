"""Runs ``sdiloco simulate``, which trains worker groups in one process, each with a real Trainer.

[Note: one thread at a time] Every group is a thread that runs the same code as a real process, with
a LightningCLI, a Trainer and the strategy. Only one thread runs at any one time. When this thread
needs a message from another group or a joint decision by all ranks, the next thread takes its turn.
As a result, the outcome does not depend on how fast threads run, deadlocks between groups are
detected immediately, inner steps are timed while no other group is computing, and all groups share
one device. State that Lightning and torch keep once per process, in particular random states, is
switched together with the thread.
"""
