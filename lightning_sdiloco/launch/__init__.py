"""The steps before process groups exist and after they fail: rendezvous, interfaces, reachability
and failures.

The inputs are the process's environment and the address of rank 0. The results are a rendezvous,
the addresses that ranks listen on, and errors that name the failed ranks and connections. Apart
from the tools, this is the only subpackage that reads environment variables. The code issues no
collectives and does not depend on the algorithm or on Lightning.
"""
