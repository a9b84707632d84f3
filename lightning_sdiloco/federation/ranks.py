"""The ranks of a site: one of them speaks with the hub for all, each moves its own payloads, and all hear the same."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning_sdiloco.comm import Communicator, Topology
from lightning_sdiloco.engine import Pending
from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.codec import Bytes, plain, read
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.messages import TOLD, Called, Contribution, Record, Recorded, Told
from lightning_sdiloco.federation.remote import HubConnection, HubShards

_ERRORS = {own.__name__: own for own in (AgreementError, ExchangeError, Refused, ValueError)}


def all_say(ranks: Communicator, ask: Callable[[], Any]) -> list[Any]:
    """Returns what all ranks of a site say. An error of one is raised on all, of which none may wait for the others."""
    every = ranks.attempt(ask)
    for outcome in every:
        if outcome.failure:
            kinds = (_ERRORS[name] for name in outcome.failure if name in _ERRORS)
            raise outcome.raised or next(kinds, RuntimeError)(outcome.text)
    return [outcome.value for outcome in every]


class SharedConnection:
    """The connections of a rank; see [Note: one site, many followers] and [Note: a site of several ranks]."""

    def __init__(
        self,
        topology: Topology,
        connect: Callable[[int], HubConnection],
        connect_shards: Callable[[int, int, str], HubShards],
    ) -> None:
        self._ranks, rank, ranks = topology.in_site, topology.group_rank, topology.group_size
        self.hub: HubConnection | None = None
        self._shards: HubShards | None = None
        self._payloads: dict[str, Mapping[str, Bytes]] = {}
        self._coming: dict[str, tuple[Record, set[int]]] = {}

        def first() -> tuple[str, str] | None:
            if rank:
                return None
            self.hub = connect(ranks)
            return self.hub.site, self.hub.life

        def other() -> None:
            self._shards = connect_shards(rank, ranks, self.life) if rank else None

        self.site, self.life = all_say(self._ranks, first)[0]
        try:
            all_say(self._ranks, other)
        except Exception:
            self.close()
            raise

    def agree(self, charter: Charter) -> Charter:
        said = all_say(self._ranks, lambda: self.hub and self.hub.agree(charter).to_bytes())[0]
        return Charter.from_bytes(said)

    # What is heard

    def heard(self, requests: int = 0, samples: int = 0) -> tuple[list[Told], float, int, int]:
        """Returns what was heard since the last time, the time, and what all ranks request and have trained."""
        if self._ranks.size == 1:
            assert self.hub is not None, "the first rank has it"
            return self.hub.events(), self.hub.now(), requests, samples
        every = all_say(self._ranks, lambda: (*self._listen(), requests, samples))
        heard: list[Told] = [read(TOLD[kind], said, kind.lower()) for kind, said in every[0][0]]
        told = [one for one in heard if not self._is_coming(one)]
        for rank, (_, fetched, _, asked, _) in enumerate(every):
            requests |= asked
            told += [one for key, is_there in fetched.items() if (one := self._arrived(key, rank, is_there))]
        return told, every[0][2], requests, sum(samples for *_, samples in every)

    def _listen(self) -> tuple[list[Any], dict[str, bool], float]:
        """Returns what this rank has heard: events at the first one, and which records it has fetched payloads for."""
        told: list[Any] = []
        fetched: dict[str, Mapping[str, Bytes] | None] = dict(self._shards.fetched()) if self._shards else {}
        for one in self.hub.events() if self.hub else ():
            if isinstance(one, Recorded):
                fetched[one.record.key] = one.blobs
                one = Recorded(one.record, None)
            told.append((type(one).__name__, plain(one)))
        self._payloads.update((key, blobs) for key, blobs in fetched.items() if blobs is not None)
        return (
            told,
            {key: blobs is not None for key, blobs in fetched.items()},
            self.hub.now() if self.hub else 0.0,
        )

    def _is_coming(self, told: Told) -> bool:
        """Begins to fetch what this rank needs; tells whether it is a record, which is told when all ranks have it."""
        if isinstance(told, Called) and told.own and self._shards:
            self._shards.prefetch(told.own)
        if not isinstance(told, Recorded):
            return False
        if told.record.key not in self._coming:
            self._coming[told.record.key] = told.record, set()
            if self._shards:
                self._shards.fetch(told.record)
        return True

    def _arrived(self, key: str, rank: int, is_there: bool) -> Recorded | None:
        """Hears that a rank has what it needs for a record, or that some of it is gone; returns what is told of it."""
        if key not in self._coming:
            # It was fetched twice.
            self._payloads.pop(key, None)
            return None
        record, there = self._coming[key]
        there.add(rank)
        if is_there and len(there) < self._ranks.size:
            return None
        del self._coming[key]
        blobs = self._payloads.pop(key, None)
        return Recorded(record, blobs if is_there else None)

    def ready(self, pending: Mapping[int, Pending[Any]]) -> Collection[int]:
        """Returns what of some work in the background is ready, at rank 0: the others wait for theirs, a moment."""
        if not pending:
            return ()
        ready: Collection[int] = all_say(self._ranks, lambda: {key for key, one in pending.items() if one.is_ready})[0]
        return ready

    def wait(self, timeout: float) -> None:
        if self.hub is not None:
            self.hub.wait(timeout)

    @property
    def sends_bytes_per_s(self) -> float:
        """What the link of this rank carried to the hub with its last payload; 0 if that is not known."""
        own = self._shards or self.hub
        return own.sends_bytes_per_s if own else 0.0

    # What is said

    def beat(self, follower: Follower) -> None:
        if self.hub:
            self.hub.beat(follower)
        if self._shards:
            self._shards.keep(follower.outstanding())

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        if self._shards:
            self._shards.contribute(own, blobs)
        if self.hub:
            self.hub.contribute(own, blobs)

    def close(self) -> None:
        if self.hub:
            self.hub.leave()
            self.hub.close()
        if self._shards:
            self._shards.close()
