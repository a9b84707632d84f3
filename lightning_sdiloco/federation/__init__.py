"""Federated training across sites, which are separately launched jobs that join and leave through a
hub.

The rules are in `run_config`, `messages`, `quorum`, `ledger` (for the hub) and `follower` (for a
site). The rules use no network, clock, files or tensors. The inputs of the rules are messages,
digests and times, and the outputs are records, answers and decisions. The hub makes decisions
(`coordinator`), stores decisions durably (`store`), and serves calls (`server`, `keys`). A site
starts from its `Federation` and runs an engine loop (`site`) over a connection (`remote`, or in
memory). The ``federated`` extra installs gRPC and cryptography. Without this extra, all modules can
be imported, but starting a hub or a connection raises an error with the install command.
"""
