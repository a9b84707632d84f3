"""A site's training loop, in which fragments launch and land according to the federation's rules.

The training thread owns the follower and calls the connection, as described in [Note: how a site
uses its connection]. Encoding and averaging run in the background, and the training thread checks
their progress once per inner step. A site waits for the network only if the follower requires it.

[Note: one site, many followers] Every rank has its own follower. The first rank calls the hub for
all ranks, and each rank transfers its own payloads. All ranks receive the same events, with the
same time, after the same inner step. All ranks therefore make the same decisions and need to agree
only on the events. A record becomes an event when every rank has the payloads that it needs.
"""

import io
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.guard import AGAINST_OTHERS, Direction
from lightning_sdiloco.algorithm.merge import Mix
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.background import Pending, Result, Work
from lightning_sdiloco.engine.fragments import FragmentState, Landing, Launch, Purpose, Span
from lightning_sdiloco.engine.outer import OuterState
from lightning_sdiloco.engine.restart import State
from lightning_sdiloco.engine.rounds import PendingFlight, Rounds, completed
from lightning_sdiloco.engine.shards import OuterParameter, to_parameters
from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.arithmetic import (
    Encoded,
    SiteArithmetic,
    Stepped,
    digests_of,
    fetched_by,
    landed_rows,
)
from lightning_sdiloco.federation.codec import Bytes, Json, plain, read
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.messages import (
    NO_STATE,
    SITE_EVENTS,
    Amended,
    Called,
    Contribution,
    InnerRate,
    Lost,
    Record,
    Recorded,
    SiteEvent,
    StateArrived,
    StateHeader,
    StateWanted,
    StepCounts,
    StepsOfOthers,
    Waiting,
    Welcome,
    Welcomed,
)
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import RunConfig, Terms

_log = logging.getLogger(__name__)

# The time for which a site waits for events in one call, in seconds.
_MOMENT = 0.05
# Seconds after which a payload that the hub has lost is resent.
_AGAIN = 1.0
# Sites whose inner learning rates differ by more than this factor do not follow the same schedule.
_UNLIKE_RATES = 1.25
# Numbers of batches may differ slightly between sites with the same plan.
_UNLIKE_PLANS = 1.01
_CHANGED_IN_MEMORY = (
    "The outer parameters of %s have changed in memory since it computed them, so it cannot send"
    " them to other sites. Restart this site so that it resumes from its last checkpoint."
)
_ERRORS = {kind.__name__: kind for kind in (AgreementError, ExchangeError, Refused, ValueError)}


class RankReport(NamedTuple):
    """The values that a rank reports to the other ranks of its site after an inner step.

    Attributes:
        events: On the first rank, the kinds of new events with their fields as plain values.
        fetched: The keys of records whose payloads this rank has fetched (True) or found to be
            missing (False).
        now: The current time on this rank.
        requests: The bits of the requests that this rank sends to all ranks.
        samples: The number of samples on which this rank has trained since the last report.
        rate: The learning rate of this rank's last inner step.
    """

    events: list[tuple[str, Json]]
    fetched: dict[str, bool]
    now: float
    requests: int
    samples: int
    rate: float


class SiteReport(NamedTuple):
    """The combined report, which is identical on all ranks. The report contains new events, the
    time, the requests and samples of all ranks, and their largest learning rate.
    """

    events: list[SiteEvent]
    now: float
    requests: int
    samples: int
    rate: float


def on_all_ranks(ranks: Communicator, task: Callable[[], Result]) -> list[Result]:
    """Runs a task on every rank and returns all results. An error on one rank is raised on all
    ranks so that no rank waits for another.
    """
    outcomes = ranks.attempt(task)
    for outcome in outcomes:
        if outcome.failure:
            kinds = (_ERRORS[name] for name in outcome.failure if name in _ERRORS)
            raise outcome.raised or next(kinds, RuntimeError)(outcome.text)
    return [outcome.value for outcome in outcomes]


def _range_of(*numbers: int | None) -> str:
    """Returns the smallest and largest number as text."""
    known_numbers = {number for number in numbers if number is not None}
    return " to ".join(f"{number:,}" for number in sorted(known_numbers)) or "an unknown number"


class _Fetching(NamedTuple):
    """A record that has not yet become an event, with the ranks that have its payloads."""

    record: Record
    ranks: set[int]


class SharedConnection:
    """The combined connection of a site's ranks, described in [Note: one site, many followers] and
    [Note: a site of several ranks].

    Attributes:
        hub: This rank's connection to the hub.
    """

    def __init__(
        self, topology: Topology, connect: Callable[[int, int, str], HubConnection]
    ) -> None:
        self._ranks = topology.in_site
        rank = topology.group_rank
        self._leads = rank == 0
        # Fetched payloads of records for which other ranks are still fetching.
        self._payloads: dict[str, Mapping[str, Bytes]] = {}
        self._fetching: dict[str, _Fetching] = {}
        connections = list[HubConnection]()
        incarnation = self._ranks.all_gather_object(secrets.token_hex(8))[0]

        def connect_rank() -> None:
            connections.append(connect(rank, topology.group_size, incarnation))
            if rank:
                connections[0].reach()

        try:
            on_all_ranks(self._ranks, connect_rank)
        except Exception:
            for connection in connections:
                connection.close()
            raise
        (self.hub,) = connections

    def agree(self, run_config: RunConfig) -> tuple[RunConfig, Terms]:
        """Returns the founding run config and the current terms of the run."""

        def ask() -> Json:
            return self._leads and [self.hub.agree(run_config).to_bytes(), plain(self.hub.amended)]

        text, amended = on_all_ranks(self._ranks, ask)[0]
        founded = RunConfig.from_bytes(text)
        return founded, founded.terms if amended is None else read(Terms, amended, "terms")

    def hear(self, requests: int = 0, samples: int = 0, rate: float = 0.0) -> SiteReport:
        """Returns the events since the last call, together with the requests and training of all
        ranks.
        """
        if self._ranks.size == 1:
            return SiteReport(self.hub.events(), self.hub.now(), requests, samples, rate)
        values: list[Json] = on_all_ranks(
            self._ranks, lambda: tuple(self._report(requests, samples, rate))
        )
        reports = [RankReport(*fields) for fields in values]
        events = self._read(reports[0].events)
        for rank, report in enumerate(reports):
            requests |= report.requests
            for key, is_available in report.fetched.items():
                recorded = self._note_fetched(rank, key, is_available)
                if recorded is not None:
                    events.append(recorded)
        payloads = self._payloads.items()
        self._payloads = {key: blobs for key, blobs in payloads if key in self._fetching}
        samples = sum(report.samples for report in reports)
        rate = max(report.rate for report in reports)
        return SiteReport(events, reports[0].now, requests, samples, rate)

    def _report(self, requests: int, samples: int, rate: float) -> RankReport:
        events = list[tuple[str, Json]]()
        fetched = dict[str, bool]()
        for event in self.hub.events():
            if isinstance(event, Recorded):
                fetched[event.record.key] = event.blobs is not None
                if event.blobs is not None:
                    self._payloads[event.record.key] = event.blobs
                event = Recorded(event.record, None)
            events.append((type(event).__name__, plain(event)))
        return RankReport(events, fetched, self.hub.now(), requests, samples, rate)

    def _read(self, plain_events: Sequence[tuple[str, Json]]) -> list[SiteEvent]:
        """Returns the first rank's events, except for records. All ranks start fetching the
        payloads of these records.
        """
        events = list[SiteEvent]()
        for kind, fields in plain_events:
            event: SiteEvent = read(SITE_EVENTS[kind], fields, kind.lower())
            if isinstance(event, Welcomed):
                # The hub resends all records, except those that were rolled back.
                self._fetching.clear()
            if isinstance(event, Called) and event.own and not self._leads:
                self.hub.prefetch(event.own)
            if not isinstance(event, Recorded):
                events.append(event)
            elif event.record.key not in self._fetching:
                self._fetching[event.record.key] = _Fetching(event.record, set())
                if not self._leads:
                    self.hub.fetch(event.record)
        return events

    def _note_fetched(self, rank: int, key: str, is_available: bool) -> Recorded | None:
        """Returns the event for a record once all ranks have its payloads or a rank reports that
        payloads are missing.
        """
        fetching = self._fetching.get(key)
        if fetching is None:
            # The record was fetched twice, or rolled back.
            return None
        fetching.ranks.add(rank)
        if is_available and len(fetching.ranks) < self._ranks.size:
            return None
        del self._fetching[key]
        blobs = self._payloads.pop(key, None)
        return Recorded(fetching.record, blobs if is_available else None)

    def ready(self, pending: Mapping[int, Pending[Result]]) -> Collection[int]:
        """Returns the keys of background work that is ready on rank 0. On other ranks, the same
        work may require a brief wait.
        """
        if not pending:
            return ()
        return set(
            on_all_ranks(
                self._ranks, lambda: {key for key, work in pending.items() if work.is_ready}
            )[0]
        )


def to_part(fragment: FragmentState, shards: Sequence[State]) -> bytes:
    """Serializes a fragment's part of the outer state, which consists of the outer parameters, the
    outer optimizer and the untrained state.
    """
    parameters = to_parameters(
        fragment.layout.state_dict(), [OuterState.of(shard) for shard in shards]
    )
    state = {
        "parameters": {name: tuple(parameter) for name, parameter in parameters.items()},
        "buffers": _on_host(fragment.untrained.named()),
        "own": _on_host(fragment.untrained.own.of_first),
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu") for name, tensor in tensors.items()}


class Part(NamedTuple):
    """The outer state of a fragment received from another site.

    Attributes:
        outer: This rank's shard of the outer state.
        untrained: The untrained state by name.
        of_first: After the last round, the first site's values of the tensors that each site keeps
            for itself.
    """

    outer: OuterState
    untrained: Mapping[str, Tensor]
    of_first: Mapping[str, Tensor]


def from_part(fragment: FragmentState, part: Bytes) -> Part:
    """Reads this rank's share of a part. The sending site may have a different number of ranks.
    Received data is never executed.
    """
    try:
        state = torch.load(io.BytesIO(part), map_location="cpu", weights_only=True)
        parameters = {name: OuterParameter(*fields) for name, fields in state["parameters"].items()}
        outer = fragment.layout.to_shard([parameters[name] for name in fragment.layout.names])
        untrained = {name: state["buffers"][name] for name in fragment.untrained.names}
        of_first = fragment.untrained.own.fitting(state["own"])
    except Exception as error:  # a stranger's file may be wrong in any way
        raise ValueError(
            f"the received data is not a state of fragment {fragment.index}: {error}"
        ) from error
    if outer.values.shape != fragment.outer.values.shape or outer.values.dtype != torch.float32:
        raise ValueError(
            f"the received state of fragment {fragment.index} has {tuple(outer.values.shape)}"
            " values"
        )
    return Part(outer, untrained, of_first)


@dataclass
class Launched:
    """A flight of this site. ``encoded`` is None while the flight is being encoded in the
    background.
    """

    flight: PendingFlight
    encoded: Encoded | None = None


class Applying(NamedTuple):
    """A record that is being applied or has been applied in the background."""

    record: Record
    pending: Pending[Stepped]


class FederatedWorld:
    """Launches and lands fragments according to the records of a federation, as described in [Note:
    how a site uses its connection].
    """

    def __init__(
        self,
        rounds: Rounds,
        topology: Topology,
        connection: SharedConnection,
        follower: Follower,
        waits: bool,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._at_end = at_end
        self._rounds = rounds
        self._fragmented_model = rounds.fragmented_model
        self._fragments = self._fragmented_model.fragments
        self._topology = topology
        self._arithmetic = SiteArithmetic(rounds, topology)
        self._connection = connection
        self.follower = follower
        self._waits = waits
        # By fragment: the flight of this site, and the record being applied.
        self._launched: dict[int, Launched] = {}
        self._applying: dict[int, Applying] = {}
        # By key: the payloads of records that have not been applied.
        self._blobs: dict[str, Mapping[str, Bytes]] = {}
        # Donors whose states were refused.
        self._refused: list[str] = []
        # The time of the last events, and the earliest time to resend lost payloads.
        self._now = time.monotonic()
        # The inner step of the last launches.
        self._step = 0
        self._give_again_at = -math.inf
        self._has_said_hello = False
        self._has_left = False
        self._has_warned_of_drop = False
        # Whether the hub cannot be reached, and whether the reason is that its history differs.
        self._is_alone = False
        self._has_parted = False
        # The inner learning rate of the other sites, and whether this site has compared its own.
        self._rate_of_others: float | None = None
        self._has_compared_rates = False
        # The inner steps of the other sites when this site connected.
        self._steps_of_others: StepsOfOthers | None = None
        # The hub's reason why rounds do not close; empty if they do.
        self._waits_for = ""
        # The requests of all ranks at the last launch.
        self.requested = 0
        # The training of this rank since the last `hear`.
        self._samples = 0
        self._has_trained = False

    # Training

    @property
    def is_over(self) -> bool:
        return all(progress.ended for progress in self.follower.fragments)

    def join(self, step: int, planned_steps: int | None = None) -> None:
        """Waits until the hub has accepted this site, the site has a state, and all closed rounds
        have landed.
        """
        self._step = step
        self.follower.step_counts = StepCounts(step, planned_steps)
        self.hear()
        while not self._has_joined():
            # Landings are taken one at a time: if the site is far behind, a state is faster and may
            # arrive meanwhile.
            landing = next(self._land_ready(step), None)
            self._look_after()
            if landing is None:
                self._connection.hub.wait(_MOMENT)
            self.hear()
        if self._steps_of_others is not None and self._topology.group_rank == 0:
            self._compare_steps(self._steps_of_others)

    def _has_joined(self) -> bool:
        follower = self.follower
        return (
            follower.reachable
            and follower.follows
            and all(progress.has_joined for progress in follower.fragments)
        )

    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step and its samples. The number of samples may differ between ranks and
        is summed by `hear`.
        """
        self._has_trained = True
        self._samples += samples

    @torch.no_grad()
    def launch_due(self, step: int) -> int:
        """Launches due fragments and returns their number. All ranks receive each other's requests
        immediately.
        """
        self._step = step
        self.follower.step_counts = replace(self.follower.step_counts, trained=step)
        self.requested = self.hear(self._rounds.requests.take())
        for call in self.follower.skips():
            self._connection.hub.skip(call)
        due = self.follower.launches(step)
        if due:
            self._fragmented_model.cut_model.require_coverage()
        for index in due:
            self._launch(index, step)
        self._send()
        return len(due)

    def _launch(self, index: int, step: int) -> None:
        began = time.perf_counter()
        fragment = self._fragments[index]
        begun = self.follower.begin(index, step)
        launch = fragment.launch(step, float("inf"), Purpose.ROUND, 0)
        buffers = launch.buffers
        if begun.exact:
            buffers = [*buffers, *fragment.untrained.own.copies()]
        launch = launch._replace(
            buffers=buffers,
            is_dense=self._rounds.timetable.schedule.is_dense_round(begun.round),
            # A site does not know what other sites have changed, so it sends its own changes.
            travelling=tuple(fragment.untrained.changed_since(buffers)),
            step_time=self._rounds.step_clock.seconds,
        )
        self._compare_rates()
        self._rounds.link.note(self._connection.hub.sends_bytes_per_s)
        launch = self._rounds.coded(launch)
        self._encode(launch, begun, (began, time.perf_counter()))

    def _compare_rates(self) -> None:
        """Warns once if this site's inner learning rate differs from the rate of the other sites.
        Each site has its own schedule, which starts with the site's first step.
        """
        rate = self._fragmented_model.inner.rate or None
        self.follower.inner_lr = rate
        common_rate = self._rate_of_others
        if rate is None or common_rate is None or self._has_compared_rates:
            return
        self._has_compared_rates = True
        if max(rate, common_rate) > _UNLIKE_RATES * min(rate, common_rate):
            _log.warning(
                "The inner learning rate of %s is %.3g, but the other sites use %.3g. Each site's"
                " schedule counts only that site's steps. Start the schedule at the step that the"
                " other sites have reached, and set the same max_steps on all sites.",
                self.follower.site,
                rate,
                common_rate,
            )

    def _compare_steps(self, steps_of_others: StepsOfOthers) -> None:
        """Logs how many inner steps the other sites have trained, and warns if they agree on a
        total number that differs from this site's plan.
        """
        steps = self.follower.step_counts
        planned = steps.planned
        common = steps_of_others.planned
        _log.info(
            "Site %s has trained %s inner steps and plans %s. When it joined, the other sites had"
            " trained %s (median) and planned %s.",
            self.follower.site,
            f"{steps.trained:,}",
            _range_of(planned),
            f"{steps_of_others.trained:,}",
            _range_of(*(common or ())),
        )
        if planned is None or common is None:
            return
        least, most = common
        others_agree = most <= _UNLIKE_PLANS * least
        is_alike = least / _UNLIKE_PLANS <= planned <= _UNLIKE_PLANS * most
        if others_agree and not is_alike:
            _log.warning(
                "Site %s plans %s inner steps in total, but the other sites plan %s. Learning rate"
                " schedules that end with the training therefore differ between sites. Set the same"
                " max_steps on all sites.",
                self.follower.site,
                _range_of(planned),
                _range_of(least, most),
            )

    def _encode(self, launch: Launch, begun: Contribution, launched: Span) -> None:
        # The engine does not use the result, which is not an `Arrival`.
        pending: Pending[Any] = self._in_background(lambda: self._arithmetic.encode(launch, begun))
        flight = PendingFlight(launch, pending, launched)
        self._launched[launch.fragment] = Launched(flight)
        self._rounds.flights.append(flight)

    def _in_background(self, work: Callable[[], Result]) -> Pending[Result]:
        def in_one_stage() -> Work[Result]:
            yield from ()
            return work()

        return self._rounds.background.start(in_one_stage())

    def _send(self, wait: bool = False) -> None:
        """Sends all launches that are already encoded. With ``wait``, also waits for unfinished
        launches and sends them.
        """
        encoding: dict[int, Pending[Any]] = {
            index: launched.flight.pending
            for index, launched in self._launched.items()
            if launched.encoded is None
        }
        for index in encoding if wait else self._connection.ready(encoding):
            encoded = encoding[index].result()
            self._launched[index].encoded = encoded
            flight = self.follower.fragments[index].flight
            contribution: Contribution | None = encoded.sent
            # A launch from before the checkpoint is already complete.
            if flight is None or flight.own != contribution:
                contribution = self.follower.complete(encoded.sent)
            if contribution is not None:
                self._connection.hub.contribute(contribution, encoded.blobs)
        self._drop_landed()

    def _drop_landed(self) -> None:
        for index in list(self._launched):
            if self.follower.fragments[index].flight is None:
                self._rounds.flights.remove(self._launched.pop(index).flight)
        # Records also end without a landing: a state contains them, or the hub rolls them back.
        keys = self.follower.record_keys
        self._blobs = {key: blobs for key, blobs in self._blobs.items() if key in keys}

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands due records and waits if the rules require it."""
        yield from self._land_ready(step)
        began = time.perf_counter()
        while self._waits and (longest_wait := self.follower.waits(step, self._now)) > 0.0:
            self._connection.hub.wait(min(_MOMENT, longest_wait))
            self.hear()
            yield from self._land_ready(step, (began, time.perf_counter()))
        self._look_after()

    def land_all(self, step: int) -> Iterator[Landing]:
        """Launches all held training, follows the run until this training has been recorded, and
        then leaves.
        """
        yield from self._end(step, lambda: True)
        if self._at_end is not None and self._topology.group_rank == 0:
            self._at_end()

    def leave(self, step: int) -> Iterator[Landing]:
        """Ends in the same way as `land_all`, but waits no longer than for a single landing,
        because a site that must stop has little time.
        """
        deadline = self._now + self.follower.terms.longest_wait
        yield from self._end(step, lambda: self.follower.reachable and self._now < deadline)

    @torch.no_grad()
    def _end(self, step: int, goes_on: Callable[[], bool]) -> Iterator[Landing]:
        self.follower.finish()
        while not self.follower.finished and not self._has_left and goes_on():
            self.launch_due(step)
            yield from self._land_ready(step)
            self._look_after()
            if not self.follower.finished:
                self._connection.hub.wait(_MOMENT)
        self._leave_hub()

    def final_exchange(self, step: int) -> Iterator[Landing | None]:
        """Does nothing, because a site that finishes computes no final mean while other sites
        continue.
        """
        return iter(())

    def _leave_hub(self) -> None:
        if not self._has_left:
            self._has_left = True
            hub = self._connection.hub
            hub.heartbeat(self.follower)
            hub.leave()
            hub.close()

    def close(self) -> None:
        self._leave_hub()
        self._rounds.close()

    def _look_after(self) -> None:
        self._send()
        if self.follower.reachable and self.follower.wants_state:
            self._connection.hub.ask(self._refused, self.follower.lacked_rounds)
            self._give_again()
        self._connection.hub.heartbeat(self.follower)

    def _give_again(self) -> None:
        """Periodically resends the payloads of closed rounds if the hub may have lost them."""
        if self._now < self._give_again_at:
            return
        self._give_again_at = self._now + _AGAIN
        for contribution in self.follower.outstanding():
            if self.follower.fragments[contribution.fragment].lacks_payloads:
                self._give(contribution)

    def _give_after_rollback(self, welcome: Welcome) -> None:
        """Resends flights whose rounds were reopened by a rollback."""
        if welcome.rolled_back:
            for contribution in self.follower.outstanding():
                self._give(contribution)

    def _give(self, contribution: Contribution) -> None:
        launched = self._launched.get(contribution.fragment)
        if launched is not None and launched.encoded is not None:
            self._connection.hub.contribute(contribution, launched.encoded.blobs)

    # Landing

    @torch.no_grad()
    def _land_ready(self, step: int, wait: Span | None = None) -> Iterator[Landing]:
        """Applies the next records in the background if their payloads have arrived, and lands the
        due records.
        """
        while True:
            self._apply_next()
            due = self._due(step)
            # A site far behind waits only for the arithmetic, not for one inner step per round.
            behind = []
            pending = {}
            for index, applying in due.items():
                if self.follower.fragments[index].closed > applying.record.round:
                    behind.append(index)
                else:
                    pending[index] = applying.pending
            ready = [*behind, *self._connection.ready(pending)]
            for index in ready:
                record, stepped = due[index]
                landing = self._land(record, stepped.result(), step, wait)
                if landing is not None:
                    yield landing
            if not ready:
                return

    def _apply_next(self) -> None:
        """Starts applying the next record of each fragment in the background."""
        for progress in self.follower.fragments:
            record = progress.records.get(progress.next_round)
            if record is None or progress.digest is None or record.key not in self._blobs:
                continue
            applying = self._applying.get(progress.fragment)
            if applying is not None and applying.record.key == record.key:
                continue
            launched = self._launched.get(progress.fragment)
            work = partial(
                self._arithmetic.apply,
                record,
                self._blobs[record.key],
                self._fragments[progress.fragment].outer,
                launched.flight.launch if launched else None,
                launched.encoded if launched else None,
            )
            self._applying[progress.fragment] = Applying(record, self._in_background(work))

    def _due(self, step: int) -> dict[int, Applying]:
        due = {}
        for record in self.follower.due(step):
            applying = self._applying.get(record.fragment)
            if applying is not None and applying.record.key == record.key:
                due[record.fragment] = applying
        return due

    def _land(
        self, record: Record, stepped: Stepped, step: int, wait: Span | None
    ) -> Landing | None:
        arrived_at = time.perf_counter()
        launched = self._launched.get(record.fragment)
        encoded = launched.encoded if launched else None
        was_finite = encoded is None or encoded.sent.finite
        progress = self.follower.fragments[record.fragment]
        lost_before = progress.lost_steps
        action = self.follower.land(record, stepped.before, stepped.after)
        del self._applying[record.fragment]
        if action is MergeAction.REFUSE:
            _log.warning(
                "Round %d of fragment %d was measured against outer parameters that differ from"
                " this site's, so this site is fetching a state.",
                record.round,
                record.fragment,
            )
            self._drop_landed()
            return None
        self._fragmented_model.cut_model.reshard()
        self._warn(record, action)
        self._judge_direction(stepped.direction)
        launched_at = step
        if launched is not None:
            launched_at = launched.flight.launch.step
        self._commit(record, stepped, action, step - launched_at)
        if not was_finite:
            self._fragmented_model.recover(record.fragment)
        self._drop_landed()
        landing = self._reported(record, stepped.arrival.landing, encoded)
        wait = wait or (arrived_at, arrived_at)
        launch_span = (wait[0], wait[0])
        if launched is not None:
            launch_span = launched.flight.launch_span
        landing = landing._replace(
            launched_at=launched_at, lost_steps=progress.lost_steps - lost_before
        )
        return completed(landing, launch_span, wait, max(0.0, wait[1] - launch_span[1]), step)

    def _warn(self, record: Record, action: MergeAction) -> None:
        """Warns if this site's contribution does not count in a record."""
        left_out = record.without(self.follower.site)
        if left_out and (left_out.is_by_guard or left_out.reason == "not finite"):
            _log.warning(
                "This site's contribution to round %d of fragment %d was left out: %s. The site"
                " takes the outer parameters of that fragment.",
                record.round,
                record.fragment,
                record.why(left_out.site),
            )
        if left_out and left_out.is_of_buffers:
            _log.warning(
                "The buffers that this site sent for round %d of fragment %d were left out: %s."
                " The site takes the outer buffers.",
                record.round,
                record.fragment,
                record.why(left_out.site),
            )
        if action is MergeAction.DROP and not self._has_warned_of_drop:
            self._has_warned_of_drop = True
            _log.warning(
                "Round %d of fragment %d closed before this site's contribution arrived, so the"
                " contribution does not count. If the next contribution is also late, it is"
                " carried. Run sdiloco status to see how often this happens. If late contributions"
                " are frequent, raise grace or overlap_steps, or reduce the amount of data that"
                " the site sends.",
                record.round,
                record.fragment,
            )

    def _judge_direction(self, direction: Direction | None) -> None:
        """Warns if this site's contributions start to point against the other sites'
        contributions.
        """
        if direction is not None and self.follower.judge_direction(direction):
            _log.warning(
                "This site's contributions point against the other sites: %s", AGAINST_OTHERS
            )

    def _commit(self, record: Record, stepped: Stepped, action: MergeAction, steps: int) -> None:
        """Applies an action to a fragment's values ``steps`` inner steps after the launch."""
        fragment = self._fragments[record.fragment]
        arrival = stepped.arrival
        if action is MergeAction.CARRY:
            fragment.carry(arrival, stepped.moved)
            return
        landing = arrival.landing
        index = record.index_of(self.follower.site)
        mixes = action.mixes and index not in landing.outlying
        # The memory of a compression changes only if the encoded contribution has counted.
        if not (mixes and index in landing.counted):
            commit = fragment.committed()._replace(outer=arrival.commit.outer)
            arrival = arrival._replace(commit=commit)
        if not mixes:
            arrival = arrival._replace(rule=Mix(0.0), gathered=[stepped.outer])
        elif not landing.counted:
            # If no site has trained, nothing changes.
            arrival = arrival._replace(rule=Mix(1.0))
        fragment.land(arrival, steps, final=record.final)
        if self.follower.site in record.without_buffers:
            fragment.untrained.write()
        if action is MergeAction.TAKE and not record.final:
            fragment.memory = None
            fragment.tuning = None

    def _reported(self, record: Record, landing: Landing, encoded: Encoded | None) -> Landing:
        """Returns a landing report in which this site is group 0."""
        site = self.follower.site
        topology = self._topology
        left_out = record.without(site)
        is_outlying = record.index_of(site) in landing.outlying
        if left_out is not None and left_out.is_by_guard:
            is_outlying = True
        bytes_received = 0
        for fetch in fetched_by(topology.group_rank, topology.group_size, record):
            # A site already has its own payloads.
            if record.mean or fetch.source != record.index_of(site):
                bytes_received += fetch.payload.size
        bytes_sent = 0
        was_finite = True
        if encoded is not None:
            bytes_sent = sum(map(len, encoded.blobs.values()))
            was_finite = encoded.sent.finite
        return landing._replace(
            left_out=() if was_finite else (0,),
            outlying=(0,) if is_outlying else (),
            wrong_buffers=(0,) if site in record.without_buffers else (),
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            sites=tuple(contribution.site for contribution in record.counted),
        )

    # Incoming events

    def hear(self, requests: int = 0) -> int:
        """Handles the events since the last call and returns the requests of all ranks. The first
        call sends the hello.
        """
        if not self._has_said_hello:
            self._has_said_hello = True
            self._connection.hub.hello(self.follower)
        report = self._connection.hear(requests, self._samples, self._fragmented_model.inner.rate)
        self._now = report.now
        if self._has_trained:
            self.follower.trained(report.samples, rate=report.rate)
            self._has_trained = False
            self._samples = 0
        self._send()
        for event in report.events:
            self._handle(event)
        return report.requests

    def _handle(self, event: SiteEvent) -> None:
        match event:
            case Welcomed():
                self._enter(event)
            case Called():
                self.follower.hear(event.call)
            case Amended():
                _log.warning("An operator has amended the terms of the run: %s", event.terms)
                self.follower.terms = event.terms
            case InnerRate():
                self._rate_of_others = event.rate
            case StepsOfOthers():
                self._steps_of_others = event
            case Recorded():
                self._learn(event)
            case StateWanted():
                state = self._state(event.founding)
                if state:
                    self._connection.hub.give(event.request, *state)
            case StateArrived():
                self._adopt(event)
            case Lost():
                if self.follower.reachable:
                    self._is_alone = True
                    _log.warning(
                        "%s The site continues training without the hub and sends its training once"
                        " the hub is back.",
                        event.why,
                    )
                self.follower.lose(self._now)
            case Waiting():
                self._warn_of_waiting(event.why)
                if event.why.startswith(NO_STATE):
                    # A donor that was refused may send a sound state now.
                    self._refused.clear()

    def _enter(self, event: Welcomed) -> None:
        """Joins the run at the hub's position."""
        if not self._is_welcome(event.welcome):
            return
        self._drop_landed()
        self._give_after_rollback(event.welcome)
        if self._is_alone:
            _log.warning(
                "The hub is back, and site %s is sending its training.", self.follower.site
            )
        self._is_alone = False
        self._waits_for = ""
        snapshot = event.snapshot
        is_new = all(progress.digest is None for progress in self.follower.fragments)
        if is_new and snapshot and not any(position.round for position in snapshot.applied):
            # At round 0, a site with the same values already has the state on which the run was
            # founded.
            digests = self.digests()
            if list(snapshot.digests) == digests:
                self.follower.found(digests)

    def _learn(self, event: Recorded) -> None:
        if self._waits_for and self.follower.follows:
            self._waits_for = ""
            _log.warning("Rounds close again.")
        record = event.record
        self.follower.learn(record, event.blobs is not None)
        applied = self.follower.fragments[record.fragment].applied
        if event.blobs is not None and record.round > applied.round:
            self._blobs[record.key] = event.blobs

    def _warn_of_waiting(self, why: str) -> None:
        # The warning appears once for each reason. Nothing else would show why training does not
        # start.
        if why != self._waits_for:
            self._waits_for = why
            activity = "waits"
            if self.follower.follows:
                activity = "continues to train while no rounds close"
            _log.warning("Site %s %s: %s", self.follower.site, activity, why)

    def _is_welcome(self, welcome: Welcome) -> bool:
        """Processes the hub's position and returns whether the hub is accepted. A hub with fewer or
        different records counts as gone, because the right hub may return.
        """
        try:
            self._begin_again(self.follower.welcome(welcome))
        except AgreementError as error:
            if welcome.rolled_back:
                raise
            if not self._has_parted:
                _log.warning(
                    "%s The site continues training without that hub for as long as patience"
                    " allows.",
                    error,
                )
            self._is_alone = True
            self._has_parted = True
            self.follower.lose(self._now, str(error))
            return False
        self._has_parted = False
        return True

    # Outer states on their way between sites; in-group collectives, between landings

    def digests(self, values: Sequence[Tensor] | None = None) -> list[int]:
        fragments = self._fragments
        if values is None:
            values = [fragment.outer.values for fragment in fragments]
        starts = [fragment.layout.start for fragment in fragments]
        return digests_of(values, starts, self._topology.in_site)

    def _state(self, founding: bool) -> tuple[StateHeader, list[bytes]] | None:
        """Returns this site's state if the state is up to date or the run is to be founded on
        it.
        """
        applied = tuple(progress.applied for progress in self.follower.fragments)
        header = StateHeader(applied, tuple(self.digests()))
        if not founding and not self.follower.follows:
            return None
        if not founding and self.follower.header() != header:
            _log.error(_CHANGED_IN_MEMORY, self.follower.site)
            return None
        gather = self._topology.in_site.all_gather_object
        parts = [
            to_part(fragment, gather(fragment.outer.state_dict())) for fragment in self._fragments
        ]
        return header, parts

    @torch.no_grad()
    def _begin_again(self, fragments: Sequence[int]) -> None:
        """Restarts fragments from their outer values, as described in [Note: what an earlier
        incarnation has launched].
        """
        if not fragments:
            return
        _log.info(
            "Open rounds of fragments %s contain launches from before this site's restart. The site"
            " continues from the outer parameters of these fragments.",
            ", ".join(map(str, fragments)),
        )
        self._fragmented_model.cut_model.reshard()
        for index in fragments:
            fragment = self._fragments[index]
            fragment.write_outer(self._topology.in_group, stays=True)
            # The memory of the compression belongs to launches of another incarnation, or to none.
            fragment.memory = None
            fragment.tuning = None

    @torch.no_grad()
    def _adopt(self, state: StateArrived) -> None:
        """Adopts the fragments of a received state that are newer than this site's state."""
        if not self.follower.wants_state:
            return
        fragments = self._fragments
        try:
            if len(state.parts) != len(fragments):
                raise Refused(
                    f"the state has {len(state.parts)} parts for {len(fragments)} fragments"
                )
            parts = [
                from_part(fragment, part)
                for fragment, part in zip(fragments, state.parts, strict=True)
            ]
            digests = self.digests([part.outer.values for part in parts])
            actions = self.follower.adopt(state.header, digests)
        except ValueError as error:
            _log.warning("A state from %s was refused: %s.", state.source, error)
            self._refused.append(state.source)
            return
        self._fragmented_model.cut_model.reshard()
        for index, action in actions.items():
            self._applying.pop(index, None)
            self._start_from(parts[index], fragments[index], action)
        self._refused.clear()
        self._connection.hub.hello(self.follower)
        self._drop_landed()

    def _start_from(self, part: Part, fragment: FragmentState, action: MergeAction) -> None:
        """Replaces a fragment's outer state with a received one and applies an action to the local
        parameters.
        """
        in_group = self._topology.in_group
        before = fragment.gathered(in_group)
        fragment.start_from(part.outer, part.untrained)
        fragment.untrained.own.of_first.update(part.of_first)
        after = fragment.gathered(in_group)
        if action is MergeAction.CARRY:
            fragment.layout.shift(after - before)
            return
        if action.mixes:
            launch = self._launched[fragment.index].flight.launch
            rule = self._rounds.settings.landing
            outer = fragment.load_outer()
            rows = landed_rows(fragment, launch, outer, after, rule, in_group)
            fragment.layout.land(rule, rows, self._step - launch.step)
        else:
            fragment.layout.land(Mix(0.0), [after], 0)
        fragment.untrained.write()
        fragment.memory = None
        fragment.tuning = None

    # Checkpoints

    def state_dict(self) -> State:
        """Waits for encoding to finish and returns the site's progress in the federation with its
        flights.
        """
        self._send(wait=True)
        return {
            **self._rounds.state_dict(),
            "federation": {"site": self.follower.site, **self.follower.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Continues from the state that another incarnation of this site has saved."""
        saved = state.get("federation", {"site": None})
        if saved["site"] != self.follower.site:
            raise ValueError(
                f"This is the state of site {saved['site']!r}, but this is site"
                f" {self.follower.site!r}: each site must resume from its own state. Use this"
                " site's checkpoint, or start without one to fetch the state of another site."
            )
        self.follower.load_state_dict(saved, self.digests())
        self._applying.clear()
        self._rounds.flights.clear()
        self._launched.clear()
        for saved_flight in state["flights"]:
            index = saved_flight["fragment"]
            flight = self.follower.fragments[index].flight
            if flight is not None:
                began = time.perf_counter()
                outer = self._fragments[index].load_outer()
                launch = Launch.of(saved_flight, outer, float("inf"))
                self._encode(launch, flight.own, (began, time.perf_counter()))
        self._send(wait=True)
        self._has_said_hello = False
        self.hear()
