"""Names of a model's parameters: which of them are trained, and what they are called."""

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco.algorithm import Parameter
from lightning_sdiloco.engine.parameters.sharding import reshard
from lightning_sdiloco.errors import AgreementError


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module that the user wrote, inside DistributedDataParallel, torch.compile and Fabric's wrapper."""
    while True:
        inner = _inner(model)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _inner(model: nn.Module) -> object:
    # A wrapper of another library may offer the module as a property. A child of that name is the user's own.
    offers = isinstance(getattr(type(model), "module", None), property)
    if offers or isinstance(model, DistributedDataParallel):
        return model.module
    return getattr(model, "_orig_mod", None)


def clean_name(name: str) -> str:
    """Returns the name of a parameter without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name, in the order of ``named_parameters()``; tied ones appear once."""
    reshard(model)
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def described(parameters: dict[str, Tensor]) -> list[Parameter]:
    """Describes parameters as the partition needs to know them: name, size in bytes, number of dimensions."""
    return [Parameter(name, p.numel() * p.element_size(), p.ndim) for name, p in parameters.items()]


def aliases(model: nn.Module) -> dict[str, str]:
    """Maps the further names of tied trainable parameters to the first name of the same parameter."""
    first: dict[int, str] = {}
    further = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), clean_name(name))
        if parameter.requires_grad and known != clean_name(name):
            further[clean_name(name)] = known
    return further


def require_coverage(model: nn.Module, known: Collection[int]) -> None:
    """Refuses a model in which a parameter has become trainable that is in no fragment."""
    found, left, seen = list[Tensor | None](), list[nn.Module | None]([model]), set[int]()
    while left:
        module = left.pop()
        if module is None:
            continue
        if module._parameters:
            found += module._parameters.values()
        if module._modules and id(module) not in seen:
            seen.add(id(module))
            left += module._modules.values()
    new = {id(one) for one in found if one is not None and id(one) not in known and one.requires_grad}
    if new:
        first = next(clean_name(name) for name, parameter in model.named_parameters() if id(parameter) in new)
        raise AgreementError(
            f"{len(new)} parameters have become trainable, such as {first!r}: they are in no fragment, and"
            " every group would train its own. With Lightning, change what is trainable between epochs, at the latest"
            " in on_train_epoch_start; in a loop of your own call recut() after it, in all ranks."
        )
