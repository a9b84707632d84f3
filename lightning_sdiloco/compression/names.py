"""The names of compressions."""

from collections.abc import Mapping

from lightning_sdiloco.compression.base import Compression
from lightning_sdiloco.compression.blockwise import FP8, MXFP4, Int2, Int4, Int8
from lightning_sdiloco.compression.casts import BFloat16, Float32
from lightning_sdiloco.compression.feedback import ErrorFeedback
from lightning_sdiloco.compression.fp4 import FP4
from lightning_sdiloco.compression.sparse import RandomBlock, RandomK, Threshold, TopK

COMPRESSIONS: Mapping[str, Compression] = {
    "fp32": Float32(),
    "bf16": BFloat16(),
    "fp8": FP8(),
    "int8": Int8(),
    "int4": Int4(),
    "fp4": FP4(),
    "mxfp4": MXFP4(),
    "int2": Int2(),
    "sparse": ErrorFeedback(TopK(1 / 64, Int2()), decay=0.95),
    "top_k": TopK(1 / 64, Int2()),
    "random_k": RandomK(16, FP4()),
    "random_block": RandomBlock(16, FP4()),
    "threshold": Threshold(1 / 64, Int2(), every=10),
}
"""The named compressions. ``"sparse"`` already has error feedback. All other names accept a suffix
for error feedback, as in ``"top_k+memory"``."""

MEMORY = "+memory"
"""The suffix that adds error feedback to a named compression."""


def resolve(compression: str | Compression) -> Compression:
    """Returns the compression that a setting names.

    Args:
        compression: A compression, which is returned unchanged, or a name from ``COMPRESSIONS``.
            The suffix ``"+memory"`` adds error feedback with a ``decay`` of 1.

    Returns:
        The compression.

    Raises:
        ValueError: If ``compression`` is neither a compression nor a known name.

    Examples:
        >>> resolve("fp4"), resolve("fp4+memory")
        (FP4(), ErrorFeedback(compression=FP4(), decay=1.0))
    """
    if isinstance(compression, Compression):
        return compression
    if isinstance(compression, str) and compression in COMPRESSIONS:
        return COMPRESSIONS[compression]
    if isinstance(compression, str) and compression.removesuffix(MEMORY) in COMPRESSIONS:
        return ErrorFeedback(COMPRESSIONS[compression.removesuffix(MEMORY)])
    if compression == "auto":
        raise ValueError(
            "compression='auto' works only with a Trainer, which measures the link first. Choose a"
            " compression such as 'fp4' here. To see which compressions a link can carry, run"
            " sdiloco plan --bandwidth."
        )
    raise ValueError(
        f"compression={compression!r} is unknown. Choose one of"
        f" {', '.join(map(repr, COMPRESSIONS))}, optionally with the suffix {MEMORY!r}. You can"
        " also pass an instance (not a class) of `lightning_sdiloco.compression.Compression`."
    )
