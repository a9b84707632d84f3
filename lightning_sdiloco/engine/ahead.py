"""A group's own outer steps, where the landing rule lets it go on before the mean of a round is there.

[Note: ahead of the mean] Eager updates (arXiv 2502.12996) make the outer step of a round with the mean of the round
before, in which the part of the own group is replaced by its fresh outer gradient; so groups need not wait for a mean
until the next launch. The outer parameters of the groups differ then. But with an outer optimizer that is linear, such
as SGD with momentum, they are the ones that all groups share plus what the group's *own part* makes of the next outer
step: a step from the shared outer parameters with its outer gradient over the number of groups, and with a momentum of
its own, into which nothing but such parts went.

So the shared outer parameters make their steps with the mean of all, as ever, and stay bitwise equal in all groups. A
launch reads how far the group went from where its inner steps began, and sends that. Then it begins anew: from the
shared outer parameters of now plus the own step. Nothing is mixed at the landing. How much a group counts in the mean
is not known at the launch, so the own part is one over the number of groups; where weights differ, the mean is still
that of the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.flight import LaunchSnapshot
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.offload import OnDevice
from lightning_sdiloco.engine.outer.optimizer import OuterState, outer_optimizer_for, require_linear


class Ahead:
    """Makes the own outer steps of a group, in the training thread."""

    def __init__(self, fragments: Sequence[FragmentState], settings: Settings, topology: Topology) -> None:
        require_linear(settings)
        self._share = settings.landing.ahead(topology.num_groups)
        self._in_group = topology.in_group
        # An optimizer of its own: that of the outer parameters steps in another thread. Where it begins and its
        # momentum stay on the device, because the training thread must not wait until they are on the host.
        storage = OnDevice(fragments[0].storage.device)
        self._optimizer = outer_optimizer_for(settings, [fragment.outer.values for fragment in fragments], storage)
        self._initial = [own.state for own in self._optimizer.take_initial()]

    def step(self, fragment: FragmentState, snapshot: LaunchSnapshot) -> None:
        """Makes an own step with what a launch read, from which the next inner steps begin. In-group collective."""
        # What is not finite is no step: the group takes the outer values at the landing.
        is_finite = torch.linalg.vector_norm(snapshot.gradient).isfinite()
        own = torch.where(is_finite, snapshot.gradient, snapshot.gradient.new_zeros(())).mul_(self._share)
        state = self._initial[fragment.index] if fragment.ahead is None else fragment.ahead.state
        before = OuterState(snapshot.outer, state, fragment.outer.rounds)
        fragment.ahead = self._optimizer.step(fragment.index, before, snapshot.outer, own)
        fragment.layout.write(fragment.layout.all_gather(fragment.ahead.values, self._in_group))

    def load(self, fragment: FragmentState, saved: Mapping[str, Any] | None) -> None:
        """Restores the own step of a fragment that was saved, if there was one."""
        fragment.ahead = None if saved is None else self._optimizer.load(fragment.index, OuterState.of(saved))


def ahead_of(fragments: Sequence[FragmentState], settings: Settings, topology: Topology) -> Ahead | None:
    """Returns what makes the own steps of a group; None where the landing rule wants none."""
    return Ahead(fragments, settings, topology) if settings.landing.ahead(topology.num_groups) else None
