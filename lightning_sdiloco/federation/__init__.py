"""Sites that come and go: separately launched jobs, joined through a hub.

The rules (`run_config`, `messages`, `quorum`, `ledger` of the hub, `follower` of a site) know no
network, clock, file or tensor: in come messages, digests and the time, out come records, answers
and decisions. The hub makes them durable (`store`), decides (`coordinator`) and serves (`server`,
`keys`). A site, which is launched by its `Federation`, is a loop of the engine (`site`) over a
connection (`remote`, or in memory). gRPC and cryptography are the extra ``federated``: without them
all can be imported, and a hub or a connection says what to install.
"""
