"""Sites that come and go: separately launched jobs connected through a hub.

The rules (`run_config`, `messages`, `quorum`, `ledger` of the hub, `follower` of a site) use no
network, clock, file or tensor: they take messages, digests and the time, and return records,
answers and decisions. The hub makes decisions (`coordinator`), makes them durable (`store`), and
serves calls (`server`, `keys`). A site, launched by its `Federation`, is an engine loop (`site`)
over a connection (`remote`, or in memory). gRPC and cryptography come with the ``federated`` extra.
Without it, everything can be imported, but starting a hub or a connection raises an error that says
what to install.
"""
