"""The network layer, which forms worker groups and moves tensors within and between them.

The network layer takes a layout of ranks. It provides communicators among the ranks of a group and
exchanges between groups. Only this subpackage creates process groups and issues collectives.
Payloads are plain bytes here: this code does not depend on what they mean, on fragments, or on the
launch environment.
"""
