"""The network layer, which forms worker groups and moves tensors within and between them.

From a layout of ranks, the network layer creates communicators among the ranks of a group and
exchanges between groups. Only this subpackage creates process groups and issues collectives. The
code treats payloads as plain bytes and does not depend on their meaning, on fragments, or on the
launch environment.
"""
