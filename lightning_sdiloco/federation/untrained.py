"""Untrained state on the wire: a site, or a mean at the hub, sends it behind the values of a
fragment.

A site sends the tensors that it has changed: a bit for each tensor says whether its bytes follow,
means in float32 or float64. Kinds and sizes are in the run config. A payload for a last round also
carries the tensors that sites keep as their own, such as teachers. This module needs no torch: a
hub reads the state, too.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """Says how large the parts of a fragment are.

    Attributes:
        numel: Values of its parameters.
        untrained: Bytes of each tensor of its untrained state.
        dtypes: For each of these, numpy's name for the dtype of its mean; empty if sites take the
            tensor from the first site.
        own: Bytes of each tensor that sites keep as their own until the last round.
        numbers: torch's names for the dtypes of all these tensors, if a hub reads them.
    """

    numel: int
    untrained: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    own: tuple[int, ...] = ()
    numbers: tuple[str, ...] = ()

    def sent(self, is_exact: bool) -> "Sizes":
        """Returns the sizes of the tensors that a site sends: for a last round, which is exact,
        also of its own.
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
    r"""Returns the bytes of the tensors that have changed, given these by their number.

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
    """Returns the tensors that were sent. If the length is wrong, nothing counts as changed."""
    bits = int.from_bytes(sent[: sizes.least], "little")
    changed = dict[int, bytes]()
    position = sizes.least
    for number, size in enumerate(sizes.untrained):
        if bits >> number & 1:
            changed[number] = sent[position : position + size]
            position += size
    is_whole = position == len(sent) and not bits >> len(sizes.untrained)
    return changed if is_whole else {}
