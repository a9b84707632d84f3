"""Tracks payloads of closed rounds that are missing from the store or were altered there.

A site that needs a lost payload repeatedly reports the loss to the hub. The hub then sends the
state of another site that has applied the round. Alternatively, a site that still has the payload
in flight resends it, and the hub resends the record.

The coordinator owns the `LostPayloads` of its run. The coordinator holds its lock during every call
except `damaged`, which reads payloads.
"""

import logging
from collections.abc import Iterable

from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import Payload, Record, RoundId
from lightning_sdiloco.federation.state_requests import Store, holds
from lightning_sdiloco.federation.wire import Altered, Missing

log = logging.getLogger(__name__)


class LostPayloads:
    """The closed rounds whose payloads are needed by a site but missing from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[RoundId, Record] = {}

    def damaged(self, record: Record) -> list[Payload]:
        """Returns the payloads of a record that are missing or were altered. Altered payloads are
        dropped, because the store would otherwise reject new copies.
        """
        payloads = _payloads(record)
        if _id_of(record) in self._records:
            # Blobs that are stored after a loss were verified on arrival.
            return [payload for payload in payloads if not holds(self._store, [payload])]
        return self.damaged_blobs(payloads)

    def damaged_blobs(self, blobs: Iterable[Payload]) -> list[Payload]:
        """Returns the blobs that are missing or were altered. Altered blobs are dropped."""
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
        """Registers and logs the loss of a record's payloads."""
        if _id_of(record) in self._records:
            return
        self._records[_id_of(record)] = record
        log.error(
            "payloads of round %d of fragment %d are missing from the store or were altered there:"
            " %s, from %s",
            record.round,
            record.fragment,
            ", ".join(payload.key[:16] for payload in payloads),
            _senders(record),
        )

    def forget(self, record: Record) -> None:
        """Marks all payloads of a record as present."""
        self._records.pop(_id_of(record), None)

    def clear(self) -> None:
        self._records.clear()

    def forget_unneeded(self, ledger: Ledger, now: float) -> None:
        """Removes the rounds that all present sites have applied."""
        for round_id in list(self._records):
            if not _waiting(ledger, round_id, now):
                del self._records[round_id]

    def trouble(self, ledger: Ledger, now: float) -> str | None:
        """Describes which sites are waiting for the first affected round and what can unblock
        them.
        """
        for round_id, record in self._records.items():
            waiting = _waiting(ledger, round_id, now)
            if waiting:
                # Only the hub had the mean.
                senders = (
                    "" if record.mean else f", or for {_senders(record)} to resend the payloads"
                )
                return (
                    f"payloads of round {record.round} of fragment {record.fragment} are missing"
                    f" from the hub's store or were altered there, so {', '.join(waiting)} cannot"
                    " apply the round. These sites are waiting for the state of a site that has"
                    f" applied the round{senders}. If no such site returns, run: sdiloco hub"
                    f" rollback {record.round - 1}"
                )
        return None


def _waiting(ledger: Ledger, round_id: RoundId, now: float) -> list[str]:
    """Lists the present sites that have not applied a round."""
    return [site for site in ledger.present(now) if not ledger.has_applied(site, [round_id])]


def _id_of(record: Record) -> RoundId:
    return RoundId(record.fragment, record.round)


def _payloads(record: Record) -> list[Payload]:
    return [payload for payloads in record.sources for payload in payloads]


def _senders(record: Record) -> str:
    return ", ".join(contribution.site for contribution in record.counted)
