"""Federated training across sites, which are separately launched jobs that join and leave through a
hub.

The rules are defined in `run_config`, `messages`, `quorum`, `ledger` (for the hub) and `follower`
(for a site). The rules do not access the network, clocks, files or tensors. The rules take
messages, digests and times as input and return records, answers and decisions. The hub makes
decisions (`coordinator`), stores them durably (`store`), and serves calls (`server`, `keys`). A
site is configured by its `Federation` and runs an engine loop (`site`) over a connection (`remote`,
or in memory). The ``federated`` extra installs gRPC and cryptography. Without this extra, all
modules can still be imported, but starting a hub or a connection raises an error that contains the
install command.
"""
