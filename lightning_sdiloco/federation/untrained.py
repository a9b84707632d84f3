"""Untrained state on the wire: what a site, or a mean at the hub, sends behind the values of a fragment.

All statistics come first, as float32. A site sends the rest only as far as it has changed it: a bit for each tensor
says whether its bytes follow. Kinds and sizes are in the run config. It needs no torch: a hub reads it, too.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """Says how large the parts of a fragment are.

    Attributes:
        numel: Values of its parameters.
        statistics: Bytes of its statistics.
        others: Bytes of each other tensor that travels with it.
    """

    numel: int
    statistics: int = 0
    others: tuple[int, ...] = ()

    @property
    def mask(self) -> int:
        """Bytes with a bit for each of the others."""
        return -(-len(self.others) // 8)

    @property
    def least(self) -> int:
        """Bytes of a tail in which no other tensor has changed."""
        return self.statistics + self.mask

    @property
    def most(self) -> int:
        return self.least + sum(self.others)


class Tail(NamedTuple):
    """Holds the bytes of all statistics, and of the other tensors that a site has changed, by their number."""

    statistics: bytes
    others: Mapping[int, bytes]


def packed(tail: Tail, sizes: Sizes) -> bytes:
    r"""Returns the bytes to send.

    Examples:
        >>> sizes = Sizes(numel=10, statistics=4, others=(1, 2, 3))
        >>> sent = packed(Tail(b"mean", {1: b"ab"}), sizes)
        >>> sent, unpacked(sent, sizes)
        (b'mean\x02ab', Tail(statistics=b'mean', others={1: b'ab'}))
    """
    bits = sum(1 << number for number in tail.others)
    others = [tail.others[number] for number in sorted(tail.others)]
    return b"".join((tail.statistics, bits.to_bytes(sizes.mask, "little"), *others))


def unpacked(sent: bytes, sizes: Sizes) -> Tail:
    """Reads what was sent. Where its length is not what it says, nothing but the statistics counts as changed."""
    bits = int.from_bytes(sent[sizes.statistics : sizes.least], "little")
    others = dict[int, bytes]()
    position = sizes.least
    for number, size in enumerate(sizes.others):
        if bits >> number & 1:
            others[number] = sent[position : position + size]
            position += size
    is_whole = position == len(sent) and not bits >> len(sizes.others)
    return Tail(sent[: sizes.statistics], others if is_whole else {})
