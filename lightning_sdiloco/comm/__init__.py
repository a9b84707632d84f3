"""The door to the network: which ranks form worker groups, and how tensors travel within and
between them.

In come a layout of ranks and, later, tensors; out come communicators among the ranks of a group and
exchanges between groups. Only this room makes process groups and issues collectives. It knows
bytes: neither what a payload means, nor fragments, nor the environment in which it was launched.
"""
