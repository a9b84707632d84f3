"""Strangers at the port of a hub are refused, and so are members who ask what is not theirs; the hub serves on."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.hub import (
    ROLES,
    Busy,
    Denied,
    Event,
    HubClient,
    HubUnreachable,
    MailboxError,
    add_keys,
    init_keys,
    key_of,
    revoke_keys,
)
from lightning_sdiloco.hub.keys import MAY, load
from lightning_sdiloco.hub.wire import CHUNK, MAX_MESSAGE, PROTOCOL, pack
from tests.hub.hubs import RUN, Served, put, serving, until

OF_ROLE = {"hub": "second", "site": "site-a", "operator": "boss", "reader": "viewer"}


@pytest.fixture(autouse=True)
def _the_hub_serves_on(served: Served) -> Iterator[None]:
    yield
    site = served.mailbox("site-b")
    assert site.call("ping", body=b"still there?") == ({}, b"still there?")
    assert site.get(put(site, b"still there")) == b"still there"


def grpc_error(call: Any) -> Any:
    import grpc

    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value


def ping(channel: Any, message: bytes | None = None) -> Any:
    who = {"run": RUN, "role": "site", "name": "site-a", "life": "1", "protocol": PROTOCOL}
    message = pack({"from": who, "call": "ping"}) if message is None else message
    return channel.unary_unary("/sdiloco.Hub/call")(message, timeout=5)


# Strangers


def test_without_tls(served: Served) -> None:
    with pytest.warns(UserWarning, match="insecure=True"):
        stranger = served.mailbox("site-a", keys=None, insecure=True)
    with pytest.raises(HubUnreachable):
        stranger.call("ping")


def test_without_a_certificate(served: Served, keys: Path) -> None:
    import grpc

    credentials = grpc.ssl_channel_credentials(load(keys, "site-a").authority)
    name = ssl_name(keys)
    with grpc.secure_channel(f"127.0.0.1:{served.port}", credentials, [name]) as channel:
        assert grpc_error(lambda: ping(channel)).code().name == "UNAVAILABLE"


def ssl_name(keys: Path) -> tuple[str, str]:
    from lightning_sdiloco.hub.keys import host_of

    return ("grpc.ssl_target_name_override", host_of(RUN))


def test_with_the_certificate_of_another_authority(served: Served, tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", RUN)
    add_keys(tmp_path / "keys", "site-a")
    stranger = served.mailbox("site-a", keys=tmp_path / "keys")
    with pytest.raises(HubUnreachable, match="same authority"):
        stranger.call("ping")


def test_with_the_right_authority_and_a_certificate_of_another(served: Served, keys: Path, tmp_path: Path) -> None:
    """A stranger that does not mind whom it speaks to."""
    import grpc

    init_keys(tmp_path / "keys", RUN)
    own = load(add_keys(tmp_path / "keys", "site-a"))
    credentials = grpc.ssl_channel_credentials(load(keys, "site-a").authority, own.key, own.certificate)
    with grpc.secure_channel(f"127.0.0.1:{served.port}", credentials, [ssl_name(keys)]) as channel:
        assert grpc_error(lambda: ping(channel)).code().name == "UNAVAILABLE"


def test_with_an_expired_certificate(served: Served, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime

    import lightning_sdiloco.hub.keys as module

    expired = add_keys(keys, "forgotten", days=-1)

    class Earlier(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) - datetime.timedelta(days=2)

    # Its own look at the date would refuse it before it comes to the hub.
    monkeypatch.setattr(module.datetime, "datetime", Earlier)
    stranger = served.mailbox("forgotten", keys=expired)
    monkeypatch.undo()
    with pytest.raises(HubUnreachable):
        stranger.call("ping")


def test_with_garbage(served: Served) -> None:
    words = [b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b""]
    for number in range(200):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as stranger:
            stranger.sendall(words[number % len(words)] + os.urandom(number * 20))


def test_with_garbage_behind_a_certificate(served: Served, keys: Path) -> None:
    import grpc

    own = load(keys, "site-a")
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    with grpc.secure_channel(f"127.0.0.1:{served.port}", credentials, [ssl_name(keys)]) as channel:
        for number in range(50):
            error = grpc_error(lambda number=number: ping(channel, os.urandom(number)))
            assert error.code().name == "INVALID_ARGUMENT"
        for header in ({}, {"from": 1}, {"from": {"run": RUN}}, {"from": {"run": 1, "role": 2, "name": 3, "life": 4}}):
            assert grpc_error(lambda header=header: ping(channel, pack(header))).code().name == "INVALID_ARGUMENT"
        # Refused by its length, before memory is taken.
        error = grpc_error(lambda: ping(channel, bytes(MAX_MESSAGE + 1)))
        assert error.code().name == "RESOURCE_EXHAUSTED"
        empty = channel.stream_unary("/sdiloco.Hub/put")
        assert grpc_error(lambda: empty(iter([]), timeout=5)).code().name == "INVALID_ARGUMENT"


def test_a_hub_of_another_authority_is_refused_by_the_site(served: Served, tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", RUN)
    with serving(tmp_path, tmp_path / "keys") as false, pytest.raises(HubUnreachable, match="same authority"):
        served.mailbox("site-a", port=false.port).send(b"secret")


def test_a_site_cannot_pass_for_the_hub(served: Served, keys: Path) -> None:
    import grpc

    own = load(keys, "site-b")
    server = grpc.server(None)
    pair = [(own.key, own.certificate)]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, own.authority, True))
    server.start()
    with pytest.raises(HubUnreachable):
        served.mailbox("site-a", port=port).call("ping")
    server.stop(None).wait()


# Members


def claiming(served: Served, member: str, **other: str) -> HubClient:
    """A member that claims what its certificate does not say."""
    mailbox = served.mailbox(member)
    mailbox.identity = mailbox.identity._replace(**other)
    return mailbox


@pytest.mark.parametrize("other", [{"name": "site-b"}, {"role": "operator"}, {"name": "boss", "role": "operator"}])
def test_a_site_does_not_speak_for_another(served: Served, other: dict[str, str]) -> None:
    with pytest.raises(Denied, match="certificate of site 'site-a' does not speak for"):
        claiming(served, "site-a", **other).call("ping")


def test_nor_in_what_it_says(served: Served) -> None:
    site, about = served.mailbox("site-a"), {"site": "site-b"}
    for say in (
        lambda: site.send(b"payload", about),
        lambda: site.call("contribute", about),
        lambda: next(site.events(lambda: about)),
    ):
        with pytest.raises(Denied, match="site 'site-a' does not speak for 'site-b'"):
            say()


def test_nor_in_its_signs_of_life(served: Served) -> None:
    site = served.mailbox("site-a")
    with pytest.raises(Denied, match="site 'site-a' does not speak for 'site-b'"):
        list(site.events(dict, lambda: {"site": "site-b"}))


def test_another_run(served: Served, keys: Path, tmp_path: Path) -> None:
    with pytest.raises(Denied, match="serves run 'run-1', and not 'run-2'"):
        claiming(served, "site-a", run="run-2").call("ping")
    # The same authority, and a certificate for another run.
    other = tmp_path / "keys"
    other.mkdir()
    for name in ("ca.key", "ca.pem"):
        (other / name).write_bytes((keys / name).read_bytes())
    (other / "run").write_text("run-2\n")
    add_keys(other, "site-a")
    from lightning_sdiloco.hub import client

    with pytest.MonkeyPatch.context() as patch:
        # It would look for the hub of its own run, and not find it.
        patch.setattr(client, "host_of", lambda run: ssl_name(keys)[1])
        stranger = HubClient(f"127.0.0.1:{served.port}", "run-2", "site-a", keys=other)
    served.mailboxes.append(stranger)
    stranger.identity = stranger.identity._replace(run=RUN)
    with pytest.raises(Denied, match="certificate is for run 'run-2'"):
        stranger.call("ping")


def test_a_revoked_certificate(served: Served, keys: Path) -> None:
    add_keys(keys, "leaver")
    leaver = served.mailbox("leaver")
    leaver.call("ping")
    revoke_keys(keys, "leaver")
    with pytest.raises(Denied, match="has been revoked"):
        leaver.call("ping")


def test_an_older_version(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    site = served.mailbox("site-a")
    monkeypatch.setattr("lightning_sdiloco.hub.client.PROTOCOL", 0)
    with pytest.raises(Refused, match="update the older side"):
        site.call("ping")


def ask(served: Served, role: str, call: str) -> None:
    mailbox = served.mailbox(OF_ROLE[role])
    if call == "put":
        mailbox.send(b"blob")
    elif call == "get":
        mailbox.get(served.store.put(b"blob"))
    elif call == "watch":
        assert next(mailbox.events(dict)).kind == "welcome"
    else:
        mailbox.call(call)


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_call_what_the_table_says_and_nothing_else(served: Served, role: str) -> None:
    for call in MAY:
        if role in MAY[call]:
            ask(served, role, call)
        else:
            with pytest.raises(Denied, match=f"a {role} may not call {call}"):
                ask(served, role, call)
    with pytest.raises(Denied, match="may not call shutdown"):
        served.mailbox(OF_ROLE[role]).call("shutdown")


# What is announced is checked before it is taken


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"size": 1 << 60}, "too large"),
        ({"size": -1}, "whole number"),
        ({"size": "7"}, "whole number"),
        ({"key": "../../../etc/passwd"}, "no key"),
        ({"about": [1]}, "JSON object"),
    ],
)
def test_a_blob_is_refused_by_what_is_announced(served: Served, wrong: dict[str, Any], told: str) -> None:
    site = served.mailbox("site-a")
    header = site._header({}) | {"key": key_of(b"payload"), "size": 7} | wrong
    with pytest.raises(Refused, match=told):
        site._sent(header, memoryview(b"payload"), 5)
    assert not os.listdir(Path(served.store.url) / "incomplete")


@pytest.mark.parametrize("pieces", [[b""], [bytes(CHUNK)] * 3, [bytes(CHUNK + 9)]])
def test_pieces_that_are_none_of_a_blob_are_refused(served: Served, pieces: list[bytes]) -> None:
    site = served.mailbox("site-a")
    header = site._header({}) | {"key": key_of(os.urandom(8)), "size": CHUNK + 8}
    call = site._method("stream_unary", "put")
    error = grpc_error(lambda: call(iter([pack(header), *pieces]), timeout=5))
    assert error.code().name == "INVALID_ARGUMENT"


def test_other_bytes_than_announced_are_refused(served: Served) -> None:
    site = served.mailbox("site-a")
    announced = bytes(3 * CHUNK)
    header = site._header({}) | {"key": key_of(announced), "size": len(announced)}
    flipped = bytearray(announced)
    flipped[CHUNK] ^= 1
    with pytest.raises(MailboxError, match="not those that were announced"):
        site._sent(header, memoryview(flipped), 10)
    with pytest.raises(MailboxError):
        site.get(key_of(announced))


# Lives


@pytest.fixture
def ruled(keys: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, keys) as served:
        yield served


def test_a_contribution_that_is_sent_again_is_known(ruled: Served) -> None:
    site, again = ruled.mailbox("site-a"), ruled.mailbox("site-a")
    assert site.send(b"payload", {"site": "site-a", "round": 1}) == {"said": "open"}
    assert again.send(b"payload", {"site": "site-a", "round": 1}) == {"said": "known"}
    assert ruled.handler.taken == [("site-a", key_of(b"payload"))]
    with pytest.raises(Refused, match="another size"):
        site.send(b"payload", {"size": 8})


def test_an_earlier_life_of_a_site_is_refused(ruled: Served) -> None:
    earlier, later = ruled.mailbox("site-a"), ruled.mailbox("site-a")
    first = earlier.events(dict)
    assert next(first) == Event("welcome", {"to": "site-a"})
    second = later.events(dict)
    next(second)
    with pytest.raises(Refused, match="watches from elsewhere"):
        list(first)
    with pytest.raises(Busy, match="in use by a living process"):
        earlier.send(b"from the grave")
    assert later.send(b"alive") == {"said": "open"}
    # Nobody took the place of the later one.
    assert not [seen for seen in ruled.handler.seen if seen == f"gone site-a {earlier.life[:2]}"]
    later.close()
    until(lambda: f"gone site-a {later.life[:2]}" in ruled.handler.seen)


def test_who_is_not_let_in_was_not_there(ruled: Served) -> None:
    with pytest.raises(Refused, match="another charter"):
        next(ruled.mailbox("site-a").events(lambda: {"refused": True}))
    with pytest.raises(Malformed):
        next(ruled.mailbox("site-a").events(lambda: [1]))  # type: ignore[arg-type,return-value]
    assert ruled.handler.seen == []


def test_events_reach_all_or_those_named(ruled: Served) -> None:
    watching = {name: ruled.mailbox(name).events(dict) for name in ("site-a", "site-b", "viewer")}
    for name, events in watching.items():
        assert next(events) == Event("welcome", {"to": name})
    ruled.handler.push(Event("call", {"round": 3}), to=["site-b"])
    ruled.handler.push(Event("payload", {"round": 3}, b"bytes"))
    assert next(watching["site-b"]) == Event("call", {"round": 3})
    for events in watching.values():
        assert next(events) == Event("payload", {"round": 3}, b"bytes")
    until(lambda: "beat site-a" in ruled.handler.seen)
