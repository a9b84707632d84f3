"""Steps before there are process groups, and after they fail: rendezvous, interfaces,
reachability, failures.

In come the environment of the process and the address of rank 0; out come a rendezvous, the
addresses on which ranks listen, and errors that name the ranks and connections at fault. This room,
beside the tools, is the only one that reads the environment. It issues no collectives and knows
neither the algorithm nor Lightning.
"""
