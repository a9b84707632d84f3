"""Asking a hub something as an operator or a reader."""

from dataclasses import dataclass
from typing import Any

from lightning_sdiloco.comm import HubMailbox, MailboxError, Role, identity_of


@dataclass(frozen=True)
class HubOptions:
    """Says which hub is asked, and by whom: options that all commands share which ask one."""

    hub: str | None = None
    keys: str | None = None
    run: str | None = None
    insecure: bool = False

    def mailbox(self, role: Role, channels: int = 1) -> HubMailbox:
        """Connects to the hub."""
        if self.hub is None:
            raise ValueError("Say where the hub is: --hub ADDRESS:PORT.")
        name, run = str(role), self.run
        if self.keys is not None and not self.insecure:
            who = identity_of(self.keys)
            name, run = who.name, run or who.run
        if run is None:
            raise ValueError("Say which run it is: --run RUN. A bundle says it too: --keys FILE.")
        return HubMailbox(self.hub, run, name, self.keys, self.insecure, role=role, channels=channels)


class Asking:
    """Asks a hub, over a connection that lasts as long as the ``with`` block."""

    def __init__(self, options: HubOptions, role: Role) -> None:
        self._mailbox = options.mailbox(role)

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *error: object) -> None:
        self._mailbox.close()

    def ask(self, name: str, **about: Any) -> tuple[dict[str, Any], bytes]:
        """Asks, and returns the answer."""
        try:
            return self._mailbox.call(name, about)
        except MailboxError as error:
            raise ValueError(str(error)) from error
