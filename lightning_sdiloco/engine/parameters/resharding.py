"""Resharding: outer state by the name of the parameter, which stays the same however fragments and shards are cut."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.engine.outer.optimizer import OuterState, is_elementwise
from lightning_sdiloco.engine.parameters.sharding import ShardSpec


class OuterParameter(NamedTuple):
    """Holds outer values and outer optimizer state of one parameter, whole."""

    values: Tensor
    state: dict[str, Any]
    rounds: int


def to_parameters(sizes: Mapping[str, int], shards: Sequence[OuterState]) -> dict[str, OuterParameter]:
    """Splits the shards of a fragment into its parameters.

    Args:
        sizes: Number of values of each parameter of the fragment, in its order.
        shards: All shards of the fragment, in their order.

    Examples:
        >>> shards = [OuterState(torch.tensor(part), {}, rounds=3) for part in ([1.0, 2.0], [4.0, 0.0])]
        >>> {name: p.values.tolist() for name, p in to_parameters({"weight": 2, "bias": 1}, shards).items()}
        {'weight': [1.0, 2.0], 'bias': [4.0]}
    """
    first = shards[0]
    whole = {
        key: torch.cat([shard.state[key] for shard in shards]) if is_elementwise(value, first.values) else value
        for key, value in first.state.items()
    }
    values, parts, start = torch.cat([shard.values for shard in shards]), {}, 0
    for name, size in sizes.items():
        stretch = slice(start, start + size)
        state = {
            key: value[stretch].clone() if is_elementwise(first.state[key], first.values) else value
            for key, value in whole.items()
        }
        parts[name] = OuterParameter(values[stretch].clone(), state, first.rounds)
        start += size
    return parts


def to_parameters_by_spec(
    specs: Mapping[str, Sequence[ShardSpec]], shards: Sequence[OuterState]
) -> dict[str, OuterParameter]:
    """Splits the shards of a fragment into its parameters, where ranks hold parts of the parameters.

    Args:
        specs: Which values of each parameter every rank of the group exchanges.
        shards: All shards of the fragment, in the order of the ranks.

    Examples:
        >>> from lightning_sdiloco.engine.parameters.sharding import divided
        >>> specs = {"weight": divided([3], [[[(0, 2)]], [[(2, 3)]]])}
        >>> shards = [OuterState(torch.tensor(part), {}, rounds=3) for part in ([1.0, 2.0], [4.0])]
        >>> to_parameters_by_spec(specs, shards)["weight"].values.tolist()
        [1.0, 2.0, 4.0]
    """
    first, starts, parts = shards[0], [0] * len(shards), {}
    for name, ranks in specs.items():
        parts[name] = OuterParameter(
            _inserted(ranks, starts, [shard.values for shard in shards]),
            {
                key: _inserted(ranks, starts, [shard.state[key] for shard in shards])
                if is_elementwise(value, first.values)
                else value
                for key, value in first.state.items()
            },
            first.rounds,
        )
        starts = [start + spec.length for start, spec in zip(starts, ranks, strict=True)]
    return parts


def _inserted(ranks: Sequence[ShardSpec], starts: Sequence[int], shards: Sequence[Tensor]) -> Tensor:
    whole = shards[0].new_zeros(prod(ranks[0].shape))
    for spec, start, shard in zip(ranks, starts, shards, strict=True):
        spec.insert(whole, shard[start : start + spec.length])
    return whole


def to_shard(parameters: Sequence[OuterParameter], start: int, length: int) -> OuterState:
    """Joins the parameters of a fragment and cuts out a shard."""
    return _joined(parameters, lambda values: _stretch(torch.cat(values), start, length))


def to_shard_by_spec(parameters: Sequence[OuterParameter], specs: Sequence[ShardSpec], length: int) -> OuterState:
    """Joins what this rank exchanges of the parameters of a fragment, where ranks hold parts of them."""

    def cut(values: list[Tensor]) -> Tensor:
        extracted = [spec.extract(value) for spec, value in zip(specs, values, strict=True)]
        return _stretch(torch.cat(extracted), 0, length)

    return _joined(parameters, cut)


def _joined(parameters: Sequence[OuterParameter], cut: Callable[[list[Tensor]], Tensor]) -> OuterState:
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for parameter in parameters for key in parameter.state):
        known = [p.state[key] for p in parameters if key in p.state]
        if any(is_elementwise(p.state[key], p.values) for p in parameters if key in p.state):
            state[key] = cut([p.state.get(key, torch.zeros_like(p.values)) for p in parameters])
        else:
            state[key] = max(known, key=float) if None not in known else known[0]
    return OuterState(cut([p.values for p in parameters]), state, max(parameter.rounds for parameter in parameters))


def _stretch(whole: Tensor, start: int, length: int) -> Tensor:
    """Copies a stretch of a vector; zeros stand for what lies beyond its end."""
    stretch = whole.new_zeros(length)
    part = whole[start : start + length]
    stretch[: part.numel()] = part
    return stretch
