"""The state of an inner optimizer as one rank holds it, sharded or not, as plain values and tensors."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_sdiloco.engine.parameters.sharding import is_sharded, like, local


def own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer, with what this rank holds in place of sharded tensors."""
    state = optimizer.state_dict()
    own = {index: {key: _held(value) for key, value in entry.items()} for index, entry in state["state"].items()}
    divided = {
        index: [key for key, value in entry.items() if isinstance(value, Tensor) and is_sharded(value)]
        for index, entry in state["state"].items()
    }
    return {**state, "state": own, "divided": divided}


def take_up_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restores what `own_state` returned, for the same parameters, sharded in the same way."""
    divided = saved.get("divided", {})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: like(parameters[index], value) if key in divided.get(index, ()) else value
            for key, value in entry.items()
        }
        for index, entry in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def _held(value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value
