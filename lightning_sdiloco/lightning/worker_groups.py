"""The worker groups of this process: how its ranks find each other, and whether they may still wait for each other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from lightning_sdiloco.comm.exchange import DeviceBackend
from lightning_sdiloco.comm.topology import GroupLayout, Topology, store, world
from lightning_sdiloco.engine.agreement import require_same_settings
from lightning_sdiloco.launch.environment import meet, warn_of_shared_store
from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.launch.interfaces import exchange_address, for_exchange, group_address
from lightning_sdiloco.launch.reachability import require_reachable


class WorkerGroups:
    """The ranks of this process and of the others. It lives as long as the strategy, over several fits.

    Attributes:
        failed: Whether this rank ends with an exception.
    """

    def __init__(self) -> None:
        self.failed = False
        self._topology: Topology | None = None
        self._failures: Failures | None = None

    @property
    def topology(self) -> Topology:
        """Worker groups and the ways between them; known when processes are connected."""
        assert self._topology is not None, "the process groups are made in setup_environment"
        return self._topology

    @property
    def is_alone(self) -> bool:
        """Whether this rank ends with an exception and must not wait for others, which may be gone or elsewhere."""
        return self.failed and self._topology is not None and self._topology.world.size > 1

    @contextmanager
    def reach(self, layout: GroupLayout, rank: int, environment: Any | None, timeout: timedelta) -> Iterator[None]:
        """Refuses to start where ranks cannot reach each other. Within it all processes are to be connected.

        Args:
            layout: The worker groups.
            rank: This rank.
            environment: Lightning's cluster environment; None where all ranks are on one machine.
            timeout: How long to wait for the others.

        Raises:
            ValueError: If ranks do not come, or cannot reach each other.
        """
        # Kept until then: the default process group takes over the store of the rendezvous.
        rendezvous = None if environment is None else meet(environment, layout.world_size, timeout)
        if rendezvous is not None:
            require_reachable(rendezvous, layout.group_of(rank), exchange_address, group_address)
        with for_exchange():
            yield

    def join(
        self,
        layout: GroupLayout,
        rank: int,
        described: Mapping[str, str],
        timeout: timedelta,
        on_device: DeviceBackend | None,
    ) -> None:
        """Makes the ways between the ranks of a group and between groups, as soon as all processes are connected.

        Args:
            layout: The worker groups.
            rank: This rank.
            described: All that must be the same on all ranks, as text.
            timeout: Bound of one flight.
            on_device: What carries outer gradients from device to device; None for gloo.

        Raises:
            ValueError: If the choices differ between ranks, or devices cannot reach each other.
        """
        warn_of_shared_store(rank)
        self._failures = Failures(store(), rank, layout.group_of(rank), layout.world_size)
        # A second fit in this process finds the process groups of the first.
        if self._topology is None or self._topology.is_stale():
            require_same_settings(described, world())
            self._topology = Topology.of_world(layout, timeout, for_exchange, on_device)

    def use(self, topology: Topology) -> None:
        """Takes ways between ranks that somebody else has made."""
        self._topology = topology

    def fail(self, exception: BaseException) -> None:
        """Tells that this rank ends with an exception: from now on it must not wait for others."""
        self.failed = True
        failures, self._failures = self._failures, None
        if failures is not None:
            with suppress(Exception):
                failures.leave(exception)

    def mean_over_all(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Returns the mean over all ranks of every number that all ranks have; none after an exception."""
        if self.is_alone:
            return {}
        ranks = self.topology.world.all_gather_object(dict(numbers))
        common = [name for name in numbers if all(name in rank for rank in ranks)]
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in common}
