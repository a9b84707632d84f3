"""The doctor: how it learns its rank, what it reports, and that it runs where training would."""

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
    ({}, None, "The rank of this process is unknown"),
    ({**BY_HAND, "NODE_RANK": "one"}, 2, "NODE_RANK='one' is not a number"),
    ({"NODE_RANK": "0", "MASTER_PORT": "1"}, 2, "MASTER_ADDR is not set"),
    ({**TORCHRUN, "MASTER_PORT": ""}, None, "MASTER_PORT='' is not a number"),
    ({**SRUN, "SLURM_JOB_NAME": "interactive"}, None, "The rank of this process is unknown"),
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
    def warned(store_is_lent: str, restarts: str, rank: int) -> bool:
        values = {
            "TORCHELASTIC_USE_AGENT_STORE": store_is_lent,
            "TORCHELASTIC_MAX_RESTARTS": restarts,
        }
        with patch.dict(os.environ, values, clear=True):
            warn_of_shared_store(rank)
        return bool(caplog.text)

    assert not warned("True", restarts="0", rank=0)
    assert not warned("False", restarts="3", rank=0)
    assert not warned("True", restarts="3", rank=1)
    assert warned("True", restarts="3", rank=0)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text


TCP = {
    "congestion_control": "bbr",
    "send_buffer": 1 << 28,
    "receive_buffer": 1 << 28,
    "slow_start_after_idle": False,
}


def seen(**choices: Any) -> Examined:
    """Four ranks on two hosts with nothing to complain of, but for the choices; those about a
    machine are of rank 2.
    """
    addresses = ("10.0.0.1", 1), ("10.0.0.1", 2)
    machine = {
        **describe(),
        "device": "CPU",
        "cores": 4,
        "files": 100_000,
        "variables": {"OMP_NUM_THREADS": "2"},
        "tcp": TCP,
    }
    of_rank_2 = {name: choices.pop(name) for name in machine.keys() & choices.keys()}
    examined = {
        "groups": 2,
        "endpoints": [
            Endpoints(f"host{rank // 2}", rank // 2, "", *addresses) for rank in range(4)
        ],
        "machines": [machine, machine, {**machine, **of_rank_2}, machine],
        "broken": [],
        "links": [MeasuredLink(0, 1, 0.05, 1e8), MeasuredLink(1, 0, 0.05, 9e7)],
    }
    return Examined(**{**examined, **choices})


SMALL_BUFFER = {**TCP, "receive_buffer": 1_000_000}
SLOW_START = {**TCP, "slow_start_after_idle": True}
OLD_TORCH = {**describe()["versions"], "torch": "1.0"}
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1"}
ONE_SLOW_DIRECTION = [MeasuredLink(0, 1, 0.05, 1e8), MeasuredLink(1, 0, 0.05, 3e7)]
NO_LINK = [MeasuredLink(0, 1, error="no answer")]
UNREACHABLE = [BrokenConnection(0, 2, "10.0.0.3:4", "no answer within 10 s")]
# Choices of `seen`; state and check of the finding, and words of the finding and of the fix.
UNWELL: list[tuple[dict[str, Any], str, str, str]] = [
    ({"versions": OLD_TORCH}, "wrong: torch", "1.0 on rank 2", "Install the same version of torch"),
    ({"files": 256}, "wrong: open files", "rank 2 (host1) may open 256", "ulimit -n 288"),
    ({"variables": {}}, "slow: threads", "2 ranks on host1 with 4", "OMP_NUM_THREADS=2"),
    ({"variables": DETAIL}, "slow: debugging", "rank 2", "Leave it out"),
    (
        {"tcp": SMALL_BUFFER},
        "slow: buffers 0 -> 1",
        "to 80 Mbit/s at 50 ms",
        "net.ipv4.tcp_rmem=",
    ),
    (
        {"tcp": SLOW_START},
        "slow: idle connections",
        "starts slowly",
        "tcp_slow_start_after_idle=0",
    ),
    (
        {"links": ONE_SLOW_DIRECTION},
        "slow: bandwidth 1 -> 0",
        "30 Mbit/s, and 100 Mbit/s in the other",
        "worker group 1 to 0",
    ),
    (
        {"broken": UNREACHABLE, "links": []},
        "wrong: reachability",
        "rank 0 (host0) -> rank 2 (host1) at 10.0.0.3:4: no answer within 10 s",
        "Open all TCP ports",
    ),
    ({"links": NO_LINK}, "wrong: round trip 0 -> 1", "no answer", "again"),
]


def rows_of_page() -> list[list[str]]:
    """The rows of the table in the page; a cell may go over several lines."""
    page = (ROOT / "docs" / "launching.md").read_text()
    rows: list[list[str]] = []
    for line in re.findall("^│(.*)│$", page, re.M):
        cells = [cell.strip() for cell in line.split("│")]
        if cells[0]:
            rows.append(cells)
        else:
            lines = zip(rows[-1], cells, strict=True)
            rows[-1] = [" ".join(filter(None, lines_of_cell)) for lines_of_cell in lines]
    return rows


def test_the_page_shows_the_table_of_such_a_link() -> None:
    endpoints = [endpoint._replace(host=f"n{endpoint.group}") for endpoint in seen().endpoints]
    links = [MeasuredLink(0, 1, 0.0562, 95.6e6), MeasuredLink(1, 0, 0.0562, 22.8e6)]
    examined = seen(endpoints=endpoints, links=links, tcp=SLOW_START)
    table = [list(finding) for finding in findings(examined)]
    rows = rows_of_page()
    assert len(rows) == 4
    assert [row for row in rows if row not in table] == []


def test_sound_parts_are_reported_without_a_remedy() -> None:
    reported = {}
    for finding in findings(seen()):
        assert finding.state == "ok"
        assert not finding.fix
        reported[finding.check] = finding.found
    well = {
        "ranks": "4 on 2 hosts (host0, host1), in 2 worker groups of 2",
        "round trip 0 -> 1": "50 ms",
        "bandwidth 0 -> 1": "100 Mbit/s",
        "bandwidth 1 -> 0": "90 Mbit/s",
        "reachability": "all 12 connections between ranks can be made",
    }
    assert well.items() <= reported.items()
    assert len(reported) == len(findings(seen()))


def test_faults_and_slow_parts_are_reported_with_a_remedy() -> None:
    for choices, check, words, fix in UNWELL:
        (finding,) = (finding for finding in findings(seen(**choices)) if finding.state != "ok")
        assert f"{finding.state}: {finding.check}" == check
        assert words in finding.found
        assert fix in finding.fix


def doctored(rank: int, world_size: int, *arguments: str) -> Ran:
    return ran("doctor", "--seconds=0.2", *arguments)


def test_rank_0_prints_one_table() -> None:
    (table, _, code), *others_printed = run_processes(doctored, 4, "--worker-groups=2")
    assert code == 0
    assert others_printed == [("", "", 0)] * 3
    assert table.count("sdiloco doctor") == 1
    for check in (
        "reachability",
        "round trip 0 -> 1",
        "bandwidth 0 -> 1",
        "bandwidth 1 -> 0",
        "torch",
    ):
        assert check in table


def test_a_rank_that_nobody_reaches_is_reported() -> None:
    def doctored_behind_a_closed_port(rank: int, world_size: int) -> Ran:
        listen = reachability.Listener.__init__

        def then_close(self: Any, *args: Any) -> None:
            listen(self, *args)
            self.close()

        if rank == 1:
            reachability.Listener.__init__ = then_close
        return doctored(rank, world_size, "--json")

    first, second = run_processes(doctored_behind_a_closed_port, 2)
    assert second == ("", "", 0)
    assert first.code == 1
    answer = json.loads(first.out)
    assert answer["ok"] is False
    (connection,) = answer["unreachable"]
    assert (connection["source"], connection["target"]) == (0, 1)
    assert [rank["worker_group"] for rank in answer["ranks"]] == [0, 1]


def test_rank_0_says_for_whom_it_waits_and_names_an_absent_rank() -> None:
    def doctored_without_rank_1(rank: int, world_size: int) -> Ran | None:
        return doctored(0, 2, "--wait=1") if rank == 0 else None

    printed, _ = run_processes(doctored_without_rank_1, 2)
    assert printed.code == 2
    assert "Waiting at 127.0.0.1:" in printed.err
    assert "Rank 1 did not connect to 127.0.0.1:" in printed.err


def test_a_server_that_is_no_store_is_reported() -> None:
    def doctored_elsewhere(rank: int, world_size: int, port: int) -> Ran:
        os.environ["MASTER_PORT"] = str(port)
        return doctored(rank, world_size, "--wait=600")

    with listening("http") as port:
        for printed in run_processes(doctored_elsewhere, 2, port, timeout=30):
            assert printed.code == 2
            assert f"127.0.0.1:{port} responds, but is not a torch TCPStore" in printed.err
