"""A client of etcd: transactions and leases over its JSON gateway, with the standard library alone.

[Note: why no package] Of what PyPI has over grpcio, etcd3 is of 2020 and does not work with today's protobuf, and the
others are forks of it by one person each, or asynchronous. What is kept well over HTTP (etcd3gw) knows one endpoint,
and leaves transactions to be written as the JSON that they are here. Four calls are needed: a transaction, and to
grant, renew and revoke a lease.
"""

import base64
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_sdiloco.comm.mailbox.base import Bytes, MailboxError, NoSpace

Json = dict[str, Any]

_TIMEOUT = 3.0  # seconds for one endpoint to answer
_PAUSE = 0.2
_LOCAL = ("localhost", "127.0.0.1", "::1")
_FULL = 8  # gRPC's code of what is exhausted
_AGAIN = {1, 2, 4, 14}  # cancelled, unknown, too late, unavailable: nobody knows whether it was done


class EtcdUnreachable(MailboxError):
    """No endpoint of etcd has answered in time. What was asked may have been done."""


class EtcdUrl(NamedTuple):
    """Where etcd is, as in ``etcd://a:2379,b:2379/run?ca=ca.pem&cert=hub.pem&key=hub.key``."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    tls: ssl.SSLContext | None
    ttl: int

    @classmethod
    def parse(cls, url: str, insecure: bool = False) -> "EtcdUrl":
        """Reads a URL."""
        parts = urllib.parse.urlsplit(url)
        options = dict(urllib.parse.parse_qsl(parts.query))
        prefix = parts.path.strip("/")
        # Of several hosts only the last one may be read as an attribute of the parts.
        hosts = [urllib.parse.urlsplit(f"//{host}") for host in parts.netloc.split(",")]
        if parts.scheme != "etcd" or not prefix or not all(host.hostname for host in hosts):
            raise ValueError(f"ledger={url!r} is no ledger in etcd: give etcd://HOST:2379[,HOST:2379]/PREFIX.")
        if unknown := options.keys() - {"ca", "cert", "key", "ttl"}:
            raise ValueError(f"ledger={url!r} has no use for {', '.join(sorted(unknown))}: ca, cert, key and ttl are.")
        if not options.get("ttl", "10").isdecimal() or int(options.get("ttl", "10")) < 1:
            raise ValueError(f"ledger={url!r}: ttl is a whole number of seconds, at least 1.")
        endpoints = tuple((str(host.hostname), host.port or 2379) for host in hosts)
        tls = _tls(url, options)
        if tls is None and not insecure and any(host not in _LOCAL for host, _ in endpoints):
            raise ValueError(
                f"ledger={url!r} is on another machine, where whoever is on the way could write records. Give the"
                " certificates of etcd (?ca=FILE&cert=FILE&key=FILE), or run a member of etcd on this machine."
            )
        return cls(endpoints, f"/{prefix}/", tls, int(options.get("ttl", "10")))


def _tls(url: str, options: Mapping[str, str]) -> ssl.SSLContext | None:
    files = [options.get(name) for name in ("ca", "cert", "key")]
    if not any(files):
        return None
    if not all(files):
        raise ValueError(f"ledger={url!r}: ca, cert and key belong together.")
    try:
        context = ssl.create_default_context(cafile=files[0])
        context.load_cert_chain(str(files[1]), files[2])
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"ledger={url!r}: its certificates cannot be used: {error}.") from error
    return context


class Etcd:
    """Asks etcd. An endpoint that does not answer is followed by the next one."""

    def __init__(self, url: EtcdUrl) -> None:
        self._url = url
        self._first = 0

    def ask(self, call: str, body: Json, patience: float) -> Json:
        """Makes a call."""
        until, text = time.monotonic() + patience, json.dumps(body).encode()
        while True:
            for turn in range(len(self._url.endpoints)):
                try:
                    answer = self._ask((self._first + turn) % len(self._url.endpoints), call, text)
                except EtcdUnreachable as error:
                    failed = error
                else:
                    self._first += turn
                    return answer
            if time.monotonic() + _PAUSE > until:
                raise failed
            time.sleep(_PAUSE)

    def _ask(self, number: int, call: str, text: bytes) -> Json:
        host, port = self._url.endpoints[number]
        connection = (
            http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=self._url.tls)
            if self._url.tls
            else http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
        )
        try:
            connection.request("POST", f"/v3/{call}", text, {"Content-Type": "application/json"})
            said = connection.getresponse().read()
            answer = json.loads(said)
        except ssl.SSLCertVerificationError as error:
            raise MailboxError(f"etcd at {host}:{port} has no certificate of its authority: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EtcdUnreachable(f"etcd at {host}:{port} does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()
        return _checked(answer, f"{host}:{port}")


def _checked(answer: Any, where: str) -> Json:
    """Returns an answer that is no error."""
    if not isinstance(answer, dict):
        raise EtcdUnreachable(f"etcd at {where} has answered with what is none of its answers.")
    # In a stream an error stands in a field of its own.
    error = answer.get("error")
    said = error if isinstance(error, dict) else answer
    if not error:
        return answer
    code, why = said.get("code", said.get("grpc_code")), said.get("message", error)
    if code == _FULL:
        raise NoSpace(f"there is no space left in etcd: {why}. Compact and defragment it, and disarm its alarm.")
    if code in _AGAIN:
        raise EtcdUnreachable(f"etcd at {where}: {why}")
    raise MailboxError(f"etcd at {where} refuses: {why}")


# The words of transactions


def text_of(value: Bytes) -> str:
    """Returns bytes as they stand in JSON."""
    return base64.b64encode(value).decode()


def bytes_of(pair: Json) -> bytes:
    """Returns the value of a key that was read."""
    return base64.b64decode(pair.get("value", ""))


def equals(key: str, value: Bytes) -> Json:
    """Compares the value of a key; one that is not there is unequal."""
    return {"key": text_of(key.encode()), "target": "VALUE", "result": "EQUAL", "value": text_of(value)}


def absent(key: str) -> Json:
    """Compares whether a key is not there."""
    return {"key": text_of(key.encode()), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def put(key: str, value: Bytes, lease: str = "0") -> Json:
    """Writes a key, that goes with a lease if one is named."""
    return {"request_put": {"key": text_of(key.encode()), "value": text_of(value), "lease": lease}}


def delete(key: str, end: str | None = None) -> Json:
    """Deletes a key, or all from there to before another."""
    return {"request_delete_range": _range(key, end)}


def read(key: str, end: str | None = None, limit: int = 0) -> Json:
    """Reads a key, or those from there to before another."""
    return {"request_range": _range(key, end) | {"limit": str(limit)}}


def _range(key: str, end: str | None) -> Json:
    return {"key": text_of(key.encode())} | ({"range_end": text_of(end.encode())} if end else {})


def after(prefix: str) -> str:
    """Returns the key before which all keys with a prefix stand."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def transaction(compare: Sequence[Json], success: Sequence[Json], failure: Sequence[Json] = ()) -> Json:
    """Returns a transaction: one list of changes or the other, all of it."""
    return {"compare": list(compare), "success": list(success), "failure": list(failure)}


def found(answer: Json, number: int = 0) -> list[tuple[str, bytes]]:
    """Returns what a `read` of a transaction has found, in the order of the keys."""
    pairs = answer["responses"][number]["response_range"].get("kvs", [])
    return [(base64.b64decode(pair["key"]).decode(), bytes_of(pair)) for pair in pairs]
