"""Agreement before the first step: settings and model must be the same on all ranks."""

from collections.abc import Mapping
from functools import cache
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_sdiloco.algorithm import digest
from lightning_sdiloco.comm import Communicator, Topology, ranks_in
from lightning_sdiloco.compression import FP4
from lightning_sdiloco.engine.outer import nesterov_step
from lightning_sdiloco.engine.shards import clean_name, described_sharding, is_sharded, local, ranks_of, reshard


def require_same_settings(settings: Mapping[str, str], world: Communicator) -> None:
    """Refuses settings that differ between ranks. All ranks must call it."""
    differences = _differences(world.all_gather_object(dict(settings)))
    if differences:
        raise ValueError(
            f"The settings of the strategy differ between ranks: {'; '.join(differences)}. All ranks must use the same."
            " Start them with the same script and configuration."
        )


def require_same_model(model: nn.Module, world: Communicator) -> None:
    """Refuses models whose parameters differ in name, shape, dtype or order between ranks. All ranks must call it."""
    signatures = world.all_gather_object(_signature(model))
    # Tensors are paired by their order, so that must be the same too.
    places = [{name: f"in place {place}" for place, name in enumerate(signature)} for signature in signatures]
    differences = _differences(signatures) or _differences(places)
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise ValueError(
            f"The model differs between ranks: {shown}. All ranks must build the same model, with the same names,"
            " shapes and dtypes. Do not let its construction depend on the rank."
        )
    is_on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if differences := _differences(
        world.all_gather_object({"what known values give": rounding() if is_on_host else ""})
    ):
        raise ValueError(
            f"The processors of these ranks round differently: {differences[0]}. Worker groups would drift apart. Train"
            " on machines whose processors have the same instructions, or set ATEN_CPU_CAPABILITY=default on all ranks,"
            " for those that every processor has."
        )


@cache
def rounding() -> str:
    """Returns what this processor makes of known values, in what has to give the same bits in all groups."""
    # No random numbers: those of torch differ between processors.
    known = (torch.arange(3 * 4099, device="cpu") * 7919 % 2003 - 1001).to(torch.float32) / 997
    values, gradient, momentum = known.view(3, -1).clone().unbind()
    codec, mean = FP4(), torch.empty_like(gradient)
    codec.mean([(codec.encode(gradient), 1 / 3), (codec.encode(momentum), 1.7)], mean)
    nesterov_step(values, mean, momentum, lr=0.7, factor=0.9)
    return f"{digest(mean) % 2**64:x}"


def require_own_group(model: nn.Module, topology: Topology) -> None:
    """Refuses a model that is trained by other ranks than those of its worker group."""
    for name, parameter in model.named_parameters():
        if others := sorted(set(ranks_of(parameter)) - set(topology.ranks)):
            raise ValueError(
                f"The parameter {name!r} is sharded over ranks of several worker groups: {_listed(others)} do not"
                f" belong to that of this rank. Shard the model over a mesh of {_listed(list(topology.ranks))}."
            )
    for name, part in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__):
            raise ValueError(
                f"{_part(name)} is wrapped in FullyShardedDataParallel, which keeps flat parts of its parameters that"
                " the worker groups cannot exchange by name. Use fully_shard over the ranks of the worker group."
            )
        ranks = ranks_in(part.process_group) if isinstance(part, DistributedDataParallel) else list(topology.ranks)
        # A single rank without others, such as a simulated worker group, may count itself as any.
        if ranks != list(topology.ranks) and max(len(ranks), topology.group_size) > 1:
            raise ValueError(
                f"{_part(name)} is wrapped in DistributedDataParallel over {_listed(ranks)}, and the worker group of"
                f" this rank is {_listed(list(topology.ranks))}: gradients must be averaged inside the group and"
                " nowhere else, or all groups train in step. Give the model unwrapped if groups have one rank, and"
                " otherwise wrap it with DistributedDataParallel(model,"
                f" process_group=WorkerGroups({topology.num_groups}).process_group). Fabric does so with"
                " strategy='streaming_diloco'."
            )


def _part(name: str) -> str:
    # The outermost module of a wrapper is the model itself, whatever the wrapper calls it.
    own = ".".join(word for word in name.split(".") if word not in ("_orig_mod", "_forward_module"))
    return f"The module {own!r} of the model" if own else "The model"


def _listed(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def align_model(model: nn.Module, topology: Topology) -> None:
    """Gives all groups the parameters and buffers of the first, unless they are the same already. All must call it."""
    if not is_aligned(model, topology):
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor, topology)


def broadcast(tensor: Tensor, topology: Topology) -> None:
    """Gives all ranks a tensor of rank 0; of a sharded one, the part that their like in the first group holds."""
    (topology.peers if is_sharded(tensor) else topology.world).broadcast(local(tensor))


def is_aligned(model: nn.Module, topology: Topology, with_buffers: bool = True) -> bool:
    """Tells whether all groups hold the same parameters and buffers, bit for bit. All ranks must call it."""
    reshard(model)
    tensors = [*model.parameters(), *(model.buffers() if with_buffers else ())]
    whole = [digest(local(tensor)) for tensor in tensors if not is_sharded(tensor)]
    parts = [digest(local(tensor)) for tensor in tensors if is_sharded(tensor)]
    ranks = topology.world.all_gather_object((whole, parts))
    same_parts = all(ranks[rank][1] == ranks[rank % topology.group_size][1] for rank in range(len(ranks)))
    return same_parts and all(other == ranks[0][0] for other, _ in ranks)


def _signature(model: nn.Module) -> dict[str, str]:
    """Describes what must be the same of every parameter and buffer, in their order."""
    found = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        kind = "without a shape" if is_lazy(tensor) else f"{tuple(tensor.shape)} {tensor.dtype}"
        sharding = "" if is_lazy(tensor) else described_sharding(tensor)
        frozen = " (frozen)" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        found[clean_name(name)] = kind + sharding + frozen
    return found


def _differences(ranks: list[dict[str, str]]) -> list[str]:
    """Returns a sentence for every key whose text is not the same on all ranks."""
    names = dict.fromkeys(name for texts in ranks for name in texts)
    differences = []
    for name in names:
        by_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(ranks):
            by_text.setdefault(texts.get(name, "missing"), []).append(rank)
        if len(by_text) > 1:
            values = ", ".join(
                f"{text} on rank{'s' if len(holders) > 1 else ''} {', '.join(map(str, holders[:8]))}"
                f"{', ...' if len(holders) > 8 else ''}"
                for text, holders in by_text.items()
            )
            differences.append(f"{name} is {values}")
    return differences
