"""A model as it is cut now: its rounds, its outer view and its world, and how they are made anew for another cut."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_sdiloco.algorithm import Fragment, Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.compression import kernels_for
from lightning_sdiloco.engine.agreement import require_own_group, require_same_settings
from lightning_sdiloco.engine.background import ThreadBackground
from lightning_sdiloco.engine.checkpoint.ranks import place_of, require_own_state
from lightning_sdiloco.engine.flight import Counts, Landing
from lightning_sdiloco.engine.measurements import LinkRate
from lightning_sdiloco.engine.offload import storage_for
from lightning_sdiloco.engine.outer_view import OuterView
from lightning_sdiloco.engine.parameters.naming import trainable, unwrapped
from lightning_sdiloco.engine.recut import NamedOuter, cut_again, has_other_parameters, named_outer, take_over
from lightning_sdiloco.engine.restart import Restart
from lightning_sdiloco.engine.rounds import Means, Rounds
from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.engine.site.world import join, refuse_other_rounds
from lightning_sdiloco.engine.start import agreed_fragments, align_ranks, cut, say_what_averages_twice
from lightning_sdiloco.engine.warmup import Warmup, warmup_steps_of
from lightning_sdiloco.engine.world import FixedWorld, World


class CutModel:
    """Holds a model with the settings by which it is cut, and all that is made anew with other ones."""

    rounds: Rounds
    view: OuterView
    warmup: Warmup
    world: World

    def __init__(
        self,
        model: nn.Module,
        given: Settings,
        topology: Topology,
        inner_optimizers: Sequence[Optimizer],
        link: LinkRate,
        federation: Federation | None,
    ) -> None:
        self.given, self.settings, self._topology = given, given.chosen_for(topology.num_groups), topology
        require_own_group(model, topology)
        self.model = unwrapped(model)
        fragments, device = agreed_fragments(self.model, self.settings, topology, is_site=federation is not None)
        storage, kernels = storage_for(device, given.offload), kernels_for(device)
        background = (topology.background or ThreadBackground)(device)
        self.means = Means(storage, kernels, background, inner_optimizers, link)
        say_what_averages_twice(inner_optimizers, self.settings, topology)
        self._renewed: Callable[[Rounds], World] = FixedWorld
        self._diagnoses = self.is_closed = False
        self._divide(fragments)
        align_ranks(self.model, self.rounds.fragments, topology)
        require_same_settings({**self.rounds.described(), "kernels": kernels.name}, topology.world)
        if federation is not None:
            self._renewed = refuse_other_rounds
            self.world = join(federation, self.model, self.rounds, self.settings, topology, self.means)

    def _divide(self, fragments: tuple[Fragment, ...]) -> None:
        """Takes the model as it is for the outer one, cut into these fragments."""
        self.rounds = Rounds(self.model, fragments, self.settings, self._topology, self.means, self._diagnoses)
        self.view = OuterView(self.model, self.rounds.fragments, self._topology.in_group, self.means.storage)
        self.world, self.warmup = self._renewed(self.rounds), Warmup(self.rounds)

    def diagnose(self, diagnoses: bool) -> None:
        """Sets whether landings tell how far the groups agree."""
        require_same_settings({"diagnostics": str(diagnoses)}, self._topology.world)
        self._diagnoses = diagnoses
        self.rounds.diagnose(diagnoses)

    def close(self) -> None:
        """Ends the background. What is in flight is lost."""
        self.is_closed = True
        self.world.close()
        self.means.background.close()
        self.rounds.close()

    def require_open(self, called: str) -> None:
        """Refuses to launch once the background has ended."""
        if self.is_closed:
            raise RuntimeError(f"{called} was called after finish() or close(). Make a new StreamingDiLoCo to train.")

    def state_dict(self) -> dict[str, Any]:
        """Returns whose it is, settings, local values, what is in flight, and the records of the fragments."""
        return {
            "rank": place_of(self._topology),
            "settings": self.settings.fixed_by_a_checkpoint(),
            "warmup_steps": self.settings.warmup_steps,
            "local": self.view.local_values(),
            **self.world.state_dict(),
            **self.rounds.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned on this rank, with the numbers of then for ``"auto"``."""
        require_own_state(state, self._topology)
        warmup_steps = warmup_steps_of(state, self.given.warmup_steps, says=self._topology.rank == 0)
        settings = replace(self.given.taken_from(state.get("settings")), warmup_steps=warmup_steps)
        if settings != self.settings:
            self.settings = settings
            self._divide(self.rounds.partition)
        self.rounds.load_state_dict(state)
        self.view.load_local(state["local"])
        self.world.load_state_dict(state)

    @torch.no_grad()
    def restart(self, restart: Restart, step: int) -> None:
        """Restarts the rounds where an earlier run was, on all ranks, with the same `Restart`."""
        landed = {name: own for name, own in restart.parameters.items() if own.rounds}
        self.rounds.begin(NamedOuter(landed, restart.buffers), step)
        self.view.write_outer()

    @torch.no_grad()
    def choose(self, settings: Settings, step: int) -> None:
        """Goes on after an inner step as if these had been the settings from the start."""
        self.rounds.require_no_launch(step, settings)
        before, outer = self.rounds, named_outer(self.rounds.fragments, self._topology.in_group)
        self.given, self.settings = settings, settings.chosen_for(self._topology.num_groups)
        self._divide(cut(self.model, settings).fragments)
        self.rounds.begin(outer, before.began_at)
        for fragment in self.rounds.fragments:
            fragment.weight = before.fragments[0].weight

    def has_other_parameters(self) -> bool:
        """Tells whether parameters were frozen or became trainable since the model was cut."""
        return has_other_parameters(self.model, self.rounds.fragments)

    @torch.no_grad()
    def recut(self, step: int, counts: Counts) -> Iterator[Landing]:
        """Cuts the model anew after an inner step, for the parameters that are trainable now."""
        before = self.rounds.fragments
        if not self.settings.shares:
            raise ValueError(
                f"Parameters were frozen or became trainable since training began. route={self.settings.route!r} does"
                " not follow: groups hold outer parameters of their own, and a frozen one would stay different. Choose"
                " what is trainable before training, and train in several fits."
            )
        fragments = cut_again(self.model, before, self.settings, self._topology)
        yield from self.world.land_all(step)
        outer = named_outer(before, self._topology.in_group)
        frozen = set(outer.parameters) - set(trainable(self.model))
        if any(not outer.parameters[name].rounds for name in frozen):
            # Their outer values are not trained, and no landing will come.
            mean = self.view.named(self.rounds.group_mean(step, counts))
            untrained = {name: own for name, own in outer.parameters.items() if name in frozen and not own.rounds}
            trained = {name: own._replace(values=mean[name].flatten()) for name, own in untrained.items()}
            outer = NamedOuter({**outer.parameters, **trained}, outer.buffers)
        take_over(self.model, before, outer, self._topology)
        self._divide(fragments)
        self.rounds.begin(outer, step)
