"""User settings for a federation, which cover the hub, the founding terms, and how a site joins."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.config import Settings, fault_of, is_real, is_whole
from lightning_sdiloco.algorithm.reduce import kind_and_backend
from lightning_sdiloco.algorithm.weighting import Weighing
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.shards import ShardedLayout, trainable
from lightning_sdiloco.engine.untrained import UntrainedState
from lightning_sdiloco.federation.arithmetic import self_test
from lightning_sdiloco.federation.client import HubClient, hub_addresses
from lightning_sdiloco.federation.codec import NAME
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.keys import bundle_of
from lightning_sdiloco.federation.quorum import Quorum, chosen
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import (
    AMENDABLE,
    LONGEST_GRACE,
    ChosenQuorum,
    RunConfig,
    Terms,
)
from lightning_sdiloco.federation.self_started import HubOfRun, hub_of_hosts, place_of_host
from lightning_sdiloco.federation.site import FederatedWorld, SharedConnection, on_all_ranks
from lightning_sdiloco.version import VERSION

_log = logging.getLogger(__name__)

_CHANNELS = 8  # connections of a site for payloads, shared by its ranks


@dataclass(frozen=True)
class Federation:
    """Settings for training as a site of a federation. Sites are hosts or separately launched jobs
    that connect to a common hub.

    Args:
        run: The name of the run.
        hub: The address and port of the hub. If the hub may be restarted elsewhere, list multiple
            addresses, as in "a:29400,b:29400". If None, the hub starts automatically on the
            launcher's first host.
        site: The name of this site. If the hub starts automatically, the default is the name of
            this host.
        keys: The site's key bundle, or the folder created by ``sdiloco keys init``. If the hub
            starts automatically, the default is the keys in the hub's folder, which all hosts must
            be able to read.
        insecure: Whether to connect without TLS and ``keys``. The hub must also run without TLS.
        lease: The time in seconds that a round waits for a site whose heartbeats have stopped.
        grace: The time in seconds that a round stays open after its first contribution. Training
            waits for a landing at most one second longer than this time. With ``"auto"``, a round
            stays open for ten seconds and training never waits.
        quorum: The minimum number of sites in a round. The round waits for more sites until the
            grace period ends. Alternatively, pass a `Quorum`, such as `DynamicBackup`, to decide
            which sites to wait for.
        late: How to treat contributions that arrive after their round has closed. With ``"drop"``,
            the contribution is never counted, and local and outer parameters are mixed as usual. If
            the next contribution is also late, it is carried instead. With ``"carry"``, the
            contribution remains in the local parameters and counts in a later round. Different
            sites may use different values.
        patience: The maximum time in seconds to wait for the hub before training starts, or to
            continue training without the hub. If this time is exceeded, the site stops with an
            error.
        rounds: The number of rounds per fragment after which the run ends. If None, the run ends
            when its sites finish.
        mean: Where contributions are averaged. With ``"sites"``, each site averages all
            contributions. With ``"hub"``, the hub averages all contributions, encodes the mean, and
            sends it to all sites. Averaging at the hub keeps the size of a site's downloads
            independent of the number of sites.
        sites: The number of hosts that start the run. If ``hub`` is also given, the hub starts
            automatically at that address. Without ``hub``, the default is the number given by the
            launcher. With ``hub``, None means that an operator has started the hub.
        folder: The folder for the ledger, payloads and keys of a hub that starts automatically. By
            default, the folder is ``hub-RUN`` next to the Trainer's checkpoints, or in the current
            folder if there is no Trainer.

    Raises:
        ValueError: If an argument is out of range, if a hub address has no port, or if the keys are
            missing or belong to another site. The message names the argument.

    Examples:
        >>> Federation(run="llm", hub="a.example:29400", site="site b", keys="site-b.bundle")
        Traceback (most recent call last):
        ...
        ValueError: site='site b' is not a valid name. A name starts with a letter or digit and ...
    """

    run: str
    hub: str | None = None
    site: str | None = None
    keys: str | Path | None = None
    insecure: bool = False
    lease: float = 10.0
    grace: float | Literal["auto"] = "auto"
    quorum: int | Quorum = 1
    late: Literal["drop", "carry"] = "drop"
    patience: float = 3600.0
    rounds: int | None = None
    mean: Literal["sites", "hub"] = "sites"
    sites: int | None = None
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        self._require_name("run", self.run)
        if self.site is not None or not self.starts_hub:
            self._require_name("site", self.site)
        is_lease = is_real(self.lease) and self.lease > 0
        self._require("lease", is_lease, "above 0", "10.0 is the default")
        is_grace = self.grace == "auto" or (is_real(self.grace) and self.grace >= 0)
        self._require("grace", is_grace, "at least 0, or 'auto'", "'auto' is the default")
        quorum = self.quorum_of_terms
        is_quorum = not isinstance(quorum, int) or quorum >= 1
        self._require("quorum", is_quorum, "at least 1, or a Quorum", "1 is the default")
        is_late = self.late in ("drop", "carry")
        self._require("late", is_late, "'drop' or 'carry'", "'drop' is the default")
        is_mean = self.mean in ("sites", "hub")
        self._require("mean", is_mean, "'sites' or 'hub'", "'sites' is the default")
        is_patience = is_real(self.patience) and self.patience >= 0
        self._require("patience", is_patience, "at least 0", "3600.0 is the default")
        is_rounds = self.rounds is None or (is_whole(self.rounds) and self.rounds >= 1)
        self._require(
            "rounds", is_rounds, "a whole number of at least 1, or None", "None is the default"
        )
        is_sites = self.sites is None or (is_whole(self.sites) and self.sites >= 1)
        self._require(
            "sites", is_sites, "a whole number of at least 1, or None", "None is the default"
        )
        if self.hub is not None:
            self._require_address(self.hub)
        if not self.starts_hub:
            self._require_keys()

    def _require_address(self, hub: str) -> None:
        if not isinstance(hub, str):
            raise ValueError(
                f"hub={hub!r} is of type {type(hub).__name__}, not a string. Set hub to an address"
                " such as 'a.example:29400'."
            )
        addresses = hub_addresses(hub)
        if self.starts_hub and len(addresses) > 1:
            raise ValueError(
                f"hub={hub!r} names {len(addresses)} addresses, but a hub that starts automatically"
                " has only one. Give one address, or remove sites and start the hub yourself"
                " (sdiloco hub)."
            )

    def _require_keys(self) -> None:
        bundle = bundle_of(str(self.hub), str(self.site), self.keys, self.insecure)
        # A folder of keys is bound to a run when the site connects, not here.
        if bundle is not None and bundle.folder is None:
            bundle.bound(self.run)

    @property
    def starts_hub(self) -> bool:
        """True if the hub starts automatically on the host of one of the sites."""
        return self.hub is None or self.sites is not None

    def _require_name(self, argument: str, name: str | None) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"{argument}={name!r} is not a valid name. A name starts with a letter or digit and"
                f" contains only letters, digits, '.', '_' and '-'. Choose a different {argument}."
            )

    def _require(self, name: str, holds: bool, rule: str, advice: str) -> None:
        if not holds:
            value = getattr(self, name)
            fault = "out of range"
            if name not in ("late", "mean"):
                fault = fault_of(value, name in ("rounds", "sites"))
            raise ValueError(
                f"{name}={value!r} is {fault}: it must be {rule}. Choose a different {name}"
                f" ({advice})."
            )

    @property
    def quorum_of_terms(self) -> int | ChosenQuorum:
        """The quorum as stored in the run config."""
        return self.quorum if isinstance(self.quorum, int) else chosen(self.quorum)

    def located(self) -> "Federation":
        """Returns a federation with complete settings. If the hub starts automatically, the
        launcher supplies the missing hub address, number of sites and site name.
        """
        if not self.starts_hub:
            return self
        place = place_of_host(self.run, self.hub, self.sites)
        return replace(self, hub=place.hub, sites=place.sites, site=self.site or place.host)

    def connect(self, rank: int = 0, ranks: int = 1, incarnation: str = "") -> HubConnection:
        """Connects one of the site's ``ranks`` to the hub. All ranks must pass the same
        incarnation.
        """
        channels = max(1, _CHANNELS // ranks)
        client = HubClient(
            str(self.hub),
            self.run,
            str(self.site),
            self.keys,
            self.insecure,
            channels=channels,
            incarnation=incarnation,
        )
        return HubConnection(client, rank, ranks, self.patience, self.lease)

    def check(self, settings: Settings) -> None:
        """Raises ValueError if a training setting is not supported in a federation."""

        def refuse(name: str, is_refused: bool, why: str) -> None:
            if is_refused:
                value = getattr(settings, name)
                raise ValueError(
                    f"{name}={value!r} does not work with a federation: {why}. Remove {name}."
                )

        kind, backend = kind_and_backend(settings.exchange)
        has_second_hop = kind not in ("auto", "gather")
        refuse(
            "exchange",
            has_second_hop,
            "in its second hop, each site would wait for all other sites. To limit a site's"
            " downloads, use Federation(mean='hub')",
        )
        refuse("exchange", backend == "nccl", "a site reaches its hub over gRPC")
        refuse(
            "schedule",
            settings.schedule is not None,
            "a site launches when the hub requests it, and the hub supports only the round lengths"
            " in the run config, sync_every and dense_beginning",
        )
        refuse(
            "route",
            settings.route is not None,
            "a site sends to the hub and receives the contributions of all sites from it",
        )
        refuse(
            "weighing",
            _has_memory(settings.weighing),
            "a joining site lacks the state from earlier rounds",
        )
        if self.mean == "hub":
            is_weighed = settings.weighing is not None
            refuse("weighing", is_weighed, "with mean='hub', the hub weighs sites by their samples")
            if settings.outer.clip_norm is not None:
                raise ValueError(
                    f"clip_norm={settings.outer.clip_norm:g} does not work with mean='hub', because"
                    " the hub does not clip. Remove one of them."
                )
            if settings.codec.traits.hub_code is None:
                raise ValueError(
                    f"compression={settings.compression!r} does not work with mean='hub', because a"
                    " hub can decode only 'fp4' and 'fp32', with or without memory. Choose one of"
                    " these or remove mean."
                )

    def join(self, rounds: Rounds, topology: Topology) -> FederatedWorld:
        """Joins the run with this site's run config and starts following records. The engine calls
        this method.
        """
        self.check(rounds.settings)
        if topology.num_groups > 1:
            raise ValueError(
                f"worker_groups={topology.num_groups} does not work with a federation, because a"
                " site is a single worker group. Remove worker_groups and start each of the other"
                " groups as a separate site."
            )
        if self.mean == "hub" and any(map(_is_sharded, rounds.fragmented_model.fragments)):
            raise ValueError(
                "mean='hub' does not work with a model that is sharded across ranks. Remove"
                " mean='hub'."
            )
        assert self.site is not None, "`located` has set the site"
        ours = run_config_of(self, rounds)
        hub = self._prepared_hub(topology)
        connect = self.connect if hub is None else replace(self, keys=hub.keys_of_sites).connect
        connection = SharedConnection(topology, connect)
        try:
            run_config, terms = connection.agree(ours)
            for patch in self._amended(ours, run_config, terms).require_same(run_config):
                _log.warning(
                    "%s. Both versions give the same results on known values, so this site joins.",
                    patch,
                )
        except Exception:
            connection.hub.leave()
            connection.hub.close()
            raise
        follower = Follower(
            terms,
            run_config.key,
            self.site,
            connection.hub.incarnation,
            self.patience,
            late=MergeAction(self.late),
        )
        return FederatedWorld(
            rounds,
            topology,
            connection,
            follower,
            waits=self.grace != "auto",
            at_end=None if hub is None else hub.stay,
        )

    def _prepared_hub(self, topology: Topology) -> HubOfRun | None:
        """Prepares the hub that starts automatically and obtains this site's keys. Returns None if
        an operator starts the hub.
        """
        if not self.starts_hub:
            return None
        site = str(self.site)
        hub = hub_of_hosts(
            self.run, str(self.hub), self.sites or 1, self.folder, self.keys, self.insecure
        )

        def prepare() -> None:
            if topology.group_rank == 0:
                hub.prepare(site, self.patience)

        on_all_ranks(topology.in_site, prepare)
        return hub

    def _amended(self, ours: RunConfig, run_config: RunConfig, terms: Terms) -> RunConfig:
        """Returns this site's run config for comparison with the founding run config. An amendable
        term that matches the run's current value is set to its founding value, because a site may
        use either value.
        """
        if self.grace == "auto":
            ours = replace(ours, terms=replace(ours.terms, grace=run_config.terms.grace))
        founded = {}
        for name in AMENDABLE:
            if getattr(ours.terms, name) == getattr(terms, name):
                founded[name] = getattr(run_config.terms, name)
        return replace(ours, terms=replace(ours.terms, **founded))


def _has_memory(weighing: Weighing | None) -> bool:
    """Returns whether a weighing depends on previous rounds."""
    if weighing is None:
        return False
    kind = type(weighing)
    return kind.start is not Weighing.start or kind.heard is not Weighing.heard


def _is_sharded(fragment: FragmentState) -> bool:
    return isinstance(fragment.layout, ShardedLayout)


def described_parameters(
    fragment: FragmentState, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Yields the name of each parameter of a fragment with its shape, dtype, and division into
    matrices for the outer step.
    """
    for name in fragment.layout.names:
        # `RunConfig.sizes` reads the shape.
        described = f"{tuple(parameters[name].shape)} {parameters[name].dtype}"
        stack = fragment.matrices.stacks.get(name)
        if stack is not None:
            described += f" as {stack.number} of {stack.rows} x {stack.columns}"
        yield name, described


def described_untrained(state: UntrainedState) -> Iterator[tuple[str, str]]:
    """Yields the name, shape, dtype and kind of each tensor that is not a trainable parameter."""
    for name, kind, outer in zip(state.names, state.kinds, state.outer, strict=True):
        size = outer.numel() * outer.element_size()
        # `RunConfig.sizes` reads this.
        yield name, f"{tuple(outer.shape)} {outer.dtype} {kind.value} of {size} bytes"
    for place, size in zip(state.own.places, state.own.nbytes(), strict=True):
        yield place.name, f"{tuple(place.tensor.shape)} {place.tensor.dtype} own of {size} bytes"


def run_config_of(federation: Federation, rounds: Rounds) -> RunConfig:
    settings = rounds.settings
    fragmented_model = rounds.fragmented_model
    records = fragmented_model.fragments
    terms = Terms(
        fragments=len(records),
        sync_every=settings.sync_every,
        overlap_steps=settings.overlap_steps,
        grace=LONGEST_GRACE if federation.grace == "auto" else float(federation.grace),
        lease=float(federation.lease),
        quorum=federation.quorum_of_terms,
        rounds=federation.rounds,
        guard=settings.outer.guard,
        hub_mean=settings.codec.traits.hub_code if federation.mean == "hub" else None,
        dense_beginning=settings.dense_beginning,
    )
    described = {**settings.fixed_by_a_checkpoint(), **fragmented_model.outer_optimizer.described}
    if settings.dense_beginning is None:
        # This setting is newer than some run configs.
        del described["dense_beginning"]
    parameters = trainable(fragmented_model.model)
    fragments = []
    shards = []
    for fragment in records:
        described_fragment = [
            *described_parameters(fragment, parameters),
            *described_untrained(fragment.untrained),
        ]
        fragments.append(tuple(described_fragment))
        lengths: tuple[int, ...] = ()
        if isinstance(fragment.layout, ShardedLayout):
            # Here, all sites must have the same number of ranks.
            lengths = tuple(fragment.layout.lengths)
        shards.append(lengths)
    return RunConfig(
        run=federation.run,
        terms=terms,
        settings=described,
        fragments=tuple(fragments),
        shards=tuple(shards),
        versions={"torch": str(torch.__version__).split("+")[0], "lightning-sdiloco": VERSION},
        self_test=self_test(settings, fragmented_model.partition, fragmented_model.storage.device),
    )
