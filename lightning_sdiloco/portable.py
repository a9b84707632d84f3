"""Outer state by the name of the parameter: what stays the same when fragments or shards are cut in another way."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.outer import Stepped


class OuterParameter(NamedTuple):
    """Outer values and outer optimizer state of one parameter.

    Attributes:
        values: The values, flat, float32, shape ``(numel,)``.
        state: State of the outer optimizer. Tensors of the shape of the values belong to single values, such as a
            momentum; everything else, such as a count of steps, belongs to the whole parameter.
        rounds: Outer steps so far.
    """

    values: Tensor
    state: dict[str, Any]
    rounds: int


def taken_apart(sizes: Mapping[str, int], shards: Sequence[Stepped]) -> dict[str, OuterParameter]:
    """Takes a fragment apart by parameter.

    Args:
        sizes: Number of values of each parameter of the fragment, in its order.
        shards: All shards of the fragment, in their order.

    Examples:
        >>> shards = [Stepped(torch.tensor(part), {}, rounds=3) for part in ([1.0, 2.0], [4.0, 0.0])]
        >>> {name: p.values.tolist() for name, p in taken_apart({"weight": 2, "bias": 1}, shards).items()}
        {'weight': [1.0, 2.0], 'bias': [4.0]}
    """
    first = shards[0]
    whole = {
        key: torch.cat([shard.state[key] for shard in shards]) if _is_of_values(value, first.values) else value
        for key, value in first.state.items()
    }
    values, parts, start = torch.cat([shard.values for shard in shards]), {}, 0
    for name, size in sizes.items():
        stretch = slice(start, start + size)
        state = {
            key: value[stretch].clone() if _is_of_values(first.state[key], first.values) else value
            for key, value in whole.items()
        }
        parts[name] = OuterParameter(values[stretch].clone(), state, first.rounds)
        start += size
    return parts


def put_together(parameters: Sequence[OuterParameter], start: int, length: int) -> Stepped:
    """Makes a shard of a fragment out of its parameters.

    A parameter without a state, such as one that has never been stepped, gets zeros where others have values of their
    own. Where they have counts, the highest holds.

    Args:
        parameters: All parameters of the fragment, in its order.
        start: Position of the first value of the shard.
        length: Number of its values. Those beyond the end of the fragment are zeros.
    """
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for parameter in parameters for key in parameter.state):
        known = [p.state[key] for p in parameters if key in p.state]
        if any(_is_of_values(p.state[key], p.values) for p in parameters if key in p.state):
            whole = torch.cat([p.state.get(key, torch.zeros_like(p.values)) for p in parameters])
            state[key] = _stretch(whole, start, length)
        else:
            state[key] = max(known, key=float) if None not in known else known[0]
    values = _stretch(torch.cat([p.values for p in parameters]), start, length)
    return Stepped(values, state, max(parameter.rounds for parameter in parameters))


def _is_of_values(value: Any, values: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == values.shape


def _stretch(whole: Tensor, start: int, length: int) -> Tensor:
    stretch = whole.new_zeros(length)
    part = whole[start : start + length]
    stretch[: part.numel()] = part
    return stretch
