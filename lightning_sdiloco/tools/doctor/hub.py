"""Looks at the way from a site to its hub: keys, the connection, round trip, bandwidth both ways, and the charter."""

import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from lightning_sdiloco.comm import (
    HubMailbox,
    HubUnreachable,
    MailboxError,
    hub_addresses,
    identity_of,
    valid_until,
)
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import ChosenQuorum
from lightning_sdiloco.launch import reason, try_to_connect
from lightning_sdiloco.planning import readable_rate
from lightning_sdiloco.tools.doctor.checks import Finding
from lightning_sdiloco.tools.hub.asking import HubOptions

_CHANNELS = 8  # as many as a site has
_SECONDS = 5.0  # for a connection to be made


def examine(options: HubOptions, seconds: float) -> tuple[list[Finding], dict[str, Any]]:
    """Looks at the way to a hub, until something is in the way."""
    places = hub_addresses(str(options.hub))
    if (options.keys is None) != options.insecure:
        raise ValueError("Give the keys of a site, or of anybody else of the run: --keys FILE; or --insecure.")
    found: list[Finding] = []
    numbers: dict[str, Any] = {}
    for finding in _findings(options, places, seconds, numbers):
        found.append(finding)
        # What comes after it would only say the same.
        if finding.state == "wrong":
            break
    return found, {"hub": options.hub, **numbers}


def _findings(
    options: HubOptions, places: list[tuple[str, int]], seconds: float, numbers: dict[str, Any]
) -> Iterator[Finding]:
    yield _certificate(options)
    yield from _reached(places)
    # It is at one of them.
    for number, (host, port) in enumerate(places, start=1):
        findings = list(_of_hub(replace(options, hub=f"{host}:{port}"), seconds, numbers))
        if number == len(places) or findings[-1].state != "wrong":
            yield from findings
            return


def _of_hub(options: HubOptions, seconds: float, numbers: dict[str, Any]) -> Iterator[Finding]:
    try:
        mailbox = options.mailbox("reader", _CHANNELS)
    except ValueError as refusal:
        yield Finding("wrong", "keys", str(refusal))
        return
    try:
        yield from _asked(mailbox, seconds, numbers)
    except (MailboxError, Refused) as refusal:
        yield Finding("wrong", "hub", str(refusal), _what_to_do(refusal, options))
    finally:
        mailbox.close()


def _reached(places: list[tuple[str, int]]) -> Iterator[Finding]:
    """Says which addresses cannot be reached: one of several is enough."""
    errors = [try_to_connect(host, port, _SECONDS) for host, port in places]
    state: Literal["slow", "wrong"] = "wrong" if all(errors) else "slow"
    for (host, port), error in zip(places, errors, strict=True):
        if error is not None:
            yield Finding(
                state,
                "reachability",
                f"{host}:{port}: {reason(error)}",
                f"Start the hub, on an address that can be reached from here (--listen 0.0.0.0:{port}), and open that"
                " port of its machine. Sites need no open port.",
            )


def _certificate(options: HubOptions) -> Finding:
    if options.keys is None:
        return Finding("ok", "keys", "none: whoever is on the way can read and change everything (--insecure)")
    try:
        who, until = identity_of(options.keys), valid_until(options.keys)
    except ValueError as error:
        return Finding("wrong", "keys", str(error))
    days = (until - datetime.datetime.now(datetime.timezone.utc)).days
    run = f"run {who.run}" if who.run != "-" else "the run of its authority"
    return Finding("ok", "keys", f"{who.role} {who.name} in {run}, valid until {until:%Y-%m-%d}, for {days} days")


def _asked(mailbox: HubMailbox, seconds: float, numbers: dict[str, Any]) -> Iterator[Finding]:
    numbers["round_trip"] = mailbox.round_trip()
    yield Finding("ok", "hub", f"it answers, and knows {mailbox.identity.role} {mailbox.identity.name}")
    yield Finding("ok", "round trip", f"{1000 * numbers['round_trip']:.3g} ms, by the clock of this end alone")
    for up, key, name in ((True, "to_hub", "bandwidth to the hub"), (False, "from_hub", "bandwidth from the hub")):
        numbers[f"bits_per_second_{key}"] = rate = mailbox.bandwidth(up, seconds)
        yield Finding("ok", name, f"{readable_rate(rate / 1e9)}, over {_CHANNELS} connections")
    _, text = mailbox.call("status")
    numbers["status"] = status = json.loads(text)
    yield from _of_run(status)


def _of_run(status: dict[str, Any]) -> Iterator[Finding]:
    if not status["founded"]:
        here = ", ".join(status["here"]) or "none"
        yield Finding("ok", "run", f"not founded yet: {status['missing']} more sites are needed; here: {here}")
        return
    if status["trouble"]:
        yield Finding("wrong", "run", str(status["trouble"]), "Ask whoever runs the hub.")
    charter = status["charter"]
    terms = charter["terms"]
    ends = "without an end" if terms["rounds"] is None else f"{terms['rounds']} rounds"
    yield Finding(
        "ok",
        "run",
        f"founded on charter {charter['key'][:8]}, {status['records']} records; {len(status['sites'])} sites are known",
    )
    yield Finding(
        "ok",
        "charter",
        f"{charter['parameters']} tensors in {charter['fragments']} fragments, sync_every={terms['sync_every']},"
        f" overlap_steps={terms['overlap_steps']}, grace={terms['grace']:g}, lease={terms['lease']:g},"
        f" quorum={_quorum(terms['quorum'])}, {ends}; {', '.join(f'{k}={v}' for k, v in charter['settings'].items())}",
    )
    for name, there in charter["versions"].items():
        yield _version(name, there)


def _quorum(told: Any) -> str:
    return str(ChosenQuorum(**told) if isinstance(told, dict) else told)


def _version(name: str, there: str) -> Finding:
    try:
        here = version(name).split("+")[0]
    except PackageNotFoundError:
        here = "none"
    if here == there.split("+")[0]:
        return Finding("ok", name, here)
    fix = f"Install {name}=={there} here: a run stays with the versions that it was founded on."
    return Finding("wrong", name, f"{here} here, and {there} in the charter", fix)


def _what_to_do(error: Exception, options: HubOptions) -> str:
    if isinstance(error, HubUnreachable) and options.insecure:
        return "Something listens there, and does not answer: a hub with keys takes nobody without. Give --keys FILE."
    if isinstance(error, HubUnreachable):
        return (
            "Something listens there, and hub and keys do not know each other: another authority, another run, or a"
            " hub without TLS. Get keys from where those of the hub are: sdiloco keys add FOLDER NAME."
        )
    if options.insecure:
        return "Give the name of the run that this hub serves: --run NAME."
    return "Get a bundle for this run from whoever has the folder of its keys: sdiloco keys add FOLDER NAME."
