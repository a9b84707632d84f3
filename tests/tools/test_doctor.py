"""The doctor: how it learns its rank, what it finds, and that it runs where training would."""

import json
import os
import re
from typing import Any
from unittest.mock import patch

import pytest

from lightning_sdiloco.launch import reachability
from lightning_sdiloco.launch.reachability import BrokenConnection, Endpoints
from lightning_sdiloco.launch.rendezvous import warn_of_shared_store
from lightning_sdiloco.tools.doctor import (
    Examined,
    Launch,
    MeasuredLink,
    describe,
    detect_launch,
    findings,
)
from tests.ranks import run_processes
from tests.scripts import ROOT
from tests.strangers import listening
from tests.tools.command import Ran, ran

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "4"}
SRUN |= {"SLURM_NODELIST": "gpu[03-05,9],login", "SLURM_JOB_ID": "4711"}
BY_HAND = {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}

LAUNCHED = [
    (TORCHRUN, None, Launch(5, 8, 2, "a", 29500)),
    (SRUN, None, Launch(5, 8, 4, "gpu03", 19711)),
    ({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "1"}, None, Launch(5, 8, 4, "b", 1)),
    ({**SRUN, "SLURM_NODELIST": "n[1]"}, None, Launch(5, 8, 4, "n1", 19711)),
    (BY_HAND, 3, Launch(1, 3, 3, "a", 29500)),
    ({}, None, "does not know its rank"),
    ({**BY_HAND, "NODE_RANK": "one"}, 2, "NODE_RANK='one' is not a number"),
    ({"NODE_RANK": "0", "MASTER_PORT": "1"}, 2, "MASTER_ADDR is not set"),
    ({**TORCHRUN, "MASTER_PORT": ""}, None, "MASTER_PORT='' is not a number"),
    ({**SRUN, "SLURM_JOB_NAME": "interactive"}, None, "does not know its rank"),
]


def test_a_process_learns_its_rank_from_its_launcher_or_gets_advice() -> None:
    for values, num_nodes, launch in LAUNCHED:
        with patch.dict(os.environ, values, clear=True):
            if isinstance(launch, Launch):
                assert detect_launch(num_nodes) == launch
            else:
                with pytest.raises(ValueError, match=launch):
                    detect_launch(num_nodes)


def test_users_of_torchrun_are_told_the_options_for_restarts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for lent, restarts, rank in (
        ("True", "0", 0),
        ("False", "3", 0),
        ("True", "3", 1),
        ("True", "3", 0),
    ):
        assert not caplog.text
        values = {"TORCHELASTIC_USE_AGENT_STORE": lent, "TORCHELASTIC_MAX_RESTARTS": restarts}
        with patch.dict(os.environ, values, clear=True):
            warn_of_shared_store(rank)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text


TCP = {
    "congestion_control": "bbr",
    "send_buffer": 1 << 28,
    "receive_buffer": 1 << 28,
    "slow_start_after_idle": False,
}
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1"}


def seen(**choices: Any) -> Examined:
    """Four ranks on two hosts with nothing to complain of; what a machine has is chosen for that
    of rank 2.
    """
    endpoints = [
        Endpoints(f"host{rank // 2}", rank // 2, "", ("10.0.0.1", 1), ("10.0.0.1", 2))
        for rank in range(4)
    ]
    well = {
        "device": "CPU",
        "cores": 4,
        "files": 100_000,
        "variables": {"OMP_NUM_THREADS": "2"},
        "tcp": TCP,
    }
    links = [MeasuredLink(0, 1, 0.05, 1e8), MeasuredLink(1, 0, 0.05, 9e7)]
    machines = [{**describe(), **well} for _ in endpoints]
    machines[2] |= {name: choices.pop(name) for name in machines[2].keys() & choices.keys()}
    every = {
        "groups": 2,
        "endpoints": endpoints,
        "machines": machines,
        "broken": [],
        "links": links,
    }
    return Examined(**{**every, **choices})


SMALL = {**TCP, "receive_buffer": 1_000_000}
SLOWLY = {**TCP, "slow_start_after_idle": True}
OLDER = {**describe()["versions"], "torch": "1.0"}
HALF = [MeasuredLink(0, 1, 0.05, 1e8), MeasuredLink(1, 0, 0.05, 3e7)]
BETWEEN = "rank 0 (host0) -> rank 2 (host1) at 10.0.0.3:4: no answer within 10 s"
SHUT = [BrokenConnection(0, 2, "10.0.0.3:4", "no answer within 10 s")]
UNWELL: list[tuple[dict[str, Any], str, str, str]] = [
    ({"versions": OLDER}, "wrong: torch", "1.0 on rank 2", "Install the same version of torch"),
    ({"files": 256}, "wrong: open files", "rank 2 (host1) may open 256", "ulimit -n 288"),
    ({"variables": {}}, "slow: threads", "2 ranks on host1 with 4", "OMP_NUM_THREADS=2"),
    ({"variables": DETAIL}, "slow: debugging", "rank 2", "Leave it out"),
    ({"tcp": SMALL}, "slow: buffers 0 -> 1", "below 80 Mbit/s at 50 ms", "net.ipv4.tcp_rmem="),
    ({"tcp": SLOWLY}, "slow: idle connections", "starts slowly", "tcp_slow_start_after_idle=0"),
    (
        {"links": HALF},
        "slow: bandwidth 1 -> 0",
        "30 Mbit/s, and 100 Mbit/s in the other",
        "worker group 1 to 0",
    ),
    ({"broken": SHUT, "links": []}, "wrong: reachability", BETWEEN, "Open all TCP ports"),
    (
        {"links": [MeasuredLink(0, 1, error="no answer")]},
        "wrong: round trip 0 -> 1",
        "no answer",
        "again",
    ),
]


def test_the_page_shows_the_table_of_such_a_link() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    rows: list[list[str]] = []
    for line in re.findall("^│(.*)│$", page, re.M):
        cells = [cell.strip() for cell in line.split("│")]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, both)) for both in zip(rows[-1], cells, strict=True)]
    endpoints = [own._replace(host=f"n{own.group}") for own in seen().endpoints]
    links = [MeasuredLink(0, 1, 0.0562, 95.6e6), MeasuredLink(1, 0, 0.0562, 22.8e6)]
    assert len(rows) == 6
    made = [
        list(finding) for finding in findings(seen(endpoints=endpoints, links=links, tcp=SLOWLY))
    ]
    assert [row for row in rows if row not in made] == []


def test_faults_and_slow_parts_are_reported_with_a_remedy_and_sound_ones_without() -> None:
    told = {
        finding.check: finding.found
        for finding in findings(seen())
        if finding.state == "ok" and not finding.fix
    }
    assert len(told) == len(findings(seen()))
    well = {
        "ranks": "4 on 2 hosts (host0, host1), in 2 worker groups of 2",
        "round trip 0 -> 1": "50 ms",
        "bandwidth 0 -> 1": "100 Mbit/s",
        "bandwidth 1 -> 0": "90 Mbit/s",
        "reachability": "all 12 connections between ranks can be made",
    }
    assert well.items() <= told.items()
    for choices, what, found, fix in UNWELL:
        (finding,) = (one for one in findings(seen(**choices)) if one.state != "ok")
        assert f"{finding.state}: {finding.check}" == what
        assert found in finding.found
        assert fix in finding.fix


def doctored(rank: int, world_size: int, *arguments: str) -> Ran:
    return ran("doctor", "--seconds=0.2", *arguments)


def test_rank_0_prints_one_table() -> None:
    (table, _, code), *others = run_processes(doctored, 4, "--worker-groups=2")
    assert code == 0
    assert others == [("", "", 0)] * 3
    assert table.count("sdiloco doctor") == 1
    for told in (
        "reachability",
        "round trip 0 -> 1",
        "bandwidth 0 -> 1",
        "bandwidth 1 -> 0",
        "torch",
    ):
        assert told in table


def test_obstacles_between_ranks_are_found_and_reported() -> None:
    def unreachable(rank: int, world_size: int) -> Ran:
        listen = reachability.Listener.__init__

        def then_close(self: Any, *args: Any) -> None:
            listen(self, *args)
            self.close()

        if rank == 1:
            reachability.Listener.__init__ = then_close
        return doctored(rank, world_size, "--json")

    (text, _, code), other = run_processes(unreachable, 2)
    told = json.loads(text)
    assert (code, other, told["ok"]) == (1, ("", "", 0), False)
    assert [(connection["source"], connection["target"]) for connection in told["unreachable"]] == [
        (0, 1)
    ]
    assert [rank["worker_group"] for rank in told["ranks"]] == [0, 1]

    absent, _ = run_processes(lambda rank, _: None if rank else doctored(0, 2, "--wait=1"), 2)
    assert absent.code == 2
    assert "Waiting at 127.0.0.1:" in absent.err, "whoever waits is told for what"
    assert "Rank 1 did not come to 127.0.0.1:" in absent.err

    def elsewhere(rank: int, world_size: int, port: int) -> Ran:
        os.environ["MASTER_PORT"] = str(port)
        return doctored(rank, world_size, "--wait=600")

    with listening("http") as port:
        for _, text, code in run_processes(elsewhere, 2, port, timeout=30):
            assert code == 2
            assert f"127.0.0.1:{port} answers, but is not a torch TCPStore" in text
