"""Shows the strategies on their API pages with the docstring and the arguments that they get when
they are imported, and the verbs of the engine with what they return.
"""

import inspect
import re
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin

from griffe import (
    Class,
    Docstring,
    ExprSubscript,
    Extension,
    Function,
    Parameter,
    ParameterKind,
    Parameters,
)


class Signatures(Extension):
    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        # The decorator hands the result on without the generator that it is written as.
        takes_turns = any(str(decorator.value) == "takes_turns" for decorator in func.decorators)
        if takes_turns and isinstance(func.returns, ExprSubscript):
            func.returns = func.returns.slice

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
