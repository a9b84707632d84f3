"""What a flight does on a route that does not share, in the place of a mean over all groups; see [Note: gossip]."""

from collections.abc import Sequence

from torch import Tensor

from lightning_sdiloco.algorithm import AllReduce, Brought, Count, Settings, Taken, bring, take
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.flight import LaunchSnapshot
from lightning_sdiloco.engine.fragments import FragmentState


class Gossip:
    """Brings a shard to its leg, and takes from it."""

    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._momentum = settings.routing.momentum(topology.num_groups)
        self._group = topology.group_index

    def bring(self, snapshot: LaunchSnapshot, fragment: FragmentState) -> Brought:
        """Returns what this group brings to its leg."""
        twin = None if fragment.twin is None else fragment.storage.load(fragment.twin)
        return bring(snapshot.outer, snapshot.gradient, anchor_of(fragment), twin, self._momentum)

    def take(
        self,
        snapshot: LaunchSnapshot,
        fragment: FragmentState,
        brought: Brought,
        all_reduce: AllReduce,
        payloads: Sequence[Tensor],
        mean: Tensor,
        count: Count,
    ) -> Taken:
        """Returns what this group takes from its leg."""
        own = all_reduce.decode_own([payloads[self._group]], snapshot.gradient)
        finite, anchor = self._group in count.factors, anchor_of(fragment)
        return take(brought, own, mean, snapshot.outer, anchor, finite, self._momentum)


def anchor_of(fragment: FragmentState) -> Tensor:
    """Returns the anchor of a fragment, on the device."""
    assert fragment.anchor is not None, "groups hold outer parameters of their own"
    return fragment.storage.load(fragment.anchor)
