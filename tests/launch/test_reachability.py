"""Ranks that cannot reach each other are named before training starts, and interfaces can be
chosen.
"""

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_sdiloco.launch import reachability, rendezvous
from lightning_sdiloco.launch.reachability import (
    exchange_address,
    for_exchange,
    group_address,
    require_reachable,
)
from lightning_sdiloco.launch.rendezvous import Rendezvous, rendezvous_at, wait_for_store
from tests.fits import fit, refusal, said_by
from tests.namespaces import add_interface, enter, lose_packets, two_sites
from tests.ranks import in_ranks, run_processes
from tests.scripts import ROOT
from tests.strangers import listening

HOUR = timedelta(hours=1)
PAGE = (ROOT / "docs" / "launching.md").read_text()


def loopback() -> str:
    return "127.0.0.1"


def rendezvous_of(rank: int, world_size: int, seconds: float = 20.0) -> Rendezvous:
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return rendezvous_at(address, port, rank, world_size, timedelta(0, seconds))


@in_ranks(3)
def test_ranks_meet_and_unreachable_addresses_are_named_on_all_of_them(rank: int) -> None:
    met = rendezvous_of(rank, 3)
    host = socket.gethostname()

    def case(name: str) -> Rendezvous:
        own = copy(met)
        own.all_gather = lambda what, value: met.all_gather(f"{name} {what}", value)  # type: ignore[method-assign]
        return own

    assert met.all_gather("names", {"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    require_reachable(case("well"), rank // 2, loopback, loopback)
    with pytest.MonkeyPatch.context() as patch:
        listen = reachability.Listener.__init__
        if rank == 2:  # its port is closed; it reaches the others
            patch.setattr(
                reachability.Listener,
                "__init__",
                lambda self, *its: listen(self, *its) or self.close(),
            )
        closed = refusal(require_reachable, case("closed"), rank, loopback, loopback)
    assert closed.startswith("2 of 6 connections")
    assert (
        f"rank 0 (worker group 0, {host}) -> rank 2 (worker group 2, {host}) at 127.0.0.1:"
        in closed
    )
    assert closed.count("connection refused; the other direction works") == 2
    if rank == 1:
        os.environ["SDILOCO_EXCHANGE_INTERFACE"] = "no-such"
    deaf = refusal(require_reachable, case("deaf"), rank, exchange_address, loopback)
    no_interface = "SDILOCO_EXCHANGE_INTERFACE='no-such' is not an interface"
    for words in ("1 ranks cannot listen", "rank 1 on", no_interface, "lo (127.0.0.1)"):
        assert words in deaf
    if rank != 2:
        absent = refusal(rendezvous_of(rank, 3, 1.0).all_gather, "places", None)
        assert re.search(
            "Rank 2 did not come to 127.0.0.1:.* within 1 s .*3 ranks are expected", absent
        )
    met.all_gather("end", None)  # the store ends with rank 0


def test_a_store_is_awaited_and_a_dead_address_is_given_up_long_before_the_timeout() -> None:
    # What docs/launching.md promises.
    assert (rendezvous.SECONDS_UNREACHABLE, reachability.SECONDS) == (30, 10)
    told = refusal(wait_for_store, "no-such-host.invalid", 29500, 3, HOUR, patience=0.2)
    assert re.search(
        "Rank 3 on .* cannot reach rank 0 at no-such-host.invalid:29500.*MASTER_ADDR", told
    )
    for program in ("silent", "closing"):
        with listening(program) as port:
            told = refusal(wait_for_store, "127.0.0.1", port, 1, HOUR, patience=0.2)
            assert (
                f"127.0.0.1:{port} answers, but is not a torch TCPStore (it says nothing)" in told
            )
    for use_libuv in (True, False):
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
            told = refusal(
                wait_for_store, "127.0.0.1", port, 1, timedelta(seconds=0.2), patience=0.1
            )
            assert "nothing listened there within 0.2 s" in told
        choices = {
            "is_master": True,
            "timeout": HOUR,
            "wait_for_workers": False,
            "use_libuv": use_libuv,
        }
        with ThreadPoolExecutor(1) as pool:
            store = pool.submit(lambda: time.sleep(0.3) or TCPStore("127.0.0.1", port, **choices))  # noqa: B023
            wait_for_store("127.0.0.1", port, 1, timedelta(seconds=10), patience=0.1)
            assert store.result().num_keys() == 0


def test_a_program_that_is_no_store_of_this_training_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_SECONDS_PER_ATTEMPT", 0.5)
    another = "is not a torch TCPStore (it says {}): another program listens there"
    http = another.format("'<!DOCTYPE HTML>'")
    ssh = another.format("'SSH-2.0-OpenSSH_9.6'")
    for program, rank, words in (
        ("http", 0, http),
        ("http", 1, http),
        ("ssh", 0, ssh),
        ("ssh", 1, ssh),
        ("silent", 0, "answers, but is not a torch TCPStore (it says nothing)"),
        ("store", 0, "is taken by another training"),
    ):
        with listening(program) as port:
            began = time.monotonic()
            told = refusal(rendezvous_at, "127.0.0.1", port, rank, 2, HOUR)
            assert time.monotonic() - began < 5
        cannot = f"cannot {'reach rank 0' if rank else 'keep the store'}"
        assert told.startswith(f"Rank {rank} on {socket.gethostname()} {cannot}")
        for text in (f"127.0.0.1:{port} ", words, "Choose another MASTER_PORT"):
            assert text in told
        assert (program == "store") == ("another NODE_RANK" in told)
        if (program, rank) == ("http", 0):
            told = told.replace(f"127.0.0.1:{port}", "node0:8000").replace(
                socket.gethostname(), "node0"
            )
            assert f"ValueError: {told}\n" in PAGE


def test_the_page_shows_the_message_for_a_connection_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = [reachability.BrokenConnection(0, 1, "10.80.0.2:44213", "no answer within 10 s")]
    ranks = [reachability.Endpoints(f"node{rank}", rank, "", ("", 0), ("", 0)) for rank in range(2)]
    monkeypatch.setattr(reachability, "find_broken_connections", lambda *_: (ranks, broken))
    told = refusal(require_reachable, None, 0, loopback, loopback)
    lines, advice = told.rsplit("\n", 1)
    assert f"ValueError: {lines}\n{advice.partition('. ')[0]}. ...\n" in PAGE


def test_the_exchange_may_have_an_interface_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setenv("SDILOCO_EXCHANGE_INTERFACE", "127.0.0.1")
    assert exchange_address() == "127.0.0.1"
    with for_exchange():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"
    assert "GLOO_SOCKET_IFNAME='eth9' is not an interface" in refusal(group_address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with for_exchange():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    text = reachability.advice(
        [reachability.BrokenConnection(0, 1, "127.0.1.1:2", "connection refused")]
    )
    assert "Rank 1 listens on a loopback address" in text
    assert "GLOO_SOCKET_IFNAME" in text


def warned_while_waiting(rank: int, **environment: str) -> list[str]:
    """What is warned of until nobody has come, where a node is started by hand with this
    environment.
    """
    assert rendezvous._SECONDS_TO_FIRST_WARNING == 10
    rendezvous._SECONDS_TO_FIRST_WARNING = 0.2
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    said = said_by("lightning_sdiloco")
    bound = {"timeout": timedelta(seconds=3), "worker_groups": 2}
    told = refusal(fit, rank, 2, 2, 1, bound, trainer_choices={"num_nodes": 2, "devices": 1})
    return [*said, told]


def test_a_waiting_node_names_missing_variables_after_ten_seconds() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        # One has no number and the other no address, so each looks for rank 0 on its own machine.
        return warned_while_waiting(rank, **({"NODE_RANK": "1"} if rank else {}))

    for node, said in enumerate(run_processes(run, 2, ranks_per_node=1)):
        first = said[0]
        assert (
            f"This node was started as node {node}. On every node set NODE_RANK to its number,"
            " from 0" in first
        )
        assert "MASTER_ADDR and MASTER_PORT to those of node 0" in first
        assert (
            "cannot reach rank 0 at 127.0.0.1" if node else "Still waiting for Rank 1 at 127.0.0.1"
        ) in first


@pytest.mark.network
def test_two_nodes_that_are_both_started_as_the_first_get_an_error() -> None:
    def run(rank: int, world_size: int, sites: list[str]) -> list[str]:
        enter(sites[rank])
        time.sleep(rank)
        return warned_while_waiting(0, NODE_RANK="0", MASTER_ADDR="10.79.0.1", MASTER_PORT="29517")

    with two_sites() as sites:
        first, second = run_processes(run, 2, sites, ranks_per_node=1)
    assert second[-1].startswith("There are two ranks 0")
    assert "Only one node may have NODE_RANK=0" in second[-1]
    assert "started as rank 0, too, and has ended: two nodes have one NODE_RANK" in first[-1]


@pytest.mark.network
def test_groups_train_within_one_network_and_exchange_over_another() -> None:
    """Inside a group gloo listens on the loopback, where no other group could reach it."""
    choices: dict[str, Any] = {
        "sync_every": 4,
        "overlap_steps": 1,
        "fragments": [["*"]],
        "compression": "fp4",
    }

    def run(rank: int, world_size: int, sites: list[str], exchange: str) -> dict[str, torch.Tensor]:
        enter(sites[2 * rank // world_size])
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "SDILOCO_EXCHANGE_INTERFACE": exchange}
        return dict(
            fit(rank, world_size, 2, 10, choices, trainer_choices={"num_nodes": 2, "devices": 2})[
                "outer"
            ]
        )

    with two_sites() as sites:
        refused = run_processes(partial(refusal, run), 4, sites, "", ranks_per_node=2)
        outer, *others = run_processes(run, 4, sites, "wire", ranks_per_node=2)
    assert all("listens on a loopback address" in text for text in refused)
    for other in others:
        assert all(torch.equal(values, other[name]) for name, values in outer.items())


@pytest.mark.network
def test_a_closed_port_between_machines_is_reported_with_its_direction() -> None:
    def direction(rank: int, world_size: int, sites: list[str]) -> str:
        enter(sites[rank])
        os.environ["SDILOCO_EXCHANGE_INTERFACE"] = ("", "other")[rank]
        reachability.SECONDS = 1.0
        met = rendezvous_of(rank, world_size)
        return refusal(require_reachable, met, rank, exchange_address, group_address)

    def store(process: int, world_size: int, sites: list[str]) -> list[str]:
        # Rank 1 on the second machine; rank 0 on the first, where the address of the store is the
        # second's.
        enter(sites[1 - process])
        if process == 0:
            return [refusal(wait_for_store, "10.80.0.1", 29500, 1, HOUR, patience=1.0)]
        return [refusal(rendezvous_at, "10.79.0.2", 29500, 0, 2, timedelta(seconds=1))]

    with two_sites() as sites:
        add_interface(sites[1], "other", "10.80.0.2")
        unreachable = run_processes(direction, 2, sites)
        lose_packets(sites[0], "10.80.0.2")
        lost = run_processes(direction, 2, sites)
        lose_packets(sites[1], "10.80.0.1")
        (unanswered,), (elsewhere,) = run_processes(store, 2, sites)
    for texts, why in ((unreachable, "network is unreachable"), (lost, "no answer within 1 s")):
        for text in texts:
            assert re.search(
                r"1 of 2 connections .*\n.* -> rank 1 \(worker group 1, .* at 10\.80\.0\.2:", text
            ), text
            assert f"{why}; the other direction works" in text
    assert re.search("cannot reach rank 0 at 10.80.0.1:29500: no answer", unanswered)
    assert re.search("Rank 0 on .* cannot reach rank 0 at 10.79.0.2:29500.*MASTER_ADDR", elsewhere)
