"""Asking a hub something as an operator or a reader."""

from typing import Any

from lightning_sdiloco.comm import HubMailbox, MailboxError, Role, identity_of


class Asking:
    """Asks a hub, over a connection that lasts as long as the ``with`` block.

    Args:
        hub: Address and port of the hub; of two with a comma between them.
        keys: The bundle of who asks.
        run: The name of the run, if the bundle does not say it.
        insecure: Ask a hub that has no keys; then the run has to be said.
        role: What who asks is to an insecure hub.

    Raises:
        ValueError: If the keys cannot be used, or hub or run are not known.
    """

    def __init__(self, hub: str | None, keys: str | None, run: str | None, insecure: bool, role: Role) -> None:
        if hub is None:
            raise ValueError("Say where the hub is: --hub ADDRESS:PORT.")
        name: str = role
        if keys is not None and not insecure:
            who = identity_of(keys)
            name, run = who.name, run or who.run
        if run is None:
            raise ValueError("Say which run it is: --run RUN. A bundle says it too: --keys FILE.")
        self._mailbox = HubMailbox(hub, run, name, keys, insecure, role=role, channels=1)

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *error: object) -> None:
        self._mailbox.close()

    def ask(self, name: str, **about: Any) -> tuple[dict[str, Any], bytes]:
        """Asks, and returns the answer.

        Raises:
            ValueError: If the hub refuses it, or cannot be reached.
        """
        try:
            return self._mailbox.call(name, about)
        except MailboxError as error:
            raise ValueError(str(error)) from error
