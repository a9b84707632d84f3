"""Shows the strategies on the API page with the docstring and the arguments that they get when
they are imported.
"""

import inspect
import re
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin

from griffe import Class, Docstring, Extension, Function, Parameter, ParameterKind, Parameters


class Signatures(Extension):
    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        if cls.module.path != "lightning_sdiloco.lightning_pytorch" or not cls.name.endswith(
            "Strategy"
        ):
            return
        strategy = getattr(import_module(cls.module.path), cls.name)
        cls.docstring = Docstring(strategy.__doc__, parent=cls, parser="google")
        parameters = [
            Parameter(
                parameter.name,
                annotation=written(parameter.annotation),
                kind=ParameterKind[parameter.kind.name.lower()],
                default=None if parameter.default is parameter.empty else repr(parameter.default),
            )
            for parameter in inspect.signature(strategy).parameters.values()
        ]
        cls.set_member("__init__", Function("__init__", parameters=Parameters(*parameters)))


def written(hint: Any) -> str:
    """Writes a type as people do: Union[int, Literal['auto']] is int | Literal['auto']."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(written, get_args(hint)))
    return (
        "None"
        if hint is type(None)
        else re.sub(r"\b(?:\w+\.)+(\w)", r"\1", inspect.formatannotation(hint))
    )
