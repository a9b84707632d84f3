"""Ranks that cannot reach each other are named before training starts, and interfaces can be chosen."""

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_sdiloco.launch import interfaces as addresses
from lightning_sdiloco.launch import reachability
from lightning_sdiloco.launch.reachability import BrokenConnection, Endpoints, described, require_reachable
from lightning_sdiloco.launch.rendezvous import rendezvous_at, wait_for_store
from tests.fits import fit
from tests.namespaces import add_interface, enter, lose_packets, two_sites
from tests.ranks import run_processes
from tests.strangers import listening

CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "fragments": [["*"]], "compression": "fp4"}
SECONDS = timedelta(seconds=20)


def loopback() -> str:
    return "127.0.0.1"


def rendezvous_of(rank: int, world_size: int, timeout: timedelta = SECONDS) -> Any:
    return rendezvous_at("127.0.0.1", int(os.environ["MASTER_PORT"]), rank, world_size, timeout)


# Rendezvous


def test_every_rank_hears_what_all_tell() -> None:
    def run(rank: int, world_size: int) -> Any:
        return rendezvous_of(rank, world_size).all_gather("names", {"rank": rank})

    assert run_processes(run, 3) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_ranks_that_do_not_come_are_named() -> None:
    def run(rank: int, world_size: int) -> str:
        if rank == 2:
            return ""
        rendezvous = rendezvous_of(rank, world_size, timedelta(seconds=3))
        with pytest.raises(ValueError, match="Rank 2 did not come to 127.0.0.1:.* within 3 s") as error:
            rendezvous.all_gather("places", None)
        time.sleep(3)  # The store ends with rank 0.
        return str(error.value)

    assert all("3 ranks are expected" in text for text in run_processes(run, 3)[:2])


def test_an_address_that_does_not_answer_is_given_up_long_before_the_timeout() -> None:
    with pytest.raises(ValueError, match="Rank 3 on .* cannot reach rank 0 at no-such-host.invalid:29500") as error:
        wait_for_store("no-such-host.invalid", 29500, 3, timedelta(hours=1), patience=0.5)
    assert "MASTER_ADDR" in str(error.value)


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_that_is_not_up_yet_is_waited_for(use_libuv: bool) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ValueError, match="nobody listened there within 0.6 s"):
            wait_for_store("127.0.0.1", port, 1, timedelta(seconds=0.6), patience=0.1)
    stores: list[Any] = []

    def come_up() -> None:
        stores.append(
            TCPStore("127.0.0.1", port, is_master=True, timeout=SECONDS, wait_for_workers=False, use_libuv=use_libuv)
        )

    later = threading.Timer(0.5, come_up)
    later.start()
    wait_for_store("127.0.0.1", port, 1, timedelta(seconds=10), patience=0.1)
    later.join()
    assert stores[0].num_keys() == 0


@pytest.mark.parametrize(("program", "says"), [("http", "<!DOCTYPE HTML>"), ("ssh", "SSH-2.0-OpenSSH_9.6")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_answers_and_is_no_store_is_named_at_once(rank: int, program: str, says: str) -> None:
    def run(process: int, world_size: int, port: int) -> tuple[str, float]:
        start = time.monotonic()
        with pytest.raises(ValueError, match="MASTER_PORT") as error:
            rendezvous_at("127.0.0.1", port, rank, 2, timedelta(hours=1))
        return str(error.value), time.monotonic() - start

    with listening(program) as port:
        ((text, seconds),) = run_processes(run, 1, port)
    assert f"Rank {rank} on {socket.gethostname()}" in text
    assert f"127.0.0.1:{port} answers, but is no torch TCPStore (" in text
    assert says in text
    assert "another program listens there" in text
    assert seconds < 5


@pytest.mark.parametrize("program", ["silent", "closing"])
def test_a_program_that_says_nothing_is_named_as_soon_as_an_address_that_gives_no_answer(program: str) -> None:
    with listening(program) as port, pytest.raises(ValueError, match="no torch TCPStore .it says nothing") as error:
        wait_for_store("127.0.0.1", port, 1, timedelta(hours=1), patience=0.5)
    assert f"127.0.0.1:{port} answers" in str(error.value)


@pytest.mark.parametrize(
    ("program", "told"),
    [("store", "is taken by another training"), ("silent", "answers, but is no torch TCPStore (it says nothing)")],
)
def test_rank_0_names_the_address_if_it_cannot_keep_the_store_there(program: str, told: str) -> None:
    def run(rank: int, world_size: int, port: int) -> str:
        with pytest.raises(ValueError, match="Rank 0 on .* cannot keep the store") as error:
            rendezvous_at("127.0.0.1", port, 0, 2, timedelta(hours=1))
        return str(error.value)

    with listening(program) as port:
        (text,) = run_processes(run, 1, port)
    assert f"127.0.0.1:{port} {told}" in text
    assert "Choose another MASTER_PORT" in text


# Reaching


def test_ranks_that_reach_each_other_are_let_through() -> None:
    def run(rank: int, world_size: int) -> None:
        require_reachable(rendezvous_of(rank, world_size), rank // 2, loopback, loopback)

    run_processes(run, 4)


def test_a_rank_that_cannot_be_reached_is_named_on_all_ranks_with_address_and_direction() -> None:
    def run(rank: int, world_size: int) -> str:
        if rank == 2:
            # Its port is closed; it reaches the others.
            listen = reachability.Listener.__init__

            def then_close(self: Any, *args: Any) -> None:
                listen(self, *args)
                self.close()

            reachability.Listener.__init__ = then_close  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="2 of 6 connections") as error:
            require_reachable(rendezvous_of(rank, world_size), rank, loopback, loopback)
        return str(error.value)

    texts = run_processes(run, 3)
    assert len(set(texts)) == 1
    host = socket.gethostname()
    assert f"rank 0 (worker group 0, {host}) -> rank 2 (worker group 2, {host}) at 127.0.0.1:" in texts[0]
    assert texts[0].count("connection refused; the other direction works") == 2


def test_a_rank_that_cannot_listen_is_named_on_all_ranks() -> None:
    def run(rank: int, world_size: int) -> str:
        if rank == 1:
            os.environ["SDILOCO_EXCHANGE_INTERFACE"] = "no-such"
        with pytest.raises(ValueError, match="1 ranks cannot listen") as error:
            require_reachable(rendezvous_of(rank, world_size), rank, addresses.exchange_address, loopback)
        return str(error.value)

    for text in run_processes(run, 2):
        assert "rank 1 on" in text
        assert "SDILOCO_EXCHANGE_INTERFACE='no-such' is no interface" in text
        assert "lo (127.0.0.1)" in text


def test_an_address_of_the_loopback_is_explained() -> None:
    endpoints = [
        Endpoints("a", 0, "", ("10.0.0.1", 1), ("10.0.0.1", 1)),
        Endpoints("b", 1, "", ("127.0.1.1", 2), ("", 0)),
    ]
    text = described([BrokenConnection(0, 1, "127.0.1.1:2", "connection refused")], endpoints)
    assert "Rank 1 listens on a loopback address" in text
    assert "GLOO_SOCKET_IFNAME" in text


# Addresses


def test_the_exchange_may_have_an_interface_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setenv("SDILOCO_EXCHANGE_INTERFACE", "127.0.0.1")
    assert addresses.exchange_address() == "127.0.0.1"
    with addresses.for_exchange():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME='eth9' is no interface"):
        addresses.group_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with addresses.for_exchange():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


# Between machines


def trained(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    nodes = {"num_nodes": 2, "devices": world_size // 2}
    return dict(fit(rank, world_size, 2, 10, CHOICES, trainer_choices=nodes)["outer"])


@pytest.mark.network
def test_groups_train_within_one_network_and_exchange_over_another() -> None:
    """Inside a group gloo listens on the loopback, where no other group could reach it."""
    with two_sites() as sites:

        def run(rank: int, world_size: int, exchange: str | None) -> Any:
            enter(sites[2 * rank // world_size])
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            if exchange is None:
                with pytest.raises(ValueError, match="listens on a loopback address"):
                    trained(rank, world_size)
                return None
            os.environ["SDILOCO_EXCHANGE_INTERFACE"] = exchange
            return trained(rank, world_size)

        run_processes(run, 4, None, ranks_per_node=2)
        ranks = run_processes(run, 4, "wire", ranks_per_node=2)
    for outer in ranks[1:]:
        assert all(torch.equal(values, outer[name]) for name, values in ranks[0].items())


@pytest.mark.network
@pytest.mark.parametrize("lost", [True, False])
def test_one_closed_direction_between_machines_is_told_within_a_minute(lost: bool) -> None:
    with two_sites() as sites:
        add_interface(sites[1], "other", "10.80.0.2")
        if lost:
            lose_packets(sites[0], "10.80.0.2")

        def run(rank: int, world_size: int) -> Any:
            enter(sites[rank])
            if rank == 1:
                os.environ["SDILOCO_EXCHANGE_INTERFACE"] = "other"
            start = time.monotonic()
            with pytest.raises(ValueError, match="1 of 2 connections") as error:
                trained(rank, world_size)
            return str(error.value), time.monotonic() - start

        ranks = run_processes(run, 2, ranks_per_node=1)
    for text, seconds in ranks:
        assert seconds < 60
        assert "rank 0 (worker group 0, " in text
        assert " -> rank 1 (worker group 1, " in text
        assert " at 10.80.0.2:" in text
        assert ("no answer within 10 s" if lost else "network is unreachable") in text
        assert "the other direction works" in text


@pytest.mark.network
def test_a_store_that_cannot_be_reached_is_told_within_a_minute() -> None:
    with two_sites() as sites:
        lose_packets(sites[1], "10.80.0.1")

        def run(rank: int, world_size: int) -> Any:
            if rank == 0:
                return None
            enter(sites[1])
            os.environ["MASTER_ADDR"] = "10.80.0.1"
            start = time.monotonic()
            with pytest.raises(ValueError, match="cannot reach rank 0 at 10.80.0.1:.*: no answer"):
                trained(rank, world_size)
            return time.monotonic() - start

        assert run_processes(run, 2, ranks_per_node=1)[1] < 60


@pytest.mark.network
def test_rank_0_is_told_if_the_address_of_the_store_is_that_of_another_machine() -> None:
    with two_sites() as sites:

        def run(rank: int, world_size: int) -> Any:
            enter(sites[0])
            with pytest.raises(ValueError, match="Rank 0 on .* cannot reach rank 0 at 10.79.0.2:29500") as error:
                rendezvous_at("10.79.0.2", 29500, 0, 2, timedelta(seconds=2))
            return str(error.value)

        (text,) = run_processes(run, 1, timeout=30)
    assert "MASTER_ADDR" in text
