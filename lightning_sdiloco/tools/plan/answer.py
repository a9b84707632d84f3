"""Puts together what ``sdiloco plan`` answers: the plan, and what was asked of a hub and of links that differ."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.planning import Groups, HubLoad, Plan, SharedOut, Waits
from lightning_sdiloco.tools.plan.text import hub_as_text, links_as_text, plan_as_text, waits_as_text


class Answer(NamedTuple):
    """What was asked, and only that."""

    plan: Plan
    hub: HubLoad | None = None
    waits: Waits | None = None
    shared: SharedOut | None = None
    links: Mapping[str, float] = {}

    def as_text(self) -> str:
        """Formats the answer for a terminal."""
        parts = [plan_as_text(self.plan)]
        if self.hub is not None:
            parts.append(hub_as_text(self.hub, self.plan.settings))
        if self.waits is not None:
            parts.append(waits_as_text(self.waits, self.plan.groups.step_time))
        if self.shared is not None:
            parts.append(links_as_text(self.shared, list(self.links), self.plan.settings))
        return "\n\n".join(parts)

    def as_json(self) -> str:
        """Formats the answer for programs."""
        told = _plan_as_json(self.plan)
        if self.hub is not None:
            told["hub"] = {**self.hub._asdict(), "enough": self.hub.enough and self.hub.enough._asdict()}
        if self.waits is not None:
            rounds = {name: getattr(self.waits, name)._asdict() for name in ("usual", "longest", "all")}
            told["waits"] = {"arrives": self.waits.arrives, **rounds}
        if self.shared is not None:
            told["links"] = self.shared._asdict()
        return json.dumps(told, indent=2)


def _plan_as_json(planned: Plan) -> dict[str, Any]:
    chosen = planned.recommendation
    return {
        "parameters": planned.model.numel,
        "gradient_bytes": planned.model.nbytes,
        **vars(planned.groups),
        "link": vars(planned.link),
        "steps": planned.steps,
        "settings": _settings(planned.settings, planned.fragments, planned.groups),
        "methods": {name: one._asdict() for name, one in planned.methods.items()},
        "compressions": {name: one._asdict() for name, one in planned.compressions.items()},
        "memory": planned.memory._asdict(),
        "recommendation": {
            **_settings(chosen.settings, chosen.fragments, planned.groups),
            **chosen.prediction._asdict(),
            "utilisation_with_margin": chosen.utilisation_with_margin,
            "memory": chosen.memory._asdict(),
        },
    }


def _settings(settings: Settings, fragments: tuple[int, ...], groups: Groups) -> dict[str, Any]:
    names = ("sync_every", "overlap_steps", "layers_per_fragment", "compression")
    told = {name: getattr(settings, name) for name in names}
    return {**told, **settings.chosen_for(groups.groups).numbers, "fragments": len(fragments)}
