"""Short ways to tell a ledger and a follower what happens, for tests with known answers."""

from dataclasses import replace

from lightning_sdiloco.federation import (
    Beat,
    Contribution,
    Follower,
    Hello,
    Ledger,
    MergeAction,
    Payload,
    Record,
    Terms,
)

TERMS = Terms(fragments=1, sync_every=20, overlap_steps=3, grace=2.0, lease=10.0)
CHARTER = "00" * 32
DIGEST = 7


def life(number: int = 1) -> str:
    return f"{number:016x}"


def own(
    site: str = "a",
    round: int = 1,
    *,
    previous: str = CHARTER,
    weight: int = 100,
    digest: int = DIGEST,
    born: int = 1,
    exact: bool = False,
) -> Contribution:
    payload = Payload(f"{ord(site[0]):02x}{round:02x}{born:02x}" + "0" * 58, 8)
    return Contribution(0, round, site, life(born), previous, weight, digest, (payload,), exact=exact)


def record(round: int, *counted: Contribution, previous: str = CHARTER, final: bool = False) -> Record:
    counted = tuple(replace(each, previous=previous) for each in counted)
    return Record(round - 1, 0, round, previous, counted, final=final)


def chain(*rounds: tuple[Contribution, ...]) -> list[Record]:
    """Records of one fragment, each from its contributions."""
    found: list[Record] = []
    for number, counted in enumerate(rounds, 1):
        found.append(record(number, *counted, previous=found[-1].key if found else CHARTER))
    return found


def come(ledger: Ledger, *sites: str, now: float = 0.0, born: int = 1) -> None:
    """Sites say hello and beat, having applied everything."""
    for site in sites:
        ledger.hello(Hello("run", site, life(born), CHARTER, tuple(ledger.closed)), now)
        beat(ledger, site, now, born)


def beat(ledger: Ledger, site: str, now: float, born: int = 1, applied: int | None = None) -> None:
    rounds = tuple(closed.round if applied is None else applied for closed in ledger.closed)
    ledger.beat(Beat(site, life(born), True, rounds), now)


def close(ledger: Ledger, now: float) -> list[Record]:
    records = ledger.due(now)
    for made in records:
        ledger.append(made)
    return records


def follower(site: str = "a", terms: Terms = TERMS, born: int = 1, late: MergeAction = MergeAction.CARRY) -> Follower:
    """A follower that has founded a run and reaches the hub."""
    made = Follower(terms, CHARTER, site, life(born), late=late)
    made.found([DIGEST] * terms.fragments)
    made.reachable = True
    return made


def trained(made: Follower, steps: int, samples: int = 5) -> None:
    for _ in range(steps):
        made.trained(samples)
