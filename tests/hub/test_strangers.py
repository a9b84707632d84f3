"""Strangers at the port of a hub are refused, and so are members who ask what is not theirs; the hub serves on."""

import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation import (
    ROLES,
    Busy,
    Denied,
    Event,
    HubClient,
    HubError,
    HubUnreachable,
    add_keys,
    client,
    init_keys,
    key_of,
    revoke_keys,
)
from lightning_sdiloco.federation import keys as keys_module
from lightning_sdiloco.federation.keys import MAY, host_of, load
from lightning_sdiloco.federation.wire import CHUNK, MAX_MESSAGE, PROTOCOL, pack
from tests.hub.hubs import RUN, Served, put, serving, until

OF_ROLE = {"hub": "second", "site": "site-a", "operator": "boss", "reader": "viewer"}


@pytest.fixture(autouse=True)
def _the_hub_serves_on(served: Served) -> Iterator[None]:
    yield
    site = served.mailbox("site-b")
    assert site.call("ping", body=b"still there?") == ({}, b"still there?")
    assert site.get(put(site, b"still there")) == b"still there"


def refusal(call: Any) -> str:
    """The status with which gRPC ends a call."""
    import grpc

    with pytest.raises(grpc.RpcError) as raised:
        call()
    return str(raised.value.code().name)


def channel_to(port: int, authority: bytes, *own: bytes) -> Any:
    """A channel of a stranger that does not mind whom it speaks to."""
    import grpc

    credentials = grpc.ssl_channel_credentials(authority, *own)
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.ssl_target_name_override", host_of(RUN))])


def ping(channel: Any, message: bytes | None = None) -> Any:
    who = {"run": RUN, "role": "site", "name": "site-a", "life": "1", "protocol": PROTOCOL}
    message = pack({"from": who, "call": "ping"}) if message is None else message
    return channel.unary_unary("/sdiloco.Hub/call")(message, timeout=5)


# Strangers


def test_who_has_no_certificate_of_the_authority_is_no_member(
    served: Served, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="insecure=True"):
        without_tls = served.mailbox("site-a", keys=None, insecure=True)
    init_keys(tmp_path / "keys", RUN)
    other = add_keys(tmp_path / "keys", "site-a")
    expired = add_keys(keys, "forgotten", days=-1)

    class Earlier(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) - datetime.timedelta(days=2)

    with monkeypatch.context() as patch:
        # Its own look at the date would refuse it before it comes to the hub.
        patch.setattr(keys_module.datetime, "datetime", Earlier)
        late = served.mailbox("forgotten", keys=expired)
    for stranger, told in (
        (without_tls, None),
        (late, None),
        (served.mailbox("site-a", keys=tmp_path / "keys"), "same authority"),
    ):
        with pytest.raises(HubUnreachable, match=told):
            stranger.call("ping")
    authority, own = load(keys, "site-a").authority, load(other)
    for certificate in ((), (own.key, own.certificate)):
        with channel_to(served.port, authority, *certificate) as channel:
            assert refusal(lambda channel=channel: ping(channel)) == "UNAVAILABLE"


def test_a_site_refuses_who_passes_for_the_hub(served: Served, keys: Path, tmp_path: Path) -> None:
    import grpc

    init_keys(tmp_path / "keys", RUN)
    with serving(tmp_path, tmp_path / "keys") as false, pytest.raises(HubUnreachable, match="same authority"):
        served.mailbox("site-a", port=false.port).send(b"secret")
    # A site of the same authority.
    own = load(keys, "site-b")
    server = grpc.server(None)
    credentials = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    with pytest.raises(HubUnreachable):
        served.mailbox("site-a", port=port).call("ping")
    server.stop(None).wait()


def test_garbage(served: Served, keys: Path) -> None:
    words = [b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b""]
    for number in range(200):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as stranger:
            stranger.sendall(words[number % len(words)] + os.urandom(number * 20))
    # Behind a certificate.
    own = load(keys, "site-a")
    headers = ({}, {"from": 1}, {"from": {"run": RUN}}, {"from": {"run": 1, "role": 2, "name": 3, "life": 4}})
    with channel_to(served.port, own.authority, own.key, own.certificate) as channel:
        for message in (*map(os.urandom, range(50)), *map(pack, headers)):
            assert refusal(lambda message=message: ping(channel, message)) == "INVALID_ARGUMENT"
        # Refused by its length, before memory is taken.
        assert refusal(lambda: ping(channel, bytes(MAX_MESSAGE + 1))) == "RESOURCE_EXHAUSTED"
        empty = channel.stream_unary("/sdiloco.Hub/put")
        assert refusal(lambda: empty(iter([]), timeout=5)) == "INVALID_ARGUMENT"


# Members


def claiming(served: Served, member: str, **other: str) -> HubClient:
    """A member that claims what its certificate does not say."""
    mailbox = served.mailbox(member)
    mailbox.identity = mailbox.identity._replace(**other)
    return mailbox


def test_a_site_does_not_speak_for_another(served: Served) -> None:
    for other in ({"name": "site-b"}, {"role": "operator"}, {"name": "boss", "role": "operator"}):
        with pytest.raises(Denied, match="certificate of site 'site-a' does not speak for"):
            claiming(served, "site-a", **other).call("ping")
    # Nor in what it says, nor in its signs of life.
    site, about = served.mailbox("site-a"), {"site": "site-b"}
    for say in (
        lambda: site.send(b"payload", about),
        lambda: site.call("contribute", about),
        lambda: next(site.events(lambda: about)),
        lambda: list(served.mailbox("site-a").events(dict, lambda: about)),
    ):
        with pytest.raises(Denied, match="site 'site-a' does not speak for 'site-b'"):
            say()


def test_another_run_a_revoked_certificate_and_an_older_version(
    served: Served, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Denied, match="serves run 'run-1', and not 'run-2'"):
        claiming(served, "site-a", run="run-2").call("ping")
    # The same authority, and a certificate for another run.
    other = tmp_path / "keys"
    other.mkdir()
    for name in ("ca.key", "ca.pem"):
        (other / name).write_bytes((keys / name).read_bytes())
    (other / "run").write_text("run-2\n")
    add_keys(other, "site-a")
    with monkeypatch.context() as patch:
        # It would look for the hub of its own run, and not find it.
        patch.setattr(client, "host_of", lambda run: host_of(RUN))
        stranger = HubClient(f"127.0.0.1:{served.port}", "run-2", "site-a", keys=other)
    served.mailboxes.append(stranger)
    stranger.identity = stranger.identity._replace(run=RUN)
    with pytest.raises(Denied, match="certificate is for run 'run-2'"):
        stranger.call("ping")
    add_keys(keys, "leaver")
    leaver = served.mailbox("leaver")
    leaver.call("ping")
    revoke_keys(keys, "leaver")
    with pytest.raises(Denied, match="has been revoked"):
        leaver.call("ping")
    with monkeypatch.context() as patch:
        patch.setattr(client, "PROTOCOL", 0)
        with pytest.raises(Refused, match="update the older side"):
            served.mailbox("site-a").call("ping")


def test_each_role_may_call_what_the_table_says_and_nothing_else(served: Served) -> None:
    def ask(mailbox: HubClient, call: str) -> None:
        if call == "put":
            mailbox.send(b"blob")
        elif call == "get":
            mailbox.get(served.store.put(b"blob"))
        elif call == "watch":
            assert next(mailbox.events(dict)).kind == "welcome"
        else:
            mailbox.call(call)

    for role in ROLES:
        for call in MAY:
            if role in MAY[call]:
                ask(served.mailbox(OF_ROLE[role]), call)
            else:
                with pytest.raises(Denied, match=f"a {role} may not call {call}"):
                    ask(served.mailbox(OF_ROLE[role]), call)
        with pytest.raises(Denied, match="may not call shutdown"):
            served.mailbox(OF_ROLE[role]).call("shutdown")


# What is announced is checked before it is taken


def test_a_blob_is_refused_by_what_is_announced_and_by_other_bytes_than_that(served: Served) -> None:
    site = served.mailbox("site-a")
    own = site._header({}) | {"key": key_of(b"payload"), "size": 7}
    for wrong, told in (
        ({"size": 1 << 60}, "too large"),
        ({"size": -1}, "whole number"),
        ({"size": "7"}, "whole number"),
        ({"key": "../../../etc/passwd"}, "no key"),
        ({"about": [1]}, "JSON object"),
    ):
        with pytest.raises(Refused, match=told):
            site._sent(own | wrong, memoryview(b"payload"), 5)
        assert not os.listdir(Path(served.store.url) / "incomplete")
    put_call = site._method("stream_unary", "put")
    for pieces in ([b""], [bytes(CHUNK)] * 3, [bytes(CHUNK + 9)]):
        header = site._header({}) | {"key": key_of(os.urandom(8)), "size": CHUNK + 8}
        sent = iter([pack(header), *pieces])
        assert refusal(lambda sent=sent: put_call(sent, timeout=5)) == "INVALID_ARGUMENT"
    announced = bytes(3 * CHUNK)
    flipped = bytearray(announced)
    flipped[CHUNK] ^= 1
    with pytest.raises(HubError, match="not those that were announced"):
        site._sent(site._header({}) | {"key": key_of(announced), "size": len(announced)}, memoryview(flipped), 10)
    with pytest.raises(HubError):
        site.get(key_of(announced))


# Lives


@pytest.fixture
def own(keys: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, keys) as served:
        yield served


def test_an_earlier_life_of_a_site_is_refused_and_who_is_not_let_in_was_not_there(own: Served) -> None:
    with pytest.raises(Refused, match="another charter"):
        next(own.mailbox("site-a").events(lambda: {"refused": True}))
    with pytest.raises(Malformed):
        next(own.mailbox("site-a").events(lambda: [1]))  # type: ignore[arg-type,return-value]
    assert own.handler.seen == []
    earlier, later = own.mailbox("site-a"), own.mailbox("site-a")
    # What is sent again is known.
    for site, said in ((earlier, "open"), (later, "known")):
        assert site.send(b"payload", {"site": "site-a", "round": 1}) == {"said": said}
    assert own.handler.taken == [("site-a", key_of(b"payload"))]
    with pytest.raises(Refused, match="another size"):
        later.send(b"payload", {"size": 8})
    first, second = earlier.events(dict), later.events(dict)
    assert next(first) == next(second) == Event("welcome", {"to": "site-a"})
    with pytest.raises(Refused, match="watches from elsewhere"):
        list(first)
    with pytest.raises(Busy, match="in use by a living process"):
        earlier.send(b"from the grave")
    assert later.send(b"alive") == {"said": "open"}
    # Nobody took the place of the later one.
    assert f"gone site-a {earlier.life[:2]}" not in own.handler.seen
    later.close()
    until(lambda: f"gone site-a {later.life[:2]}" in own.handler.seen)


def test_events_reach_all_or_those_named(own: Served) -> None:
    watching = {name: own.mailbox(name).events(dict) for name in ("site-a", "site-b", "viewer")}
    for name, events in watching.items():
        assert next(events) == Event("welcome", {"to": name})
    own.handler.push(Event("call", {"round": 3}), to=["site-b"])
    own.handler.push(Event("payload", {"round": 3}, b"bytes"))
    assert next(watching["site-b"]) == Event("call", {"round": 3})
    for events in watching.values():
        assert next(events) == Event("payload", {"round": 3}, b"bytes")
    until(lambda: "beat site-a" in own.handler.seen)
