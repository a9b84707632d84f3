"""How a group recovers whose local parameters are no longer finite: it takes the outer ones."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.parameters.sharding import local, reshard


def recover(
    model: nn.Module,
    fragments: Sequence[FragmentState],
    landed: int,
    inner_optimizers: Sequence[Optimizer],
    in_group: Communicator,
) -> None:
    """Takes the outer values wherever local ones are not finite. In-group collective."""
    reshard(model)
    # All ranks of the group do the same, also where they hold different parts.
    finite = _on_all_ranks([fragment.layout.is_finite() for fragment in fragments], in_group)
    for fragment, is_finite in zip(fragments, finite, strict=True):
        if fragment.index == landed:
            fragment.buffers.write()
        elif not is_finite:
            fragment.write_outer(in_group)
        else:
            continue
        parameters = fragment.layout.parameters
        kept = _on_all_ranks([_has_finite_state(inner_optimizers, parameter) for parameter in parameters], in_group)
        for optimizer in inner_optimizers:
            for parameter, keep in zip(parameters, kept, strict=True):
                if not keep:
                    optimizer.state.pop(parameter, None)


def _on_all_ranks(facts: list[bool], in_group: Communicator) -> list[bool]:
    """Tells which facts hold on all ranks of the group."""
    return [all(ranks) for ranks in zip(*in_group.all_gather_object(facts), strict=True)]


def _has_finite_state(optimizers: Sequence[Optimizer], parameter: Tensor) -> bool:
    """Tells whether what this rank holds of the inner optimizer state of a parameter is finite."""
    return all(
        bool(local(value).isfinite().all())
        for optimizer in optimizers
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    )
