"""Untrained state on the wire, which follows the values of a fragment in payloads and in the hub's
mean.

A site sends the tensors that it has changed. One bit for each tensor says whether its bytes follow;
averaged tensors are sent in float32 or float64. Kinds and sizes are in the run config. A payload
for a last round also carries the tensors that sites keep as their own, such as teachers. This
module does not use torch, because a hub also reads the state.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """The sizes of the parts of a fragment.

    Attributes:
        numel: The number of values in its parameters.
        untrained: The bytes of each tensor of its untrained state.
        dtypes: For each of these, numpy's name for the dtype of its mean; empty if sites take the
            tensor from the first site.
        own: The bytes of each tensor that sites keep as their own until the last round.
        numbers: The names of the dtypes of all these tensors in torch, if a hub reads them.
    """

    numel: int
    untrained: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    own: tuple[int, ...] = ()
    numbers: tuple[str, ...] = ()

    def sent(self, is_exact: bool) -> "Sizes":
        """Returns the sizes of the tensors that a site sends, which in a last, exact round include
        its own ones.
        """
        if not is_exact:
            return self
        dtypes = self.dtypes + ("",) * len(self.own)
        return self._replace(untrained=self.untrained + self.own, dtypes=dtypes, own=())

    @property
    def least(self) -> int:
        """The bytes that are sent if nothing has changed: one bit for each tensor."""
        return -(-len(self.untrained) // 8)

    @property
    def most(self) -> int:
        return self.least + sum(self.untrained)


def packed(changed: Mapping[int, bytes], sizes: Sizes) -> bytes:
    r"""Returns the bytes to send for the tensors that have changed, which are given by index.

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
    """Returns the tensors that were sent. If the length is wrong, nothing is considered changed."""
    bits = int.from_bytes(sent[: sizes.least], "little")
    changed = dict[int, bytes]()
    position = sizes.least
    for number, size in enumerate(sizes.untrained):
        if bits >> number & 1:
            changed[number] = sent[position : position + size]
            position += size
    is_whole = position == len(sent) and not bits >> len(sizes.untrained)
    return changed if is_whole else {}
