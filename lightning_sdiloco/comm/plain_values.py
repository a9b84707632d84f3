"""How plain values travel between ranks: as JSON, with the bytes of tensors behind it. Nothing that comes is executed.

Plain are None, truth values, numbers, texts, bytes, tensors, and lists, tuples, sets and dictionaries of these. A named
tuple arrives as a tuple; whoever sends one makes one of it again.
"""

import json
from typing import Any

import torch
from torch import Tensor

_HEAD = 8  # bytes that say how long the JSON is
_DTYPES = {str(own): own for own in vars(torch).values() if isinstance(own, torch.dtype)}


def encode(value: Any) -> bytes:
    """Returns a plain value as bytes.

    Raises:
        TypeError: If it is none, with the part that is not.

    Examples:
        >>> decode(encode({"loss": (0.5, None), 3: torch.ones(2)}))
        {'loss': (0.5, None), 3: tensor([1., 1.])}
    """
    buffers: list[bytes] = []
    text = json.dumps(_described(value, buffers)).encode()
    return b"".join((len(text).to_bytes(_HEAD, "little"), text, *buffers))


def decode(data: bytes) -> Any:
    """Returns the value of which `encode` made bytes; tensors are on the host."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    try:
        return _Buffers(memoryview(data)[end:]).value(json.loads(bytes(data[_HEAD:end])))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError) as error:
        raise ValueError(f"What came from another rank is no plain value: {error!r}.") from error


def _described(value: Any, buffers: list[bytes]) -> Any:
    """Returns a value as JSON, in which a list begins with its kind."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case bytes() | bytearray() | memoryview():
            buffers.append(bytes(value))
            return ["bytes", len(buffers[-1])]
        case Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            buffers.append(flat.view(torch.uint8).numpy().tobytes())
            return ["tensor", len(buffers[-1]), str(value.dtype), *value.shape]
        case dict():
            pairs = [_described(one, buffers) for pair in value.items() for one in pair]
            return ["dict", *pairs]
        case list() | tuple() | set():
            kind = next(own.__name__ for own in (list, tuple, set) if isinstance(value, own))
            return [kind, *(_described(one, buffers) for one in value)]
    raise TypeError(f"{value!r} is of {type(value)}, and only plain values travel between ranks.")


class _Buffers:
    """What stands behind the JSON, taken from its beginning."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def _take(self, size: int) -> bytearray:
        if not 0 <= size <= len(self._data):
            raise ValueError(f"{size} bytes are said to follow, and {len(self._data)} do")
        taken, self._data = bytearray(self._data[:size]), self._data[size:]
        return taken

    def value(self, told: Any) -> Any:
        if not isinstance(told, list):
            if isinstance(told, dict):
                raise ValueError("an object stands in the place of a value")
            return told
        kind, *parts = told
        match kind:
            case "bytes":
                return bytes(self._take(parts[0]))
            case "tensor":
                size, dtype, *shape = parts
                taken = self._take(size)
                flat = torch.frombuffer(taken, dtype=_DTYPES[dtype]) if size else torch.empty(0, dtype=_DTYPES[dtype])
                return flat.reshape(shape)
            case "list" | "tuple" | "set":
                return {"list": list, "tuple": tuple, "set": set}[kind](map(self.value, parts))
            case "dict":
                keys_and_values = list(map(self.value, parts))
                return dict(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))
        raise ValueError(f"{kind!r} is no kind of value")
