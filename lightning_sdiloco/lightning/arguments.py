"""Presents a strategy's arguments in ``help()``, on command lines, and on the API page.

``GroupStrategy.__init__`` takes the arguments that all strategies share, and ``base_arguments``
takes those that are specific to a model format. Each argument is documented once, in the function
that takes it.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import TypedDict, Unpack

from lightning_sdiloco.algorithm.config import OTHER_NAMES, refuse_unknown
from lightning_sdiloco.lightning.host import Forwarded

# A command line also passes names that are not arguments so that the strategy can tell users what
# to write instead.
OtherNames = TypedDict("OtherNames", dict.fromkeys(OTHER_NAMES, Any), total=False)  # type: ignore[misc]


class Argument(NamedTuple):
    parameter: inspect.Parameter
    text: str
    """The argument's description from the docstring, with indented continuation lines."""


def arguments_of(function: Callable[..., object], docstring: str | None) -> dict[str, Argument]:
    """Returns the arguments that a function's docstring describes, keyed by name."""
    section = inspect.cleandoc(docstring or "").partition("Args:\n")[2].partition("\n\n")[0]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, flags=re.MULTILINE))
    parameters = inspect.signature(function).parameters
    return {
        name: Argument(parameter, texts[name])
        for name, parameter in parameters.items()
        if name in texts
    }


def docstring_of(summary: str, arguments: Mapping[str, Argument], raises: str) -> str:
    """Builds a class docstring that lists the arguments."""
    described = "\n".join(f"    {name}: {argument.text}" for name, argument in arguments.items())
    return f"{inspect.cleandoc(summary)}\n\nArgs:\n{described}\n\nRaises:\n{raises}"


def take_arguments(strategy: Any, arguments: Iterable[Argument]) -> None:
    """Sets a strategy's signature and makes the strategy refuse all other arguments."""
    parameters = [argument.parameter for argument in arguments]
    strategy.__signature__ = inspect.Signature(parameters)
    init = strategy.__init__

    @wraps(init)
    def checked_init(self: object, *args: Forwarded, **arguments: Forwarded) -> None:
        refuse_other_arguments(type(self), arguments)
        init(self, *args, **arguments)

    self_parameter = next(iter(inspect.signature(init).parameters.values()))
    others = inspect.Parameter(
        "others", inspect.Parameter.VAR_KEYWORD, annotation=Unpack[OtherNames]
    )
    signature = inspect.Signature([self_parameter, *parameters, others])
    checked_init.__signature__ = signature  # type: ignore[attr-defined]
    strategy.__init__ = checked_init


def refuse_other_arguments(strategy: type[object], arguments: Mapping[str, object]) -> None:
    """Refuses unknown arguments, with a hint about where they belong."""
    taken = inspect.signature(strategy).parameters
    ddp_parameters = inspect.signature(DistributedDataParallel).parameters
    for name in arguments.keys() - taken.keys():
        is_for_ddp = name in ddp_parameters or name.startswith("ddp_comm_")
        if "ddp_kwargs" in taken and is_for_ddp:
            raise TypeError(
                f"{strategy.__name__} has no argument {name!r}. This argument belongs to"
                f" DistributedDataParallel: pass ddp_kwargs={{{name!r}: ...}}."
            )
    refuse_unknown(strategy.__name__, taken, arguments)
