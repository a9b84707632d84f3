"""Settles the ``"auto"`` settings of a site with the other sites of its federation, once: see [Note: settled once].

A run that has a charter, or is about to get one, has settings: a site takes them before its first inner step, and
measures nothing. Otherwise it trains alone, as [Note: alone at first] tells, until all founders have measured.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import Federation, Settler, trainable
from lightning_sdiloco.federation import Measurement
from lightning_sdiloco.lightning.auto_settings import AutoSettings, Measured, candidates_among, memory_rate
from lightning_sdiloco.planning import Groups, Link, Model, recommend_for_all, way_through_hub


class RunSettings:
    """Settles what a site has left open."""

    def __init__(self, auto: AutoSettings, federation: Federation, topology: Topology, model: nn.Module) -> None:
        self._auto, self._federation, self._topology, self._model = auto, federation, topology, model

    def known(self, settings: Settings) -> Settings | None:
        """Returns the settings of the run, if it has some. All ranks of the site must call it."""
        with Settler(self._federation, self._topology) as settler:
            texts = settler.known()
        return None if texts is None else self._taken(settings, texts)

    def settle(self, settings: Settings) -> Settings:
        """Returns the settings of the run, when all founders have measured. All ranks of the site must call it."""
        step_time = max(self._topology.world.all_gather_object(self._auto.step_time()))
        with Settler(self._federation, self._topology) as settler:
            known = settler.settle(step_time, lambda measured: self._plan(settings, measured))
        assert known.settings is not None, "it is settled"
        taken = self._taken(settings, known.settings)
        if known.is_whole and known.measured:
            self._explain(taken, known.measured)
        return taken

    def _taken(self, settings: Settings, texts: Mapping[str, str]) -> Settings:
        if missing := [name for name in self._auto.names if name not in texts]:
            raise ValueError(
                f"{missing[0]}='auto' cannot be taken from the run {self._federation.run!r}, whose charter does not say"
                " it: it was founded with another version. Give the value with which it was founded."
            )
        taken = self._auto.restored(settings, texts)
        self._auto.planned, self._auto.why = True, f"they are those of the run {self._federation.run!r}"
        return taken

    def _plan(self, settings: Settings, measured: Mapping[str, Measurement]) -> dict[str, str]:
        """Chooses, as text, what keeps all founders busy."""
        among = candidates_among(self._auto.names, replace(settings, exchange="gather"))
        method, _ = recommend_for_all(self._described(), self._sites(measured), among)
        # With all other settings, for sites that have left more of them open than this one.
        return replace(method.settings, exchange=settings.exchange).fixed_by_a_checkpoint()

    def _explain(self, taken: Settings, measured: Mapping[str, Measurement]) -> None:
        """Says which site decided: that which these settings keep busy for the least of its time."""
        sites = self._sites(measured)
        _, index = recommend_for_all(self._described(), sites, [replace(taken, exchange="gather")])
        groups, link = sites[index]
        self._auto.measured = Measured(groups.step_time, link)
        hardest = list(measured)[index]
        self._auto.why = f"for {hardest}, of {len(sites)} founders that with the hardest way, {self._auto.measured}"

    def _described(self) -> Model:
        return Model.of_parameters(trainable(self._model))

    def _sites(self, measured: Mapping[str, Measurement]) -> list[tuple[Groups, Link]]:
        # A single founder does not stay alone, or it would not need a hub.
        count, rate = max(2, len(measured)), memory_rate(self._model)
        return [
            (
                Groups(own.step_time, count, self._topology.group_size, rate),
                way_through_hub(count, own.to_hub / 1e9, own.from_hub / 1e9, own.round_trip),
            )
            for own in measured.values()
        ]
