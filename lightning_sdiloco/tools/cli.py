"""The command ``sdiloco``: the parameters of a function are the options of a subcommand.

A subcommand is added by writing a file with a function of its name that returns the text to print,
and naming it in `COMMANDS`. jsonargparse reads its type hints and its docstring, which are the
help; its lines behind a $ are the examples. A parameter without a default is positional, one of
type bool is a flag, and one that is a list can be given several times. One that is a dataclass
stands for its fields: options that several subcommands share. What a user can get wrong is a
``ValueError``: its message goes to stderr, and the command ends with exit code 2. A subcommand is
imported when it is asked for: some need no torch.
"""

import ast
import os
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from jsonargparse import ArgumentParser

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
"""The subcommands: the file of each, and its functions; functions of other names are its own
subcommands."""

_WITH_CLASSES = ("--model", "--data", "--cli", "--quorum", "--config", "--set", "--methods")
"""The options that take class paths, or files with class paths."""

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
"""The options whose numbers may have a unit, and how large that is."""

_NEED_A_UNIT = ("--bandwidth", "--hub-bandwidth")
"""The options whose numbers must have a unit: people think of links in Mbit/s as well as in
Gbit/s."""


def main(args: list[str] | None = None) -> None:
    """Runs a subcommand and prints what it returns."""
    given = sys.argv[1:] if args is None else args
    asked = next((arg for arg in given if not arg.startswith("-")), "")
    try:
        given = without_units(given)
    except ValueError as error:
        _Parser(prog=f"sdiloco {asked}").error(str(error))
    _search_current_folder(given)
    parser = parser_of([asked])
    chosen = parser.parse_args(given)
    # Objects in place of class paths; the method was renamed in jsonargparse 4.49.
    chosen = getattr(parser, "instantiate", parser.instantiate_classes)(chosen)
    name = chosen.command
    arguments = chosen[chosen.command]
    function = getattr(arguments, "command", None) or name
    try:
        text = _called(
            _function(name, function), arguments if function == name else arguments[function]
        )
    except ValueError as error:
        words = ["sdiloco", name] if function == name else ["sdiloco", name, function]
        _Parser(prog=" ".join(words)).error(str(error))
    # Ranks but the first have nothing to say.
    if text:
        print(text)


def without_units(args: Sequence[str]) -> list[str]:
    """Writes numbers with a unit, such as 1B or 100Mbit, as the command counts them.

    Raises:
        ValueError: If a unit is unknown, or missing where one is needed.
    """
    plain = list(args)
    for at, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        is_apart = not equals and at + 1 < len(args)
        if option.replace("_", "-") in _UNITS and (equals or is_apart):
            text = _without_unit(option.replace("_", "-"), args[at + 1] if is_apart else value)
            plain[at + is_apart] = text if is_apart else f"{option}={text}"
    return plain


def _without_unit(option: str, text: str) -> str:
    number = re.fullmatch(r"([+-]?[\d.]+(?:e[+-]?\d+)?) ?([A-Za-z/]*)", text)
    if number is None:  # The parser says what it takes.
        return text
    value, unit = number.groups()
    units = _UNITS[option]
    if unit in units:
        return f"{float(value) * units[unit]:.12g}"
    if unit:
        raise ValueError(
            f"{option} {text} has the unknown unit {unit!r}. Give one of {', '.join(units)}."
        )
    if option in _NEED_A_UNIT:
        raise ValueError(
            f"{option} {text} has no unit. Give one of {', '.join(units)}, as in {value}Mbit."
        )
    return text


def _search_current_folder(args: Sequence[str]) -> None:
    """Puts the current folder last on the path, if a class path begins with a module that is there
    and nowhere else.
    """
    for option, following in pairwise([*args, ""]):
        name, _, value = option.partition("=")
        if name.split(".")[0] in _WITH_CLASSES:
            value = value or following
            is_readable = os.path.isfile(value) and os.access(value, os.R_OK)
            text = Path(value).read_text(errors="replace") if is_readable else value
            for module in re.findall(r"(?<![\w.])([^\W\d]\w*)\.[^\W\d]", text):
                is_missing = module not in sys.modules and not PathFinder.find_spec(module)
                if is_missing and PathFinder.find_spec(module, [""]):
                    sys.path.append("")
                    return


def parser_of(asked: Container[str]) -> ArgumentParser:
    """Makes the parser. It imports the subcommands that are asked for, and knows the summaries of
    all others alone.
    """
    version = import_module("lightning_sdiloco").__version__
    parser = _Parser(prog="sdiloco", description="Tools for Streaming DiLoCo.", version=version)
    subcommands = parser.add_subcommands(dest="command")
    for name, (_, functions) in COMMANDS.items():
        own = name in functions
        others = [function for function in functions if function != name]
        summary = (
            _summary(name, name)
            if own
            else " ".join(_summary(name, function) for function in functions)
        )
        subparser = _Parser(description=summary)
        subcommands.add_subcommand(name, subparser, help=summary)
        # From the top down: jsonargparse takes no other order.
        if name in asked and own:
            _add_arguments(subparser, _function(name, name))
        if name in asked and others:
            inner = subparser.add_subcommands(dest="command", required=not own)
            for function in others:
                nested = _Parser(description=_summary(name, function))
                _add_arguments(nested, _function(name, function))
                inner.add_subcommand(function, nested, help=_summary(name, function))
    return parser


def _function(name: str, function: str) -> Callable[..., str]:
    found: Callable[..., str] = getattr(
        import_module(f"lightning_sdiloco.tools.{COMMANDS[name][0]}"), function
    )
    return found


@cache
def _summary(name: str, function: str) -> str:
    """Returns the first paragraph of a function's docstring, without importing it."""
    source = (
        Path(__file__)
        .parent.joinpath(f"{COMMANDS[name][0].replace('.', '/')}.py")
        .read_text(encoding="utf-8")
    )
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    summary = (ast.get_docstring(found) or "").partition("\n\n")[0]
    return " ".join(summary.split())


def _add_arguments(parser: "_Parser", command: Callable[..., str]) -> None:
    shared = _shared_options(command)
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip=set(shared))
    for options in shared.values():
        parser.add_class_arguments(options, as_group=False, instantiate=False)
    parser.examples = examples_of(command.__doc__ or "")


def examples_of(docstring: str) -> list[str]:
    r"""Returns the commands behind a $; one that is too long for a line goes on in the next.

    >>> examples_of("$ sdiloco plan --params 1B --picture\n  plan.svg\n  $ sdiloco demo\n\n  >>> 1")
    ['sdiloco plan --params 1B --picture plan.svg', 'sdiloco demo']
    """
    commands = re.findall(r"^ *\$ (.*(?:\n(?! *\$| *\n).+)*)", docstring, flags=re.MULTILINE)
    return [" ".join(command.split()) for command in commands]


def _shared_options(command: Callable[..., str]) -> dict[str, Any]:
    """Returns the parameters of a command that stand for several options, each with its
    dataclass.
    """
    return {name: hint for name, hint in get_type_hints(command).items() if is_dataclass(hint)}


def _called(command: Callable[..., str], chosen: Any) -> str:
    # jsonargparse puts a space without width before names that are methods of its namespaces, such
    # as keys.
    named = {name.lstrip("\u200b"): value for name, value in vars(chosen).items()}
    given = {name: value for name, value in named.items() if name != "command"}
    for name, options in _shared_options(command).items():
        given[name] = options(**{field.name: given.pop(field.name) for field in fields(options)})
    return command(**given)


_EXPECTED: Mapping[str, str] = {
    r"Expected a <class 'int'>": "not a whole number",
    r"Expected a <class 'float'>": "not a number",
    r"Expected a typing\.Literal\[(.*)\]": r"not one of \1",
    r"Expected a dot import path string: .*": "not the path of a class, module.Class",
    r"Unexpected import object .*": "neither a class nor a function",
}
"""How jsonargparse tells what is wrong with a value, and how it is said."""


class _Parser(ArgumentParser):
    """Spells options with dashes as well, and takes flags and lists as is usual on a command
    line.
    """

    examples: Sequence[str] = ()

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = super().format_help(*args, **kwargs)
        return "\n  ".join([f"{text}\nexamples:", *self.examples]) + "\n" if self.examples else text

    def add_argument(self, *args: str, **kwargs: Any) -> Any:
        if not args[0].startswith("--"):
            # By itself jsonargparse takes a list as one word of JSON.
            if args[0] != "-h" and "action" in kwargs:
                return super().add_argument(args[0], nargs="+", help=kwargs["help"])
            return super().add_argument(*args, **kwargs)
        spellings = dict.fromkeys([args[0].replace("_", "-"), *args])
        if kwargs.get("type") is bool:
            return super().add_argument(*spellings, action="store_true", help=kwargs["help"])
        if f"{args[0]}+" in spellings:  # by itself jsonargparse appends with --option+ only
            del spellings[f"{args[0]}+"]
            return super().add_argument(
                *spellings, action="append", default=[], help=kwargs["help"]
            )
        option = super().add_argument(*spellings, **kwargs)
        # Where an option is a class, jsonargparse would list all that are imported: hundreds of
        # torch's.
        option.extra_help = str
        return option

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints in few words what is wrong, and what was perhaps meant."""
        message = self._in_one_line(message)
        known = [action.dest for action in self._actions]
        unknown = re.match(r"unrecognized arguments: --([\w-]+)(?:[= ](\S+))?", message)
        # A command that has settings has imported them, and with them torch.
        if unknown and "fragments" in known:
            settings = import_module("lightning_sdiloco.algorithm.config")
            try:
                settings.refuse_unknown(
                    self.prog, known, {unknown[1].replace("-", "_"): unknown[2] or "..."}
                )
            except ValueError as told:
                message = f"{message}: {told}"
            except TypeError:  # it has no other name
                pass
        options = [
            option
            for action in self._actions
            for option in action.option_strings
            if "_" not in option
        ]
        wrong, right = (f"--{unknown[1]}", options) if unknown else ("", [])
        command = re.search(r"invalid choice: '([^']+)' \(choose from ([^)]*)\)", message)
        if command:
            wrong = command[1]
            right = re.findall(r"[\w-]+", command[2])
        close = get_close_matches(wrong, right, n=1)
        if close:
            message = f"{message}\nDid you mean {close[0]}?"
        sys.stderr.write(
            f"error: {message}\n{self.prog.replace('[options] ', '')} --help lists what there is.\n"
        )
        sys.exit(2)

    def _in_one_line(self, message: str) -> str:
        """Says of a value that does not suit its option why, and what the option takes; other
        messages stay.
        """
        refused = re.match(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
        helps = {action.dest: action.help for action in self._actions}
        if refused is None or refused[1] not in helps:
            return message
        # Of a union jsonargparse tells what is wrong for each type, on a line; None stands for an
        # option left out.
        of_types = re.findall(
            r"^ *- (?!Expected a <class 'NoneType'>)(.*)$", refused[2], re.MULTILINE
        )
        given = re.search(r"(?:Given|Got) value: (.*)", refused[2])
        reason = (
            (of_types or [refused[2]])[-1]
            .partition(" Got value: ")[0]
            .rpartition("callable class: ")[2]
        )
        for pattern, words in _EXPECTED.items():
            reason = re.sub(pattern, words, reason)
        option = f"--{refused[1].replace('_', '-')}"
        accepted = " ".join(helps[refused[1]].split())
        value = given[1] if given else ""
        return f"{option} {value}: {reason.strip('. ')}. It takes: {accepted}"


if __name__ == "__main__":
    main()
