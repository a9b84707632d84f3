"""Sites of a federation in virtual time: the slow and the late cost the others nothing, and nothing counts twice."""

import json
from pathlib import Path
from typing import Any

import yaml

from lightning_sdiloco.planning import Absence
from lightning_sdiloco.tools.simulate.command import with_gaps
from lightning_sdiloco.tools.simulate.groups import Configuration
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places, play_sites
from tests.tools.command import told
from tests.tools.test_simulate import write

STEPS, BATCH = 24, 5


def played(folder: Path, places: Places, **federation: Any) -> FederatedRun:
    quiet = ("trainer.limit_val_batches=0", f"trainer.max_steps={STEPS}")
    return play_sites(Configuration((write(folder),), quiet), places, {"federation": federation}, lambda: None)


def test_a_slow_site_costs_the_others_nothing(tmp_path: Path) -> None:
    speed = 0.25
    even, uneven = (played(tmp_path, Places(2, 1.0, speeds=speeds)) for speeds in ((1.0, 1.0), (1.0, speed)))
    fast, slow = uneven.sites
    # With its last step a site leaves, which may take as long as a round waits.
    assert fast.times[:-1] == even.sites[0].times[:-1]
    assert fast.times[-2] < STEPS < slow.times[int(STEPS * speed) + 1]
    assert slow.counted > 0
    assert even.sites[0].missed == 0


def test_what_a_late_site_has_trained_counts_once(tmp_path: Path) -> None:
    run = played(tmp_path, Places(2, 1.0, delays=(0.0, 12.0)), late="carry")
    on_time, late = run.sites
    assert on_time.late == 0 < late.late
    assert late.missed > 0
    assert max(late.weights[0]) > 6 * BATCH, "what was carried counts with what came after it"
    assert {sum(weights) for site in run.sites for weights in site.weights.values()} == {STEPS * BATCH}
    assert on_time.ended < late.ended


def test_a_site_that_is_away_and_one_that_joins_count_when_they_are_there(tmp_path: Path) -> None:
    away = (Absence(1, 8.0, 40.0), Absence(2, 0.0, 12.0))
    run = played(tmp_path, Places(3, 1.0, absences=away))
    stays, stopped, joins = run.sites
    assert stays.times[-2] < STEPS
    assert stopped.times[6] < 8 < 40 < stopped.times[8]
    assert joins.times[0] > 12
    assert joins.counted > 0
    first = next(record for record in run.records if record.fragment == 0)
    assert [own.site for own in first.counted] == ["site-0", "site-1"]


def test_the_terms_and_the_quorum_are_those_of_the_configuration(tmp_path: Path) -> None:
    file = Path(write(tmp_path, max_steps=STEPS, limit_val_batches=0))
    config = yaml.safe_load(file.read_text())
    site = {"hub": "hub:1", "run": "llm", "site": "a", "insecure": True, "grace": 3.0, "lease": 60.0}
    core = {"class_path": "tests.own_quorum.Core", "init_args": {"core": ["site-0", "site-1"]}}
    config["trainer"]["strategy"]["init_args"]["federation"] = {
        "class_path": "lightning_sdiloco.Federation",
        "init_args": {**site, "quorum": core},
    }
    file.write_text(yaml.safe_dump(config))
    run = play_sites(Configuration((str(file),)), Places(3, 1.0, delays=(0.0, 0.0, 2.0)), {}, lambda: None)
    assert run.terms == "grace=3 s, lease=60 s, quorum=tests.own_quorum.Core(core=['site-0', 'site-1'])"
    first = [[own.site for own in record.counted] for record in run.records if record.round == 1]
    assert first == [["site-0", "site-1"]] * 2, "the third comes within the grace, and is not waited for"
    assert run.sites[2].late > 0


def test_the_command_tells_each_site_the_same_every_time(tmp_path: Path) -> None:
    file, found = write(tmp_path, max_steps=12, limit_val_batches=0), []
    args = [f"--config={file}", "--sites=2", "--step-time=0.1", "--bandwidth=0.001", "--speeds=1,0.5"]
    for name in ("one", "other"):
        found.append((told("simulate", *args, f"--json={tmp_path / name}"), (tmp_path / name).read_text()))
    assert found[0] == found[1]
    text, sites = found[0][0], json.loads(found[0][1])["sites"]
    assert "2 sites, 74 parameters in 2 fragments" in text
    assert "grace=10 s, lease=10 s, quorum=1" in text
    assert [len(site["losses"]) for site in sites] == [12, 12]
    assert max(map(len, text.splitlines())) <= 120


def test_the_picture_has_a_gap_where_a_site_was_away() -> None:
    times, losses = with_gaps([1.0, 2.0, 3.0, 20.0, 21.0], [5.0, 4.0, 3.0, 2.0, 1.0])
    assert [time for time in times if time == time] == [1.0, 2.0, 3.0, 20.0, 21.0]
    assert [index for index, loss in enumerate(losses) if loss != loss] == [3]
    assert with_gaps([1.0], [5.0]) == ([1.0], [5.0])
