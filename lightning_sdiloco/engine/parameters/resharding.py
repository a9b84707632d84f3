"""Outer state by the name of the parameter: what stays the same when fragments or shards are cut in another way."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.engine.outer.optimizer import Stepped, is_of_values
from lightning_sdiloco.engine.parameters.sharding import Place


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
        key: torch.cat([shard.state[key] for shard in shards]) if is_of_values(value, first.values) else value
        for key, value in first.state.items()
    }
    values, parts, start = torch.cat([shard.values for shard in shards]), {}, 0
    for name, size in sizes.items():
        stretch = slice(start, start + size)
        state = {
            key: value[stretch].clone() if is_of_values(first.state[key], first.values) else value
            for key, value in whole.items()
        }
        parts[name] = OuterParameter(values[stretch].clone(), state, first.rounds)
        start += size
    return parts


def taken_apart_by_place(places: Mapping[str, Sequence[Place]], shards: Sequence[Stepped]) -> dict[str, OuterParameter]:
    """Takes a fragment apart by parameter, where ranks hold parts of the parameters.

    Args:
        places: Where the values of each parameter lie, on every rank of the group.
        shards: All shards of the fragment, in the order of the ranks.

    Examples:
        >>> from lightning_sdiloco.engine.parameters.sharding import shared
        >>> places = {"weight": shared([3], [[[(0, 2)]], [[(2, 3)]]])}
        >>> shards = [Stepped(torch.tensor(part), {}, rounds=3) for part in ([1.0, 2.0], [4.0])]
        >>> taken_apart_by_place(places, shards)["weight"].values.tolist()
        [1.0, 2.0, 4.0]
    """
    first, starts, parts = shards[0], [0] * len(shards), {}
    for name, ranks in places.items():
        parts[name] = OuterParameter(
            _put_in_places(ranks, starts, [shard.values for shard in shards]),
            {
                key: _put_in_places(ranks, starts, [shard.state[key] for shard in shards])
                if is_of_values(value, first.values)
                else value
                for key, value in first.state.items()
            },
            first.rounds,
        )
        starts = [start + place.length for start, place in zip(starts, ranks, strict=True)]
    return parts


def _put_in_places(ranks: Sequence[Place], starts: Sequence[int], shards: Sequence[Tensor]) -> Tensor:
    whole = shards[0].new_zeros(prod(ranks[0].shape))
    for place, start, shard in zip(ranks, starts, shards, strict=True):
        place.put_into(whole, shard[start : start + place.length])
    return whole


def put_together(parameters: Sequence[OuterParameter], start: int, length: int) -> Stepped:
    """Makes a shard of a fragment out of its parameters.

    A parameter without a state, such as one that has never been stepped, gets zeros where others have values of their
    own. Where they have counts, the highest holds.

    Args:
        parameters: All parameters of the fragment, in its order.
        start: Position of the first value of the shard.
        length: Number of its values. Those beyond the end of the fragment are zeros.
    """
    return _put_together(parameters, lambda values: _stretch(torch.cat(values), start, length))


def put_together_by_place(parameters: Sequence[OuterParameter], places: Sequence[Place], length: int) -> Stepped:
    """Makes a shard of a fragment out of its parameters, where ranks hold parts of the parameters.

    Args:
        parameters: As in `put_together`.
        places: Where the values of each parameter lie on this rank.
        length: Number of values of the shard. Those beyond what the rank exchanges are zeros.
    """

    def cut(values: list[Tensor]) -> Tensor:
        taken = [place.taken_from(value) for place, value in zip(places, values, strict=True)]
        return _stretch(torch.cat(taken), 0, length)

    return _put_together(parameters, cut)


def _put_together(parameters: Sequence[OuterParameter], cut: Callable[[list[Tensor]], Tensor]) -> Stepped:
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for parameter in parameters for key in parameter.state):
        known = [p.state[key] for p in parameters if key in p.state]
        if any(is_of_values(p.state[key], p.values) for p in parameters if key in p.state):
            state[key] = cut([p.state.get(key, torch.zeros_like(p.values)) for p in parameters])
        else:
            state[key] = max(known, key=float) if None not in known else known[0]
    return Stepped(cut([p.values for p in parameters]), state, max(parameter.rounds for parameter in parameters))


def _stretch(whole: Tensor, start: int, length: int) -> Tensor:
    stretch = whole.new_zeros(length)
    part = whole[start : start + length]
    stretch[: part.numel()] = part
    return stretch
