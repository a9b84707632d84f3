"""Who asks a hub, and what each role may ask: every call passes here before anything else is looked at."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_sdiloco.comm.mailbox.base import Denied
from lightning_sdiloco.comm.mailbox.frames import PROTOCOL, Header
from lightning_sdiloco.comm.mailbox.keys import ROLES, UNBOUND, Identity, fingerprint
from lightning_sdiloco.errors import Malformed, Refused

EVERY_ROLE = frozenset(ROLES)

MAY: Mapping[str, frozenset[str]] = {
    "ping": EVERY_ROLE,
    "watch": EVERY_ROLE,
    "status": EVERY_ROLE,
    "put": frozenset({"site"}),
    "get": frozenset({"site"}),
    "hello": frozenset({"site"}),
    "contribute": frozenset({"site"}),
    "skip": frozenset({"site"}),
    "state": frozenset({"site"}),
    "give": frozenset({"site"}),
    "leave": frozenset({"site"}),
    "evict": frozenset({"operator"}),
    "end": frozenset({"operator"}),
    "rollback": frozenset({"operator"}),
}
"""Which roles may make which call. What is not in the table, nobody may."""

LOOKING = frozenset({"ping", "status", "watch"})
"""Calls with which nobody speaks for a start of a site: the keys of one that trains may be used for them elsewhere."""


class Peer(NamedTuple):
    """Who makes a call, as its certificate says."""

    role: str
    name: str
    life: str
    address: str


class Access:
    """Tells who makes a call, and whether it may."""

    def __init__(self, run: str, certified: bool, revoked: Any = frozenset) -> None:
        self.run = run
        self._certified, self._revoked = certified, revoked

    def peer(self, call: str, header: Header, context: Any) -> Peer:
        """Returns who makes a call."""
        claimed, life = _claimed(header)
        if self._certified:
            self._check(claimed, context)
        if claimed.run != self.run:
            raise Denied(f"this hub serves run {self.run!r}, and not {claimed.run!r}.")
        if claimed.role not in MAY.get(call, ()):
            raise Denied(f"a {claimed.role} may not call {call}: {claimed.name!r} has no certificate for that.")
        speaks_for_itself(claimed.role, claimed.name, header.get("about", {}))
        return Peer(claimed.role, claimed.name, life, context.peer())

    def _check(self, claimed: Identity, context: Any) -> None:
        found = context.auth_context()
        names = [name.decode(errors="replace") for name in found.get("x509_subject_alternative_name", [])]
        known = [identity for identity in map(Identity.of_uri, names) if identity is not None]
        if len(known) != 1:
            raise Denied("the certificate does not say for which run, role and name it speaks.")
        (own,) = known
        # An authority that was not bound to a run when it signed has been bound to that of this hub since.
        if own.run not in (self.run, UNBOUND):
            raise Denied(f"this hub serves run {self.run!r}, and the certificate is for run {own.run!r}.")
        if (own.role, own.name) != (claimed.role, claimed.name):
            raise Denied(
                f"the certificate of {own.role} {own.name!r} does not speak for {claimed.role} {claimed.name!r}."
            )
        revoked = self._revoked()
        if revoked and fingerprint(found["x509_pem_cert"][0]) in revoked:
            raise Denied(f"the certificate of {own.role} {own.name!r} has been revoked.")


def speaks_for_itself(role: str, name: str, about: Any) -> Header:
    """Returns what a call is about, if a site that makes it names no other as its own."""
    if not isinstance(about, dict):
        raise Malformed("what a call is about is a JSON object.")
    if role == "site" and about.get("site", name) != name:
        raise Denied(f"site {name!r} does not speak for {str(about['site'])[:80]!r}.")
    return about


def _claimed(header: Header) -> tuple[Identity, str]:
    who = header.get("from")
    fields = ("run", "role", "name", "life")
    if not isinstance(who, dict) or not all(isinstance(who.get(f), str) and len(who[f]) <= 63 for f in fields):
        raise Malformed("the header of a call says who makes it: run, role, name and life.")
    if who.get("protocol") != PROTOCOL:
        other = str(who.get("protocol"))[:20]
        raise Refused(f"this hub speaks version {PROTOCOL}, and not {other}: update the older side.")
    if who["role"] not in ROLES:
        raise Denied(f"{who['role']!r} is no role.")
    return Identity(who["run"], who["role"], who["name"]), who["life"]
