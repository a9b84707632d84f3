"""Payloads of closed rounds that the store has lost because they are gone or were altered.

A site that needs one reports this to the hub repeatedly. It gets the state of a site that has
applied the round. Alternatively, a site that still has the payload in flight resends it, and the hub
resends the record.

The coordinator owns the `LostPayloads` of its run, and holds its lock for every call except
`damaged`, which reads payloads.
"""

import logging
from collections.abc import Iterable

from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import Payload, Record, RoundId
from lightning_sdiloco.federation.state_requests import Store, holds
from lightning_sdiloco.federation.wire import Altered, Missing

log = logging.getLogger(__name__)


class LostPayloads:
    """The closed rounds for which the store lacks payloads that some site needs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[RoundId, Record] = {}

    def damaged(self, record: Record) -> list[Payload]:
        """Returns the payloads of a record that are gone or were altered, and drops these, because
        the store would otherwise not accept them again.
        """
        payloads = _payloads(record)
        if _id_of(record) in self._records:
            # Blobs that are stored after a loss were verified on arrival.
            return [payload for payload in payloads if not holds(self._store, [payload])]
        return self.damaged_blobs(payloads)

    def damaged_blobs(self, blobs: Iterable[Payload]) -> list[Payload]:
        """Returns the blobs that are gone or were altered, and drops these."""
        return [blob for blob in blobs if not self._is_unaltered(blob)]

    def _is_unaltered(self, payload: Payload) -> bool:
        try:
            self._store.verify(payload.key)
        except Missing:
            return False
        except Altered:
            self._store.drop(payload.key)
            return False
        return True

    def note(self, record: Record, payloads: Iterable[Payload]) -> None:
        """Notes which payloads of a record are lost."""
        if _id_of(record) in self._records:
            return
        self._records[_id_of(record)] = record
        log.error(
            "payloads of round %d of fragment %d are gone from the store, or were altered there:"
            " %s, of %s",
            record.round,
            record.fragment,
            ", ".join(payload.key[:16] for payload in payloads),
            _senders(record),
        )

    def forget(self, record: Record) -> None:
        """Notes that the payloads of a record are present, perhaps again."""
        self._records.pop(_id_of(record), None)

    def clear(self) -> None:
        self._records.clear()

    def forget_unneeded(self, ledger: Ledger, now: float) -> None:
        """Forgets the rounds that all present sites have applied."""
        for round_id in list(self._records):
            if not _waiting(ledger, round_id, now):
                del self._records[round_id]

    def trouble(self, ledger: Ledger, now: float) -> str | None:
        """Returns which sites wait for the first of these rounds, and what they wait for."""
        for round_id, record in self._records.items():
            waiting = _waiting(ledger, round_id, now)
            if waiting:
                # Only the hub had its mean.
                senders = "" if record.mean else f", or for {_senders(record)} to send it again"
                return (
                    f"payloads of round {record.round} of fragment {record.fragment} are gone from"
                    f" the hub's store, or were altered there: {', '.join(waiting)} cannot apply"
                    f" it. They wait for the state of a site that has{senders}. If no site returns"
                    f" with it: sdiloco hub rollback {record.round - 1}"
                )
        return None


def _waiting(ledger: Ledger, round_id: RoundId, now: float) -> list[str]:
    """Returns the present sites that have not applied a round."""
    return [site for site in ledger.present(now) if not ledger.has_applied(site, [round_id])]


def _id_of(record: Record) -> RoundId:
    return RoundId(record.fragment, record.round)


def _payloads(record: Record) -> list[Payload]:
    return [payload for payloads in record.sources for payload in payloads]


def _senders(record: Record) -> str:
    return ", ".join(contribution.site for contribution in record.counted)
