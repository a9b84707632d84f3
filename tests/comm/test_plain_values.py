"""What travels between ranks arrives as it was, bit for bit, and what is no plain value is refused at both ends."""

import pickle
from typing import Any

import pytest
import torch

from lightning_sdiloco.comm.communicator import decode, encode


def test_plain_values_arrive_as_they_were() -> None:
    value = {
        "none": [None, True, False, 3, -(1 << 80), 0.1, float("inf"), "ü\ud800"],
        (1, "key"): ({2, 3}, b"bytes", b"", [], ()),
        4: {"nested": {"deeper": [[]]}},
    }
    assert decode(encode(value)) == value
    assert [type(one) for one in decode(encode([True, 1, 1.0]))] == [bool, int, float]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_tensors_arrive_bit_for_bit_with_shape_and_dtype(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 4).to(dtype).T, torch.zeros(0, 2, dtype=dtype), torch.ones((), dtype=dtype)]
    for sent, arrived in zip(tensors, decode(encode(tensors)), strict=True):
        assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
        assert torch.equal(arrived, sent)
        # It may be written to.
        arrived.zero_()


def test_a_nan_keeps_its_bits() -> None:
    sent = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert decode(encode(sent)).view(torch.int32).item() == 0x7FC12345


@pytest.mark.parametrize("value", [object(), ValueError("text"), torch.float32, lambda: None, {1: [object()]}])
def test_what_is_no_plain_value_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="only plain values travel"):
        encode(value)


def framed(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was executed",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps(Bomb()),
        framed("{}"),
        framed('["call", "os.system"]'),
        framed('["bytes", 99]'),
        framed('["tensor", 0, "float32", 1000000]'),
        framed('["tensor", -1, "torch.float32"]'),
        framed('["dict", 1]'),
        framed("[" * 100000),
    ],
)
def test_what_is_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no plain value"):
        decode(data)
