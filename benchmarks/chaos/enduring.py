"""Plays faults to replica groups of torchft: who ends with an error is started again, as launchers do, and counted."""

from dataclasses import dataclass

from benchmarks.chaos.faults import ALL, HUB
from benchmarks.chaos.notes import Note
from benchmarks.chaos.running import Play, Seen


@dataclass
class Enduring(Play):
    """Plays faults, and halts over none of what becomes of them: the examination counts it.

    A group is back when it has committed an outer step after its last fault.
    """

    def finish(self) -> None:
        """Leaves the end to the world: nobody ends a run of torchft."""

    def _see(self, own: Seen, site: str, note: Note) -> None:
        own.at = max(own.at, note["at"])
        if note["what"] == "step":
            own.training, own.round = True, min(note["rounds"])
        if note["what"] == "commit":
            own.back = own.back or not any(one.victim in (site, HUB, ALL) for _, one in self.going_on)
            if note["step"] > self.records:
                self.records, self.record_at = note["step"], note["at"]

    def _require_going_on(self, now: float) -> None:
        for name in self.world.dead():
            self.world.faults.write("died", victim=name, code=self.world.processes[name].exitcode)
            self.world.start(name)
            if name != HUB:
                self.seen[name].back = False
