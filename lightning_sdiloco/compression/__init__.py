"""The compressions, which encode outer gradients for the wire. Each file contains one family of
compressions.

A compression converts a flat float32 tensor into a uint8 payload of known or limited size, and
back. Compressions are immutable, and their state is passed in and returned. This package depends
only on tensors, not on models, process groups or settings.
"""

from lightning_sdiloco.compression.base import Compression, State, Traits, weighted_mean
from lightning_sdiloco.compression.blockwise import FP8, MXFP4, Int2, Int4, Int8
from lightning_sdiloco.compression.by_link import ByLink
from lightning_sdiloco.compression.casts import BFloat16, Float32
from lightning_sdiloco.compression.feedback import ErrorFeedback
from lightning_sdiloco.compression.fp4 import FP4
from lightning_sdiloco.compression.names import COMPRESSIONS, resolve
from lightning_sdiloco.compression.sparse import RandomBlock, RandomK, Threshold, TopK

__all__ = [
    "BFloat16",
    "ByLink",
    "COMPRESSIONS",
    "Compression",
    "ErrorFeedback",
    "FP4",
    "FP8",
    "Float32",
    "Int2",
    "Int4",
    "Int8",
    "MXFP4",
    "RandomBlock",
    "RandomK",
    "State",
    "Threshold",
    "TopK",
    "Traits",
    "resolve",
    "weighted_mean",
]
