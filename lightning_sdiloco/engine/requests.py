"""What this rank tells all groups with the next launch: what it asks of them, and how fast it is."""


class Mailbox:
    """Keeps what is requested until a launch takes it along.

    Signal handlers may request something at any moment.

    Attributes:
        pending: What waits for the next launch, one bit each; a plain number, because checkpoints hold it.
        step_time: Seconds of an inner step, which launches take along too; 0 where that is not known.

    Examples:
        >>> mailbox = Mailbox()
        >>> mailbox.request(0b101)
        >>> mailbox.withdraw(0b001)
        >>> mailbox.take(), mailbox.pending
        (4, 0)
    """

    def __init__(self) -> None:
        self.pending = 0
        self.step_time = 0.0

    def request(self, bits: int) -> None:
        """Adds bits, up to 16, whose meaning is the caller's."""
        self.pending |= int(bits)

    def withdraw(self, bits: int) -> None:
        """Takes back bits that no launch has taken along yet."""
        self.pending &= ~int(bits)

    def take(self) -> int:
        """Empties the mailbox and returns what was in it."""
        taken = self.pending
        # What a signal handler adds in the meantime stays.
        self.pending &= ~taken
        return taken
