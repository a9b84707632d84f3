"""Makes a corpus for larger models from the sources of the Linux kernel, which Debian provides.

    apt-get download linux-source-6.1
    dpkg-deb --extract linux-source-6.1_*.deb .
    python -m benchmarks.corpus usr/src/linux-source-6.1.tar.xz data/linux.xz [--megabytes 220]

The corpus contains the ``.c`` files, without duplicates, in the order of their digests. So the same
archive gives the same corpus, in which neighbouring files come from different folders. The last
`VALIDATION_BYTES` are for validation and begin at the start of a file.
"""

import argparse
import hashlib
import lzma
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report

MEGABYTE = 1_000_000
VALIDATION_BYTES = 1 << 22
_FILE_ENDS = b"\0"


def sources(archive: Path) -> Iterator[bytes]:
    """Yields the content of every C file of an archive."""
    with tarfile.open(archive, "r|*") as files:
        for member in files:
            if member.isfile() and member.name.endswith(".c"):
                file = files.extractfile(member)
                assert file is not None, "a file has a content"
                yield file.read()


def joined(contents: Iterator[bytes], training_bytes: int) -> bytes:
    """Joins different contents by zero bytes: a number of bytes for training, followed by those for
    validation.

    Raises:
        ValueError: If the contents are too short.
    """
    by_digest = {hashlib.sha256(content).digest(): content for content in contents}
    training = bytearray()
    validation = bytearray()
    for digest in sorted(by_digest):
        part = training if len(training) < training_bytes else validation
        part += by_digest[digest] + _FILE_ENDS
        if len(validation) >= VALIDATION_BYTES:
            return bytes(training[:training_bytes] + validation[:VALIDATION_BYTES])
    total = len(training) + len(validation)
    raise ValueError(
        f"The archive has {total:,} bytes of different C files, but"
        f" {training_bytes + VALIDATION_BYTES:,} were asked for. Ask for fewer megabytes."
    )


def read(path: Path) -> Tensor:
    """Reads a corpus that this module wrote, as ``uint8``."""
    return torch.frombuffer(bytearray(lzma.decompress(path.read_bytes())), dtype=torch.uint8)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="the sources, as a tar archive")
    parser.add_argument("target", type=Path, help="the file to write, compressed by xz")
    parser.add_argument(
        "--megabytes", type=int, default=220, help="bytes to train on (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    report.said("Reading the archive takes a minute, and compressing the corpus two ...")
    corpus = joined(sources(options.archive), options.megabytes * MEGABYTE)
    options.target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = options.target.with_name(f"{options.target.name}.{os.getpid()}")
    unfinished.write_bytes(lzma.compress(corpus))
    unfinished.replace(options.target)
    digest = hashlib.sha256(corpus).hexdigest()[:16]
    report.said(f"{len(corpus):,} bytes, digest {digest}, in {options.target}")


if __name__ == "__main__":
    main()
