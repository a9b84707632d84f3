"""The network layer: which ranks form worker groups, and how tensors travel within and between
them.

Its inputs are a layout of ranks and, later, tensors. It provides communicators among the ranks of a
group and exchanges between groups. Only this subpackage makes process groups and issues
collectives. It handles plain bytes and does not depend on the meaning of payloads, on fragments, or
on the environment of the launch.
"""
