"""How an engine becomes a site of a federation: it brings its charter, and begins to follow the records of the run."""

from dataclasses import replace
from typing import NoReturn

from torch import nn

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.rounds import Means, Rounds
from lightning_sdiloco.engine.site.arithmetic import SiteArithmetic
from lightning_sdiloco.engine.site.charter import charter_of
from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.engine.site.shared import SharedConnection
from lightning_sdiloco.engine.site.world import FederatedWorld
from lightning_sdiloco.federation import Follower


def join(
    federation: Federation,
    model: nn.Module,
    rounds: Rounds,
    settings: Settings,
    topology: Topology,
    means: Means,
) -> FederatedWorld:
    """Joins a federation."""
    federation.check(settings)
    if topology.num_groups > 1:
        raise ValueError(
            f"worker_groups={topology.num_groups} does not go with a federation: a site is one worker group. Leave it"
            " out, and start the others as sites of their own."
        )
    ours = charter_of(federation, model, rounds, settings, means.kernels)
    connection = SharedConnection(federation, topology)
    try:
        charter = connection.agree(ours)
        if federation.grace == "auto":
            ours = replace(ours, terms=replace(ours.terms, grace=charter.terms.grace))
        ours.require_same(charter)
    except Exception:
        connection.close()
        raise
    site, life, late = connection.site, connection.life, federation.landing_of_late
    follower = Follower(charter.terms, charter.key, site, life, federation.patience, late=late)
    arithmetic = SiteArithmetic(rounds.fragments, topology, settings, rounds.schedule, means.kernels)
    return FederatedWorld(model, rounds, topology, means, connection, follower, arithmetic, federation.waits)


def refuse_other_rounds(rounds: Rounds) -> NoReturn:
    """Refuses to cut the model of a site anew, or to choose other settings for it."""
    raise ValueError(
        "The fragments and settings of a site are those of the charter of its run: while it trains, parameters cannot"
        " be frozen or become trainable, and settings cannot be chosen anew. Found another run, from the outer model of"
        " this one."
    )
