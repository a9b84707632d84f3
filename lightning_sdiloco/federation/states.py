"""Outer states on their way between sites: outer parameters, outer optimizer and buffers, a part for each fragment."""

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import Mix
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import FragmentState, OuterParameter, OuterState, Rounds, to_parameters
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.arithmetic import digests_of
from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.messages import StateHeader

_log = logging.getLogger(__name__)


def to_part(fragment: FragmentState, shards: Sequence[Mapping[str, Any]]) -> bytes:
    parameters = to_parameters(fragment.layout.state_dict(), [OuterState.of(shard) for shard in shards])
    buffers = {name: buffer.to("cpu") for name, buffer in fragment.buffers.named().items()}
    file = io.BytesIO()
    torch.save({"parameters": {name: tuple(own) for name, own in parameters.items()}, "buffers": buffers}, file)
    return file.getvalue()


def from_part(fragment: FragmentState, part: Bytes) -> tuple[OuterState, Mapping[str, Tensor]]:
    """Reads what of it this rank holds, perhaps at a site with another number of ranks. Nothing in it is executed."""
    try:
        state = torch.load(io.BytesIO(part), map_location="cpu", weights_only=True)
        parameters = {name: OuterParameter(*own) for name, own in state["parameters"].items()}
        outer = fragment.layout.to_shard([parameters[name] for name in fragment.layout.names])
        buffers = {name: state["buffers"][name] for name in fragment.buffers.names}
    except Exception as error:  # whatever is wrong with what a stranger may have made
        raise ValueError(f"what came is no state of fragment {fragment.index}: {error}") from error
    if outer.values.shape != fragment.outer.values.shape or outer.values.dtype != torch.float32:
        raise ValueError(f"the state of fragment {fragment.index} that came has {tuple(outer.values.shape)} values")
    return outer, buffers


class OuterStates:
    """Gives the outer state of a site to others, and takes over theirs, between landings. In-group collectives."""

    def __init__(self, rounds: Rounds, topology: Topology, follower: Follower) -> None:
        self._rounds, self._topology, self._follower = rounds, topology, follower

    def digests(self, values: Sequence[Tensor] | None = None) -> list[int]:
        fragments = self._rounds.fragments
        values = [own.outer.values for own in fragments] if values is None else values
        return digests_of(values, [own.layout.start for own in fragments], self._topology.in_site)

    def begin_as_founded(self, anchor: StateHeader | None) -> None:
        """Begins at round 0 with what this site has, where the run was founded on the same values."""
        if anchor is None or any(position.round for position in anchor.applied):
            return
        if any(own.digest is not None for own in self._follower.fragments):
            return
        digests = self.digests()
        if list(anchor.digests) == digests:
            self._follower.found(digests)

    def given(self, founding: bool) -> tuple[StateHeader, list[bytes]] | None:
        """Returns the state of this site, if it follows, or founds the run."""
        digests = self.digests()
        if founding:
            header = StateHeader(tuple(own.applied for own in self._follower.fragments), tuple(digests))
        elif not self._follower.follows or list((header := self._follower.header()).digests) != digests:
            return None
        gather = self._topology.in_site.all_gather_object
        return header, [to_part(own, gather(own.outer.state_dict())) for own in self._rounds.fragments]

    @torch.no_grad()
    def begin_again(self, fragments: Sequence[int]) -> None:
        """Begins again from the outer values of fragments; see [Note: what an earlier life has launched]."""
        if not fragments:
            return
        _log.info(
            "What this site launched before it was started again stands in rounds that are open, of fragments %s. It"
            " trains on from their outer parameters.",
            ", ".join(map(str, fragments)),
        )
        self._rounds.reshard()
        for index in fragments:
            self._rounds.fragments[index].write_outer(self._topology.in_group)
            self._forget_memory(index)

    def _forget_memory(self, index: int) -> None:
        """Forgets what the compression remembers of launches of another life, or of none."""
        fragment = self._rounds.fragments[index]
        fragment.memory = fragment.tuning = None

    @torch.no_grad()
    def adopt(self, header: StateHeader, parts: Sequence[Bytes]) -> list[int]:
        """Takes over a state, as far as it is newer than what this site has; returns the fragments that it changed.

        Raises:
            ValueError: If it is not what it says, or not what the records say.
        """
        fragments = self._rounds.fragments
        if len(parts) != len(fragments):
            raise Refused(f"the state has {len(parts)} parts, and there are {len(fragments)} fragments")
        came = [from_part(own, part) for own, part in zip(fragments, parts, strict=True)]
        landings = self._follower.adopt(header, self.digests([outer.values for outer, _ in came]))
        self._rounds.reshard()
        for index, landing in landings.items():
            self._take_over(index, *came[index], landing)
        return list(landings)

    def _take_over(self, index: int, outer: OuterState, buffers: Mapping[str, Tensor], landing: MergeAction) -> None:
        fragment, in_group = self._rounds.fragments[index], self._topology.in_group
        before = fragment.gathered(in_group)
        fragment.start_from(outer, buffers)
        after = fragment.gathered(in_group)
        if landing is MergeAction.CARRY:
            fragment.layout.shift(after - before)
            return
        rule = self._rounds.settings.landing if landing in (MergeAction.MIX, MergeAction.DROP) else Mix(0.0)
        fragment.layout.land(rule, [after], 0)
        fragment.buffers.write()
        self._forget_memory(index)
