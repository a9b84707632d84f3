"""Implements the ``sdiloco`` command by turning function parameters into options.

To add a subcommand, create a file with a function of the same name that returns the text to print,
and list the file in `COMMANDS`. jsonargparse reads the function's type hints and docstring. The
first paragraph of the docstring becomes the summary, and lines that start with $ become examples in
the help. A parameter without a default is positional, a bool is a flag, and an option for a list
can be repeated. The fields of a dataclass parameter become options that multiple subcommands can
share. To report a user error, raise a ``ValueError``. The error's message is printed to stderr, and
the command exits with code 2. A subcommand is imported only when it runs, because some subcommands
do not need torch. The hub distribution contains only those that do not.
"""

import ast
import os
import re
import sys
from argparse import SUPPRESS, Action
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import chain, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter

COMMANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "demo": ("demo", ("demo",)),
    "doctor": ("doctor", ("doctor",)),
    "hub": ("hub", ("hub", "evict", "end", "amend", "backup", "rollback")),
    "keys": ("keys", ("init", "add", "revoke")),
    "plan": ("plan", ("plan",)),
    "report": ("report", ("report",)),
    "schedule": ("schedule", ("schedule",)),
    "simulate": ("simulate.command", ("simulate",)),
    "status": ("status", ("status",)),
    "completion": ("completion", ("completion",)),
}
"""Each subcommand's module and functions.

A function whose name differs from the subcommand's is a nested subcommand.
"""

_WITH_CLASSES = ("--model", "--data", "--cli", "--quorum", "--config", "--set", "--methods")
"""The options that accept class paths or files that contain class paths."""

_RATES = {"kbit": 1e-6, "Mbit": 1e-3, "Gbit": 1.0, "Tbit": 1e3}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNITS: Mapping[str, Mapping[str, float]] = {
    "--params": {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
    **dict.fromkeys(
        ("--bandwidth", "--hub-bandwidth"),
        {**_RATES, **{f"{unit}/s": size for unit, size in _RATES.items()}},
    ),
    **dict.fromkeys(("--step-time", "--round-trip", "--grace"), _SECONDS),
}
"""The options that accept numbers with a unit, and each unit's size."""

_EXAMPLES: Mapping[str, str] = {
    "--params": "1B",
    **dict.fromkeys(("--bandwidth", "--hub-bandwidth"), "100Mbit"),
    "--step-time": "500ms",
    "--round-trip": "50ms",
    "--grace": "10s",
}
"""An example of a number with a unit, for the help text of each option."""

_NEED_A_UNIT = ("--bandwidth", "--hub-bandwidth")
"""The options that require a unit, because link speeds are given in both Mbit/s and Gbit/s."""


def main(args: list[str] | None = None) -> None:
    """Runs a subcommand and prints its result."""
    words = sys.argv[1:] if args is None else args
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        words = without_units(words)
    except ValueError as error:
        _Parser(prog=f"sdiloco {command}").error(str(error))
    _search_current_folder(words)
    parser = parser_of([command])
    options = parser.parse_args(words)
    # Objects instead of class paths; the method was renamed in jsonargparse 4.49.
    options = getattr(parser, "instantiate", parser.instantiate_classes)(options)
    name = options.command
    arguments = options[name]
    function = getattr(arguments, "command", None) or name
    prog = f"sdiloco {name}"
    if function != name:
        prog = f"{prog} {function}"
        arguments = arguments[function]
    try:
        text = _called(_function(name, function), arguments)
    except ValueError as error:
        _Parser(prog=prog).error(str(error))
    # All ranks except the first return an empty string.
    if text:
        print(text)


def without_units(args: Sequence[str]) -> list[str]:
    """Converts numbers with a unit, such as 1B or 100Mbit, to the command's units.

    Raises:
        ValueError: If a unit is unknown or a required unit is missing.
    """
    plain = list(args)
    for index, arg in enumerate(args):
        option, equals, text = arg.partition("=")
        name = option.replace("_", "-")
        if name in _UNITS:
            if equals:
                plain[index] = f"{option}={_without_unit(name, text)}"
            elif index + 1 < len(args):
                plain[index + 1] = _without_unit(name, args[index + 1])
    return plain


def _without_unit(option: str, text: str) -> str:
    """Converts a number with a unit, and leaves any other text unchanged."""
    number = re.fullmatch(r"([+-]?[\d.]+(?:e[+-]?\d+)?) ?([A-Za-z/]*)", text)
    if number is None:  # the parser refuses it, with the option's help
        return text
    value, unit = number.groups()
    units = _UNITS[option]
    if unit in units:
        return f"{float(value) * units[unit]:.12g}"
    if unit:
        raise ValueError(
            f"{option} {text} has the unknown unit {unit!r}. Use one of {', '.join(units)}."
        )
    if option in _NEED_A_UNIT:
        raise ValueError(
            f"{option} {text} has no unit. Use one of {', '.join(units)}, as in {value}Mbit."
        )
    return text


def _search_current_folder(args: Sequence[str]) -> None:
    """Adds the current folder to the import path if a class path needs a module from there."""
    for option, following in pairwise([*args, ""]):
        name, _, value = option.partition("=")
        if name.split(".")[0] in _WITH_CLASSES:
            for module in _modules_named_in(value or following):
                is_missing = module not in sys.modules and not PathFinder.find_spec(module)
                if is_missing and PathFinder.find_spec(module, [""]):
                    sys.path.append("")
                    return


def _modules_named_in(value: str) -> list[str]:
    """Returns the top-level modules of the class paths in a value or in a file."""
    text = value
    if os.path.isfile(value) and os.access(value, os.R_OK):
        text = Path(value).read_text(errors="replace")
    return re.findall(r"(?<![\w.])([^\W\d]\w*)\.[^\W\d]", text)


def parser_of(names: Container[str]) -> ArgumentParser:
    """Creates the parser.

    Only the named subcommands are imported. For all others, only the summaries are read.
    """
    version = import_module("lightning_sdiloco").__version__
    parser = _Parser(prog="sdiloco", description="Tools for Streaming DiLoCo.", version=version)
    subcommands = parser.add_subcommands(dest="command")
    for name, functions in _installed().items():
        has_function = name in functions
        summary = " ".join(_summary(name, function) for function in functions)
        if has_function:
            summary = _summary(name, name)
        subparser = _Parser(description=summary)
        subcommands.add_subcommand(name, subparser, help=summary)
        if name not in names:
            continue
        # From the top down, because jsonargparse accepts no other order.
        if has_function:
            _add_arguments(subparser, _function(name, name))
        inner_functions = [function for function in functions if function != name]
        if inner_functions:
            inner = subparser.add_subcommands(dest="command", required=not has_function)
            for function in inner_functions:
                nested = _Parser(description=_summary(name, function))
                _add_arguments(nested, _function(name, function))
                inner.add_subcommand(function, nested, help=_summary(name, function))
    return parser


def _function(name: str, function: str) -> Callable[..., str]:
    """Imports a subcommand's function."""
    command: Callable[..., str] = getattr(
        import_module(f"lightning_sdiloco.tools.{COMMANDS[name][0]}"), function
    )
    return command


def _installed() -> dict[str, tuple[str, ...]]:
    """Returns the functions of each installed subcommand."""
    return {name: functions for name, (_, functions) in COMMANDS.items() if _file_of(name).exists()}


def _file_of(name: str) -> Path:
    return Path(__file__).parent / f"{COMMANDS[name][0].replace('.', '/')}.py"


@cache
def _summary(name: str, function: str) -> str:
    """Returns the first paragraph of a function's docstring without importing the function."""
    module = ast.parse(_file_of(name).read_text(encoding="utf-8"))
    (definition,) = (
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    summary = (ast.get_docstring(definition) or "").partition("\n\n")[0]
    return " ".join(summary.split())


def _add_arguments(parser: "_Parser", command: Callable[..., str]) -> None:
    """Adds a function's parameters to a parser, and the function's examples to the help."""
    shared = _shared_options(command)
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip=set(shared))
    for options in shared.values():
        parser.add_class_arguments(options, as_group=False, instantiate=False)
    parser.examples = examples_of(command.__doc__ or "")


def examples_of(docstring: str) -> list[str]:
    r"""Returns the commands that follow a $, together with their continuation lines.

    >>> examples_of("$ sdiloco plan --params 1B --picture\n  plan.svg\n  $ sdiloco demo\n\n  >>> 1")
    ['sdiloco plan --params 1B --picture plan.svg', 'sdiloco demo']
    """
    commands = re.findall(r"^ *\$ (.*(?:\n(?! *\$| *\n).+)*)", docstring, flags=re.MULTILINE)
    return [" ".join(command.split()) for command in commands]


def _shared_options(command: Callable[..., str]) -> dict[str, type]:
    """Returns a command's dataclass parameters, each of which provides multiple options."""
    hints = get_type_hints(command).items()
    return {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}


def _called(command: Callable[..., str], options: object) -> str:
    """Calls a subcommand's function with the parsed options."""
    # jsonargparse puts a zero-width space before names that are methods of its namespaces, such
    # as keys.
    arguments = {name.lstrip("\u200b"): value for name, value in vars(options).items()}
    arguments.pop("command", None)
    for name, cls in _shared_options(command).items():
        arguments[name] = cls(**{field.name: arguments.pop(field.name) for field in fields(cls)})
    return command(**arguments)


def _where_it_is(name: str) -> str:
    """Explains what to install for a subcommand that is missing from this distribution."""
    if name not in COMMANDS.keys() - _installed().keys():
        return ""
    return (
        f"\nsdiloco {name} is not included in lightning-sdiloco-hub. Install lightning-sdiloco"
        " instead."
    )


_EXPECTED: Mapping[str, str] = {
    r"Expected a <class 'int'>": "not a whole number",
    r"Expected a <class 'float'>": "not a number",
    r"Expected a typing\.Literal\[(.*)\]": r"not one of \1",
    r"Expected a dot import path string: .*": "not the path of a class, module.Class",
    r"Unexpected import object .*": "neither a class nor a function",
}
"""Replacements for jsonargparse's descriptions of invalid values."""


class _Help(DefaultHelpFormatter):
    """A help formatter that shows each option in one spelling, with its type and default."""

    def _format_action_invocation(self, action: Action) -> str:
        shown = copy(action)
        shown.option_strings = [option for option in action.option_strings if "_" not in option]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: Action) -> str:
        if action.default == SUPPRESS:
            return super()._get_help_string(action)
        return action.help or ""


def _in_words(option: str, type_hint: object, default: object) -> str:
    """Formats the accepted values and the default for the end of an option's help."""
    words = []
    if option in _EXAMPLES:
        words.append(f"number, for example {_EXAMPLES[option]}")
    elif type_hint in (float, float | None):
        words.append("number")
    elif type_hint in (int, int | None):
        words.append("whole number")
    if default not in (None, SUPPRESS, False, "", []):
        words.append(f"default: {default}")
    if not words:
        return ""
    return f" ({', '.join(words)})"


class _Parser(ArgumentParser):
    """A parser that accepts dashes in options, plain flags, and repeated options for lists."""

    examples: Sequence[str] = ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False, **kwargs})

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = super().format_help(*args, **kwargs)
        if not self.examples:
            return text
        lines = [f"{text}\nexamples:"]
        for example in self.examples:
            lines.append(" \\\n    ".join(wrap(example, 76, break_on_hyphens=False)))
        return "\n  ".join(lines) + "\n"

    def add_argument(self, *args: str, **kwargs: Any) -> Action:
        """Adds an option in both spellings, as a flag or a list if necessary."""
        if not args[0].startswith("--"):
            # By default, jsonargparse takes a list as a single JSON argument.
            if args[0] != "-h" and "action" in kwargs:
                return super().add_argument(args[0], nargs="+", help=kwargs["help"])
            return super().add_argument(*args, **kwargs)
        spellings = dict.fromkeys([args[0].replace("_", "-"), *args])
        if kwargs.get("type") is bool:
            return super().add_argument(*spellings, action="store_true", help=kwargs["help"])
        if f"{args[0]}+" in spellings:  # by default, jsonargparse only appends with --option+
            del spellings[f"{args[0]}+"]
            return super().add_argument(
                *spellings, action="append", default=[], help=kwargs["help"]
            )
        option = super().add_argument(*spellings, **kwargs)
        type_hint = getattr(option, "_typehint", option.type)
        words = _in_words(next(iter(spellings)), type_hint, option.default)
        if words:
            option.help = f"{option.help or ''}{words}"
        # For an option that is a class, jsonargparse would list all imported classes: hundreds of
        # them from torch.
        option.extra_help = str
        return option

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints a concise error message with a suggestion."""
        message = self._in_one_line(message)
        unknown = re.match(r"unrecognized arguments: --([\w-]+)(?:[= ](\S+))?", message)
        command = re.search(r"invalid choice: '([^']+)' \(choose from ([^)]*)\)", message)
        close: list[str] = []
        if command:
            message += _where_it_is(command[1])
            close = get_close_matches(command[1], re.findall(r"[\w-]+", command[2]), n=1)
        elif unknown:
            message += self._refusal_of_setting(unknown[1], unknown[2] or "...")
            spellings = chain.from_iterable(action.option_strings for action in self._actions)
            options = [option for option in spellings if "_" not in option]
            close = get_close_matches(f"--{unknown[1]}", options, n=1)
        if close:
            message = f"{message}\nDid you mean {close[0]}?"
        sys.stderr.write(
            f"error: {message}\n{self.prog.replace('[options] ', '')} --help lists all options.\n"
        )
        sys.exit(2)

    def _refusal_of_setting(self, name: str, value: str) -> str:
        """Explains why this command does not have a setting, if the reason is known."""
        names = [action.dest for action in self._actions]
        # A command that has settings has already imported them, and torch with them.
        if "fragments" not in names:
            return ""
        settings = import_module("lightning_sdiloco.algorithm.config")
        try:
            settings.refuse_unknown(self.prog, names, {name.replace("-", "_"): value})
        except ValueError as refusal:
            return f": {refusal}"
        except TypeError:  # there is no better name
            pass
        return ""

    def _in_one_line(self, message: str) -> str:
        """Shortens the error for an invalid value to the reason and the option's help."""
        refused = re.match(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
        helps = {action.dest: action.help or "" for action in self._actions}
        if refused is None or refused[1] not in helps:
            return message
        name, details = refused.groups()
        # For a union, jsonargparse gives one reason per type, each on its own line; None means that
        # the option was left out.
        reasons = re.findall(r"^ *- (?!Expected a <class 'NoneType'>)(.*)$", details, re.MULTILINE)
        reason = reasons[-1] if reasons else details
        reason = reason.partition(" Got value: ")[0].rpartition("callable class: ")[2]
        for pattern, words in _EXPECTED.items():
            reason = re.sub(pattern, words, reason)
        value = re.search(r"(?:Given|Got) value: (.*)", details)
        option = f"--{name.replace('_', '-')}"
        accepted = " ".join(helps[name].split())
        return f"{option} {value[1] if value else ''}: {reason.strip('. ')}. Accepted: {accepted}"


if __name__ == "__main__":
    main()
