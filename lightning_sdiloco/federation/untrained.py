"""Untrained state on the wire: what a site, or a mean at the hub, sends behind the values of a
fragment.

A site sends what it has changed: a bit for each tensor says whether its bytes follow, means in
float32 or float64. Kinds and sizes are in the run config. What is sent for a last round also
carries what sites keep of their own, such as teachers. It needs no torch: a hub reads it, too.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """Says how large the parts of a fragment are.

    Attributes:
        numel: Values of its parameters.
        untrained: Bytes of each tensor of its untrained state.
        dtypes: Of each of these, how numpy calls the dtype of a mean; empty where sites take it
            from the first one.
        own: Bytes of each tensor that sites keep until the last round.
        numbers: How torch calls the dtype of each of all these tensors, where a hub reads them.
    """

    numel: int
    untrained: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    own: tuple[int, ...] = ()
    numbers: tuple[str, ...] = ()

    def sent(self, is_exact: bool) -> "Sizes":
        """Returns the sizes of what a site sends: for a last round, which is exact, also of what
        sites keep.
        """
        if not is_exact:
            return self
        dtypes = self.dtypes + ("",) * len(self.own)
        return self._replace(untrained=self.untrained + self.own, dtypes=dtypes, own=())

    @property
    def least(self) -> int:
        """Bytes that are sent if nothing has changed: a bit for each tensor."""
        return -(-len(self.untrained) // 8)

    @property
    def most(self) -> int:
        return self.least + sum(self.untrained)


def packed(changed: Mapping[int, bytes], sizes: Sizes) -> bytes:
    r"""Returns what to send of the tensors that have changed, by their number.

    Examples:
        >>> sizes = Sizes(numel=10, untrained=(4, 2, 3), dtypes=("<f4", "", ""))
        >>> packed({0: b"mean", 1: b"ab"}, sizes)
        b'\x03meanab'
        >>> unpacked(packed({0: b"mean", 1: b"ab"}, sizes), sizes)
        {0: b'mean', 1: b'ab'}
    """
    bits = sum(1 << number for number in changed)
    return b"".join(
        (bits.to_bytes(sizes.least, "little"), *(changed[number] for number in sorted(changed)))
    )


def unpacked(sent: bytes, sizes: Sizes) -> dict[int, bytes]:
    """Returns what was sent. Where its length is not what it says, nothing counts as changed."""
    bits = int.from_bytes(sent[: sizes.least], "little")
    changed = dict[int, bytes]()
    position = sizes.least
    for number, size in enumerate(sizes.untrained):
        if bits >> number & 1:
            changed[number] = sent[position : position + size]
            position += size
    is_whole = position == len(sent) and not bits >> len(sizes.untrained)
    return changed if is_whole else {}
