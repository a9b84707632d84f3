"""Ranks that cannot reach each other are named before training starts, and interfaces can be
chosen.
"""

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore, init_process_group

from lightning_sdiloco.launch import reachability, rendezvous
from lightning_sdiloco.launch.reachability import (
    exchange_address,
    for_exchange,
    group_address,
    require_reachable,
)
from lightning_sdiloco.launch.rendezvous import Rendezvous, rendezvous_at, wait_for_store
from tests.fits import assert_same, fit, refusal, said_by
from tests.namespaces import add_interface, enter, lose_packets, two_sites
from tests.ranks import in_ranks, run_processes
from tests.scripts import ROOT
from tests.strangers import listening

HOUR = timedelta(hours=1)
PAGE = (ROOT / "docs" / "launching.md").read_text()


LOOPBACK = "127.0.0.1"


def loopback() -> str:
    return LOOPBACK


def rendezvous_of(rank: int, world_size: int, seconds: float = 20.0) -> Rendezvous:
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return rendezvous_at(address, port, rank, world_size, timedelta(0, seconds))


def refused_listening(kind: Any) -> Any:
    """A constructor of listeners whose port is closed at once."""
    listen = kind.__init__

    def listen_and_close(self: Any, *arguments: Any) -> None:
        listen(self, *arguments)
        self.close()

    return listen_and_close


@in_ranks(3)
def test_ranks_meet_and_unreachable_addresses_are_named_on_all_of_them(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = rendezvous_of(rank, 3)
    host = socket.gethostname()

    def case(name: str) -> Rendezvous:
        """The meeting with other names for what is gathered."""

        def all_gather(topic: str, value: Any) -> list[Any]:
            return list(meeting.all_gather(f"{name} {topic}", value))

        of_case = copy(meeting)
        of_case.all_gather = all_gather
        return of_case

    assert meeting.all_gather("names", {"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    require_reachable(case("well"), rank // 2, loopback, loopback)
    with monkeypatch.context() as patch:
        if rank == 2:  # its port is closed; it reaches the others
            closing = refused_listening(reachability.Listener)
            patch.setattr(reachability.Listener, "__init__", closing)
        message = refusal(require_reachable, case("closed"), rank, loopback, loopback)
    assert message.startswith("2 of 6 connections")
    way = f"rank 0 (worker group 0, {host}) -> rank 2 (worker group 2, {host}) at 127.0.0.1:"
    assert way in message
    assert message.count("connection refused; the other direction works") == 2
    if rank == 1:
        os.environ["SDILOCO_EXCHANGE_INTERFACE"] = "no-such"
    message = refusal(require_reachable, case("deaf"), rank, exchange_address, loopback)
    assert "1 ranks cannot listen" in message
    assert "rank 1 on" in message
    assert "SDILOCO_EXCHANGE_INTERFACE='no-such' is not an interface" in message
    assert "lo (127.0.0.1)" in message
    if rank != 2:
        message = refusal(rendezvous_of(rank, 3, 1.0).all_gather, "places", None)
        words = "Rank 2 did not connect to 127.0.0.1:.* within 1 s .*3 ranks are expected"
        assert re.search(words, message)
        assert "strategy" not in message
    meeting.all_gather("end", None)  # the store ends with rank 0


def test_a_rank_of_another_strategy_is_told_apart_from_one_that_is_late() -> None:
    for ours in (0, 1):
        run_processes(meet_a_rank_of_torch, 2, ours, timeout=60)


def meet_a_rank_of_torch(rank: int, world_size: int, ours: int) -> None:
    if rank == ours:
        meeting = rendezvous_of(rank, world_size, 1.5)
        message = refusal(meeting.all_gather, "places", None)
        assert f"Rank {1 - ours} did not connect to 127.0.0.1:" in message
        assert "Run the same script with the same strategy on all ranks." in message
    else:
        with suppress(RuntimeError):
            init_process_group("gloo", timeout=timedelta(seconds=3))


def store_after(seconds: float, port: int, use_libuv: bool) -> TCPStore:
    time.sleep(seconds)
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=HOUR,
        wait_for_workers=False,
        use_libuv=use_libuv,
    )


def test_a_store_is_awaited_and_a_dead_address_is_given_up_long_before_the_timeout() -> None:
    # As docs/launching.md promises.
    assert rendezvous.SECONDS_UNREACHABLE == 30
    assert reachability.SECONDS == 10
    message = refusal(wait_for_store, "no-such-host.invalid", 29500, 3, HOUR, patience=0.2)
    words = "Rank 3 on .* cannot reach rank 0 at no-such-host.invalid:29500.*MASTER_ADDR"
    assert re.search(words, message)
    for program in ("silent", "closing"):
        with listening(program) as port:
            message = refusal(wait_for_store, LOOPBACK, port, 1, HOUR, patience=0.2)
            words = f"127.0.0.1:{port} responds, but is not a torch TCPStore (it sent no data)"
            assert words in message
    for use_libuv in (True, False):
        with socket.socket() as closed:
            closed.bind((LOOPBACK, 0))
            port = closed.getsockname()[1]
            timeout = timedelta(seconds=0.2)
            message = refusal(wait_for_store, LOOPBACK, port, 1, timeout, patience=0.1)
            assert "no process started listening there within 0.2 s" in message
        with ThreadPoolExecutor(1) as pool:
            store = pool.submit(store_after, 0.3, port, use_libuv)
            wait_for_store(LOOPBACK, port, 1, timedelta(seconds=10), patience=0.1)
            assert store.result().num_keys() == 0


ANOTHER = "is not a torch TCPStore (it sent {}). Another program is listening there"
HTTP = ANOTHER.format("'<!DOCTYPE HTML>'")
SSH = ANOTHER.format("'SSH-2.0-OpenSSH_9.6'")
CANNOT = {0: "cannot host the rendezvous store", 1: "cannot reach rank 0"}


def test_a_program_that_is_no_store_of_this_training_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_SECONDS_PER_ATTEMPT", 0.5)
    host = socket.gethostname()
    for program, rank, words in (
        ("http", 0, HTTP),
        ("http", 1, HTTP),
        ("ssh", 0, SSH),
        ("ssh", 1, SSH),
        ("silent", 0, "responds, but is not a torch TCPStore (it sent no data)"),
        ("store", 0, "is used by another training"),
    ):
        with listening(program) as port:
            began = time.monotonic()
            message = refusal(rendezvous_at, LOOPBACK, port, rank, 2, HOUR)
            assert time.monotonic() - began < 5
        assert message.startswith(f"Rank {rank} on {host} {CANNOT[rank]}")
        assert f"127.0.0.1:{port} " in message
        assert words in message
        assert "Choose a different MASTER_PORT" in message
        assert ("a different NODE_RANK" in message) == (program == "store")


def test_the_page_shows_the_message_for_a_connection_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = [reachability.BrokenConnection(0, 1, "10.80.0.2:44213", "no answer within 10 s")]
    ranks = [reachability.Endpoints(f"node{rank}", rank, "", ("", 0), ("", 0)) for rank in range(2)]
    monkeypatch.setattr(reachability, "find_broken_connections", lambda *_: (ranks, broken))
    message = refusal(require_reachable, None, 0, loopback, loopback)
    lines, advice = message.rsplit("\n", 1)
    first_sentence = advice.partition(". ")[0]
    assert f"ValueError: {lines}\n{first_sentence}. ...\n" in PAGE


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
    broken = reachability.BrokenConnection(0, 1, "127.0.1.1:2", "connection refused")
    advice = reachability.advice([broken])
    assert "Rank 1 listens on a loopback address" in advice
    assert "GLOO_SOCKET_IFNAME" in advice


STARTED_AS = "This node was started as node {}. On every node, set NODE_RANK to the node's number"


def warned_while_waiting(rank: int, **environment: str) -> list[str]:
    """The warnings and the final refusal of a node that is started by hand with this environment,
    if no other node joins.
    """
    assert rendezvous._SECONDS_TO_FIRST_WARNING == 10
    rendezvous._SECONDS_TO_FIRST_WARNING = 0.2
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    messages = said_by("lightning_sdiloco")
    choices = {"timeout": timedelta(seconds=3), "worker_groups": 2}
    nodes = {"num_nodes": 2, "devices": 1}
    message = refusal(fit, rank, 2, 2, 1, choices, trainer_choices=nodes)
    return [*messages, message]


def test_a_waiting_node_names_missing_variables_after_ten_seconds() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        # One has no number and the other no address, so each looks for rank 0 on its own machine.
        if rank == 0:
            return warned_while_waiting(rank)
        return warned_while_waiting(rank, NODE_RANK="1")

    first, second = run_processes(run, 2, ranks_per_node=1)
    for node, warning in enumerate((first[0], second[0])):
        assert STARTED_AS.format(node) in warning
        assert "MASTER_ADDR and MASTER_PORT to the address and port of node 0" in warning
    assert "Still waiting for Rank 1 at 127.0.0.1" in first[0]
    assert "cannot reach rank 0 at 127.0.0.1" in second[0]


@pytest.mark.network
def test_two_nodes_that_are_both_started_as_the_first_get_an_error() -> None:
    def run(rank: int, world_size: int, sites: list[str]) -> list[str]:
        enter(sites[rank])
        time.sleep(rank)
        return warned_while_waiting(0, NODE_RANK="0", MASTER_ADDR="10.79.0.1", MASTER_PORT="29517")

    with two_sites() as sites:
        first, second = run_processes(run, 2, sites, ranks_per_node=1)
    assert second[-1].startswith("Two processes started as rank 0")
    assert "Only one node may have NODE_RANK=0" in second[-1]
    assert (
        "also started as rank 0 and has stopped, because two nodes have the same NODE_RANK"
        in first[-1]
    )


@pytest.mark.network
def test_groups_train_within_one_network_and_exchange_over_another() -> None:
    """Inside a group gloo listens on the loopback, where no other group could reach it."""
    choices = {
        "sync_every": 4,
        "overlap_steps": 1,
        "fragments": [["*"]],
        "compression": "fp4",
    }

    def run(rank: int, world_size: int, sites: list[str], exchange: str) -> dict[str, torch.Tensor]:
        enter(sites[2 * rank // world_size])
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["SDILOCO_EXCHANGE_INTERFACE"] = exchange
        nodes = {"num_nodes": 2, "devices": 2}
        return dict(fit(rank, world_size, 2, 10, choices, trainer_choices=nodes)["outer"])

    with two_sites() as sites:
        messages = run_processes(partial(refusal, run), 4, sites, "", ranks_per_node=2)
        first, *further = run_processes(run, 4, sites, "wire", ranks_per_node=2)
    for message in messages:
        assert "listens on a loopback address" in message
    for outer in further:
        assert_same(outer, first)


def refusal_of_direction(rank: int, world_size: int, sites: list[str]) -> str:
    """The refusal of a rank; the second one exchanges over another interface than the first."""
    enter(sites[rank])
    os.environ["SDILOCO_EXCHANGE_INTERFACE"] = ("", "other")[rank]
    reachability.SECONDS = 1.0
    meeting = rendezvous_of(rank, world_size)
    return refusal(require_reachable, meeting, rank, exchange_address, group_address)


def refusal_of_store(process: int, world_size: int, sites: list[str]) -> str:
    """The refusal of rank 1 on the second machine, and of rank 0 on the first, where the address of
    the store is that of the second.
    """
    enter(sites[1 - process])
    if process == 0:
        return refusal(wait_for_store, "10.80.0.1", 29500, 1, HOUR, patience=1.0)
    return refusal(rendezvous_at, "10.79.0.2", 29500, 0, 2, timedelta(seconds=1))


@pytest.mark.network
def test_a_closed_port_between_machines_is_reported_with_its_direction() -> None:
    with two_sites() as sites:
        add_interface(sites[1], "other", "10.80.0.2")
        unreachable = run_processes(refusal_of_direction, 2, sites)
        lose_packets(sites[0], "10.80.0.2")
        lost = run_processes(refusal_of_direction, 2, sites)
        lose_packets(sites[1], "10.80.0.1")
        unanswered, elsewhere = run_processes(refusal_of_store, 2, sites)
    way = r"1 of 2 connections .*\n.* -> rank 1 \(worker group 1, .* at 10\.80\.0\.2:"
    for messages, reason in (
        (unreachable, "network is unreachable"),
        (lost, "no answer within 1 s"),
    ):
        for message in messages:
            assert re.search(way, message), message
            assert f"{reason}; the other direction works" in message
    assert re.search("cannot reach rank 0 at 10.80.0.1:29500: no answer", unanswered)
    assert re.search("Rank 0 on .* cannot reach rank 0 at 10.79.0.2:29500.*MASTER_ADDR", elsewhere)
