"""The steps before process groups exist, and after they fail: rendezvous, interfaces, reachability,
failures.

The inputs are the environment of the process and the address of rank 0. The results are a
rendezvous, the addresses on which ranks listen, and errors that name the ranks and connections at
fault. Apart from the tools, this is the only subpackage that reads the environment. It issues no
collectives and uses neither the algorithm nor Lightning.
"""
