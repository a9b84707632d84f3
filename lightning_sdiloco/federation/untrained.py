"""The wire format of untrained state, which follows the values of a fragment in payloads and in the
hub's mean.

A site sends only the tensors that it has changed. One bit per tensor indicates whether its bytes
follow. Averaged tensors are sent in float32 or float64. The run config contains the kinds and sizes
of all tensors. A payload for the last round also contains the tensors that each site keeps for
itself, such as teachers. This module does not import torch, because a hub, which runs without
torch, also reads the state.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """The sizes of a fragment's parts.

    Attributes:
        numel: The number of parameter values.
        untrained: The size of each untrained tensor in bytes.
        dtypes: For each untrained tensor, the numpy name of the mean's dtype. The name is empty if
            all sites use the tensor of the first site.
        own: The size in bytes of each tensor that sites keep for themselves until the last round.
        numbers: The torch dtype names of all tensors listed here, if a hub reads them.
    """

    numel: int
    untrained: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    own: tuple[int, ...] = ()
    numbers: tuple[str, ...] = ()

    def sent(self, is_exact: bool) -> "Sizes":
        """Returns the sizes of the tensors that a site sends. In the last, exact round, the sizes
        include the tensors that the site keeps for itself.
        """
        if not is_exact:
            return self
        dtypes = self.dtypes + ("",) * len(self.own)
        return self._replace(untrained=self.untrained + self.own, dtypes=dtypes, own=())

    @property
    def least(self) -> int:
        """The number of bytes sent if nothing has changed, which is one bit per tensor."""
        return -(-len(self.untrained) // 8)

    @property
    def most(self) -> int:
        return self.least + sum(self.untrained)


def packed(changed: Mapping[int, bytes], sizes: Sizes) -> bytes:
    r"""Packs the changed tensors, given by index, into the bytes to send.

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
    """Unpacks the tensors that were sent. If the length is wrong, the result is empty."""
    bits = int.from_bytes(sent[: sizes.least], "little")
    changed = dict[int, bytes]()
    position = sizes.least
    for number, size in enumerate(sizes.untrained):
        if bits >> number & 1:
            changed[number] = sent[position : position + size]
            position += size
    is_whole = position == len(sent) and not bits >> len(sizes.untrained)
    return changed if is_whole else {}
