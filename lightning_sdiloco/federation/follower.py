"""The follower: a site's side of the rules. When it launches and lands, and what becomes of its own training.

It touches no tensor. Whoever owns it, the engine, tells it the digests of the outer parameters, and does to the values
what a `Landing` says. See [Note: the weight of a site].
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.messages import Beat, Call, Hello, StateHeader, Welcome
from lightning_sdiloco.federation.progress import Landing, Progress
from lightning_sdiloco.federation.records import Contribution, Launch, Payload, Position, Record
from lightning_sdiloco.federation.terms import RETENTION, Terms


class Follower:
    """Follows the records of a run for one site. Times are in seconds, on any clock that never goes back."""

    def __init__(
        self,
        terms: Terms,
        charter: str,
        site: str,
        life: str,
        patience: float = 3600.0,
        step: int = 0,
        late: Landing = Landing.CARRY,
    ) -> None:
        self.terms = terms
        self.site = site
        self.life = life
        self.reachable = False
        self._charter = charter
        self._patience = patience
        self._late = late
        self._alone_since: float | None = None
        self._finishing = False
        offsets = [fragment * terms.sync_every // terms.fragments for fragment in range(terms.fragments)]
        self.fragments = [
            Progress(fragment, Position(0, charter), step + offset, late=late)
            for fragment, offset in enumerate(offsets)
        ]

    # The hub

    def found(self, digests: Sequence[int]) -> None:
        """Begins at round 0 with the outer parameters that this site has: only the founder does, and only once."""
        for own, digest in zip(self.fragments, digests, strict=True):
            own.digest = digest

    def hello(self, run: str) -> Hello:
        """Returns what the site says when it comes. The hub sends all records after those that it has applied."""
        return Hello(run, self.site, self.life, self._charter, tuple(own.applied for own in self.fragments))

    def welcome(self, welcome: Welcome) -> list[int]:
        """Hears what the hub has.

        Returns:
            The fragments of which the local parameters become the outer ones now, and nothing is held any more; see
            [Note: what an earlier life has launched].

        Raises:
            AgreementError: If the hub knows less than this site has applied, or something else.
        """
        for own, closed in zip(self.fragments, welcome.closed, strict=True):
            if own.digest is not None and closed.round < own.applied.round:
                raise AgreementError(
                    f"The hub knows {closed.round} rounds of fragment {own.fragment}, and {self.site} has applied"
                    f" {own.applied.round}. After `sdiloco hub rollback`, start the site again from a checkpoint of"
                    " before, or without one. Otherwise the hub has lost records, or is not that of this run: restore"
                    " its ledger."
                )
            if own.digest is not None and closed.round == own.applied.round and closed != own.applied:
                raise own.parted(closed.round)
        for own, closed, kept in zip(self.fragments, welcome.closed, welcome.kept, strict=True):
            own.closed = max(own.closed, closed.round)
            own.kept = kept
        self.reachable, self._alone_since = True, None
        lives = dict(welcome.standing)
        standing = [Launch(at.round + 1, lives[p]) if p in lives else None for p, at in enumerate(welcome.closed)]
        return [own.fragment for own, launch in zip(self.fragments, standing, strict=True) if own.meet(launch)]

    def lose(self, now: float) -> None:
        """Hears that the hub cannot be reached, and again whenever another try has failed. Training goes on."""
        self.reachable = False
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since > self._patience:
            raise ExchangeError(
                f"{self.site} has not reached the hub for {now - self._alone_since:.0f} s, which is more than"
                f" patience={self._patience:.0f} s. Its checkpoint holds what it trained: start it again when the hub"
                " is back."
            )

    @property
    def lag(self) -> int:
        """How many rounds this site is behind, in the fragment where it is worst."""
        return max(own.closed - own.applied.round for own in self.fragments)

    @property
    def wants_state(self) -> bool:
        """Whether to ask for a state: there is none, or it is the shorter way."""
        return self.lag > RETENTION or not all(own.is_sound for own in self.fragments)

    @property
    def follows(self) -> bool:
        """Whether this site can contribute, and give others a state."""
        return not self.wants_state

    def beat(self) -> Beat:
        """Returns the sign of life."""
        return Beat(self.site, self.life, self.follows, tuple(own.applied.round for own in self.fragments))

    def hear(self, call: Call) -> None:
        """Hears that somebody has launched."""
        own = self.fragments[call.fragment]
        if own.call is None or call.round >= own.call.round:
            own.call = call

    def learn(self, record: Record) -> None:
        """Takes a record, in any order, once or more often."""
        self.fragments[record.fragment].learn(record)

    # Training

    def trained(self, samples: int, steps: int = 1) -> None:
        """Counts an inner step, or those that were made before the site joined."""
        for own in self.fragments:
            own.steps += steps
            own.samples += samples

    def finish(self) -> None:
        """Hears that the site trains no more. All that it holds is launched; then it is `finished`."""
        self._finishing = True

    @property
    def finished(self) -> bool:
        """Whether the site may leave: the run is over, or the site is, and all that it trained is counted."""
        unsettled = [own for own in self.fragments if not own.ended]
        return not unsettled or (self._finishing and not any(own.flight or own.steps for own in unsettled))

    # Launching

    def launches(self, step: int) -> list[int]:
        """Returns the fragments that launch after an inner step, in order."""
        if not self.follows:
            return []
        return [own.fragment for own in self.fragments if own.launches(step, self.terms, self._finishing)]

    def skips(self) -> list[Call]:
        """Returns the calls that this site will not answer, each once, so that nobody waits for it."""
        calls = [] if self._finishing else [own.skips(self.terms) for own in self.fragments]
        return [call for call in calls if call]

    def launch(
        self,
        fragment: int,
        step: int,
        digest: int,
        payloads: tuple[Payload, ...],
        finite: bool = True,
        norm_squared: float = 0.0,
    ) -> Contribution | None:
        """Launches a fragment."""
        begun = self.begin(fragment, step)
        return self.complete(replace(begun, digest=digest, payloads=payloads, finite=finite, norm_squared=norm_squared))

    def begin(self, fragment: int, step: int) -> Contribution:
        """Does the first half of `launch`, for those who encode while training goes on."""
        own = self.fragments[fragment]
        assert own.digest is not None, "what has no outer parameters cannot launch"
        sent = Contribution(
            fragment,
            own.next_round,
            self.site,
            self.life,
            own.applied.key,
            own.samples,
            own.digest,
            payloads=(),
            steps=own.steps,
            exact=own.is_last(self.terms),
        )
        own.launch(sent, step)
        return sent

    def complete(self, sent: Contribution) -> Contribution | None:
        """Does the second half of `launch`."""
        own = self.fragments[sent.fragment]
        if own.flight is None or own.flight.own.payloads or own.flight.own.round != sent.round:
            return None
        if sent.digest != own.digest:
            own.forget()
            return None
        own.flight.own = sent if sent.finite else replace(sent, norm_squared=0.0)
        return own.flight.own

    def outstanding(self) -> list[Contribution]:
        """Returns what to send again after a hello: flights whose round is not known to be closed."""
        flights = [own.flight.own for own in self.fragments if own.flight and own.flight.own.payloads]
        return [own for own in flights if own.round > self.fragments[own.fragment].closed]

    # Landing

    def due(self, step: int) -> list[Record]:
        """Returns the records that land after an inner step, at most one of every fragment; ask again after landing."""
        # Who trains no more has nothing to overlap with.
        overlap = 0 if self._finishing else self.terms.overlap_steps
        return [record for own in self.fragments if (record := own.due(step, overlap))]

    def waits(self, step: int, now: float) -> float:
        """Returns for how many seconds training waits for a landing; 0 while the hub cannot be reached."""
        flights = [own.flight for own in self.fragments if own.flight and self.reachable]
        # Every flight is asked, so that all their waits begin together.
        return max((flight.waits(step, now, self.terms) for flight in flights), default=0.0)

    def land(self, record: Record, before: int, after: int) -> Landing:
        """Lands a record."""
        own = self.fragments[record.fragment]
        if before != record.digest:
            own.refuse(record.round)
            return Landing.REFUSE
        landing = own.landing(record, self.site)
        own.land(landing, record.position, after)
        return landing

    # States

    def header(self) -> StateHeader:
        """Describes the state of this site, for a donor. It must be asked between landings."""
        digests = tuple(own.digest for own in self.fragments if own.digest is not None)
        assert len(digests) == len(self.fragments), "a site that needs a state cannot give one"
        return StateHeader(tuple(own.applied for own in self.fragments), digests)

    def adopt(self, state: StateHeader, digests: Sequence[int]) -> dict[int, Landing]:
        """Takes over the state of a donor, or the anchor. Then the site says hello again, for the records after it."""
        for own, position, said, digest in zip(self.fragments, state.applied, state.digests, digests, strict=True):
            _require_sound(own, position, said, digest)
        landings = {}
        for own, position, digest in zip(self.fragments, state.applied, digests, strict=True):
            if own.digest is None or position.round > own.applied.round:
                # Values that are wrong, or none, make nothing that could be carried.
                landing = Landing.TAKE if own.digest is None else own.passed(position.round, self.site)
                if own.digest is None:
                    own.begin_again()
                own.land(landing, position, digest)
                landings[own.fragment] = landing
        return landings

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint of this site holds, as plain numbers and texts."""
        return {"fragments": [own.described() for own in self.fragments]}

    def load_state_dict(self, state: Mapping[str, Any], digests: Sequence[int]) -> None:
        """Restores what `state_dict` returned. This life goes on where the other one was."""
        loaded = [Progress.restored(fragment, own, self._late) for fragment, own in enumerate(state["fragments"])]
        for own, digest in zip(loaded, digests, strict=True):
            if own.digest not in (digest, None):
                raise ValueError(
                    f"The checkpoint was damaged: fragment {own.fragment} has other outer parameters than were saved."
                    " Resume from another one, or start without: the site then fetches a state."
                )
        self.fragments = loaded


def _require_sound(own: Progress, position: Position, said: int, digest: int) -> None:
    """Refuses a state that is not what it says, or not what the records say."""
    if said != digest:
        raise Refused(f"the state was damaged: fragment {own.fragment} has the digest {digest:x} and not {said:x}")
    if position.round + 1 < own.kept:
        raise Refused(f"the state is at round {position.round} of fragment {own.fragment}; what follows is gone")
    at, after = own.records.get(position.round), own.records.get(position.round + 1)
    known = own.applied if own.applied.round == position.round else at.position if at else position
    if position != known or (after and after.previous != position.key):
        raise Refused(f"the state has another history of fragment {own.fragment} than the records")
    if after and after.digest != digest:
        raise Refused(f"the state is not what the others hold of fragment {own.fragment} after round {position.round}")
