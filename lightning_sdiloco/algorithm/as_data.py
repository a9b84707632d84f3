"""The conversion of settings to plain data for checkpoints, with support for older formats.

Numbers, strings and None are stored unchanged. The elements of lists and maps are converted in the
same way. A policy or compression is stored as ``{"kind": name, "fields": {...}}``. Fields that have
their default values are omitted, so a checkpoint remains valid when a field with a default is added
later.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from numbers import Number
from typing import Any, TypedDict, TypeGuard

from lightning_sdiloco.compression import Compression

Data = Any
"""A setting in a form that JSON can represent."""

Fields = dict[str, Data]
"""The arguments of a class, keyed by name. The class checks their types."""


class SavedObject(TypedDict):
    """A policy or compression in the form that a checkpoint stores."""

    kind: str
    fields: Fields


def as_data(value: object) -> Data:
    """Converts a setting to data that JSON can represent.

    Examples:
        >>> from lightning_sdiloco.algorithm.schedule import Selective
        >>> as_data(Selective(threshold=0.4))
        {'kind': 'Selective', 'fields': {'threshold': 0.4}}
        >>> as_data(["strided", None, 4])
        ['strided', None, 4]
    """
    if isinstance(value, Number) and hasattr(value, "item"):
        # A NumPy scalar.
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): as_data(part) for name, part in value.items()}
    if isinstance(value, Sequence):
        return [as_data(part) for part in value]
    if _has_fields(value):
        chosen = {
            name: as_data(part) for name, part, default in _fields_of(value) if part != default
        }
        return _object(type(value).__qualname__, chosen)
    return repr(value)


def describes(data: object, value: object) -> bool:
    """Returns whether data describes a setting. Missing fields are assumed to have their default
    values.

    Examples:
        >>> from lightning_sdiloco.algorithm.schedule import Selective
        >>> describes(as_data(Selective()), Selective()), describes(as_data(Selective()), Selective(0.4))
        (True, False)
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not isinstance(data, list) or len(data) != len(value):
            return False
        return all(map(describes, data, value))
    if not _has_fields(value):
        return bool(data == as_data(value))
    if not _is_object(data):
        # Text from an older checkpoint that could not be parsed.
        return bool(data == repr(value))
    saved = dict(data["fields"])
    for name, part, default in _fields_of(value):
        if name not in saved and part != default:
            return False
        if name in saved and not describes(saved.pop(name), part):
            return False
    return data["kind"] == type(value).__qualname__ and not saved


def as_text(data: object) -> str:
    """Formats data as the Python code that a user would write.

    Examples:
        >>> as_text({"kind": "Selective", "fields": {"threshold": 0.4}})
        'Selective(threshold=0.4)'
    """
    if _is_object(data):
        arguments = ", ".join(f"{name}={as_text(part)}" for name, part in data["fields"].items())
        return f"{data['kind']}({arguments})"
    if isinstance(data, list):
        return f"[{', '.join(map(as_text, data))}]"
    return repr(data)


def read_text(text: str) -> Data:
    """Parses the ``repr`` of a setting, as stored in older checkpoints, into data.

    Examples:
        >>> read_text("Selective(threshold=0.3, most=4)")
        {'kind': 'Selective', 'fields': {'threshold': 0.3, 'most': 4}}
        >>> read_text("'fp4'"), read_text("SGD")
        ('fp4', 'SGD')
    """
    try:
        return _read(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return text


def _read(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        arguments = {str(argument.arg): _read(argument.value) for argument in node.keywords}
        return _object(ast.unparse(node.func), arguments)
    if isinstance(node, ast.List | ast.Tuple):
        return [_read(element) for element in node.elts]
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    return ast.literal_eval(node)


def _object(kind: str, arguments: Fields) -> SavedObject:
    return {"kind": kind, "fields": arguments}


def _is_object(data: object) -> TypeGuard[SavedObject]:
    return isinstance(data, dict) and data.keys() == {"kind", "fields"}


def _has_fields(value: object) -> bool:
    return is_dataclass(value) or isinstance(value, Compression)


def _fields_of(value: object) -> Iterator[tuple[str, object, object]]:
    """Yields the name, value and default of each field that appears in the ``repr``."""
    if not is_dataclass(value):
        for name, part in vars(value).items():
            yield name, part, MISSING
        return
    for field in fields(value):
        if field.repr:
            yield field.name, getattr(value, field.name), _default(field)


def _default(field: Field[object]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
