"""The arguments of a strategy, collected from where each is described: to document them, and to refuse all others."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco.engine import refuse_quorum

_ARGUMENTS, _RAISES = "    Args:\n", "    Raises:\n"


def document(strategy: type[Any], shared: type[Any], model_format: Any, without: Iterable[str] = ()) -> None:
    """Gives a strategy the docstring and the signature that ``help()`` and editors show."""
    arguments = _section(shared.__doc__, _ARGUMENTS)
    for name in without:
        arguments = re.sub(rf"^        {name}: .*\n(?:         .*\n)*", "", arguments, flags=re.MULTILINE)
    arguments += _section(_indented(model_format.base_arguments), _ARGUMENTS)
    raises = _section(shared.__doc__, _RAISES)
    strategy.__doc__ = f"{model_format.summary}\n\n{_ARGUMENTS}{arguments}\n{_RAISES}{raises}    "
    own = inspect.signature(model_format.base_arguments).parameters.values()
    parameters = [
        parameter
        for parameter in inspect.signature(shared.__init__).parameters.values()
        if parameter.name not in ("self", *without) and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    strategy.__signature__ = inspect.Signature(parameters)


def _indented(function: Callable[..., Any]) -> str:
    """Returns a function's docstring, indented as in a class."""
    text = inspect.getdoc(function) or ""
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n")) + "\n"


def _section(docstring: str | None, title: str) -> str:
    """Returns the lines of a section, without its title and the blank line after it."""
    text = f"{(docstring or '').rstrip()}\n".partition(title)[2]
    return text.partition("\n\n")[0].rstrip() + "\n" if text else ""


def refuse_unknown(strategy: type[Any], of_format: Mapping[str, Any]) -> None:
    """Refuses arguments that a strategy does not have."""
    refuse_quorum(of_format)
    known = inspect.signature(strategy.base_arguments).parameters
    for name in of_format.keys() - known.keys():
        of_ddp = name in inspect.signature(DistributedDataParallel).parameters or name.startswith("ddp_comm_")
        advice = (
            f"It belongs to DistributedDataParallel: give ddp_kwargs={{{name!r}: ...}}"
            if of_ddp and "ddp_kwargs" in known
            else f"help({strategy.__name__}) lists those that it has"
        )
        raise TypeError(f"{strategy.__name__} has no argument {name!r}. {advice}.")
