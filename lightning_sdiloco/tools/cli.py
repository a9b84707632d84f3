"""The command ``sdiloco``: every function in `COMMANDS` is a subcommand, and its parameters are the options.

Where `COMMANDS` has several functions under one name, they are subcommands of that one, as in ``sdiloco keys init``;
one under the name `ITSELF` runs without a subcommand, as in ``sdiloco hub``. A subcommand is added by writing one
function that returns the text to print. jsonargparse reads its type hints and its docstring, which are the help. A
parameter without a default is positional, one of type bool is a flag, and one that is a list can be given several
times. One that is a dataclass stands for its fields: options that several subcommands share. What a user can get wrong
is a ``ValueError``: its message goes to stderr, and the command ends with exit code 2.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from lightning_sdiloco.algorithm import Schedule, Settings
from lightning_sdiloco.tools.doctor.command import Unwell, doctor
from lightning_sdiloco.tools.hub.command import end, evict, hub, rollback
from lightning_sdiloco.tools.hub.status import status
from lightning_sdiloco.tools.keys.command import add, init, revoke
from lightning_sdiloco.tools.plan.command import plan
from lightning_sdiloco.tools.report.command import report
from lightning_sdiloco.tools.simulate.command import simulate


def schedule(
    sync_every: int = 100, overlap_steps: int = 5, fragments: int = 8, first: int = 1, last: int | None = None
) -> str:
    """Print after which inner steps fragments launch and land.

    Args:
        sync_every: Inner steps between two launches of the same fragment.
        overlap_steps: Inner steps between the launch of a fragment and its landing.
        fragments: Number of fragments.
        first: First inner step of the table.
        last: Last inner step of the table. By default far enough to show two rounds.

    Raises:
        ValueError: If a value is out of its range; for ``sync_every`` and ``overlap_steps`` as `Settings` says it.

    Examples:
        >>> print(schedule(sync_every=6, overlap_steps=2, fragments=2, last=12))
        step  launches  lands
           6  0         -
           8  -         0
           9  1         -
          11  -         1
          12  0         -
    """
    Settings(sync_every=sync_every, overlap_steps=overlap_steps)
    _require_at_least(1, "fragments", fragments, "Give the number of fragments that the model is cut into.")
    _require_at_least(1, "first", first, "Inner steps count from 1.")
    if last is None:
        last = first + 3 * sync_every - 2 + overlap_steps
    _require_at_least(first, "last", last, "It is the last inner step of the table, and first the first.")
    return Schedule(sync_every, overlap_steps, fragments).table(first, last)


ITSELF = ""

COMMANDS: Mapping[str, Callable[..., str] | Mapping[str, Callable[..., str]]] = {
    "doctor": doctor,
    "hub": {ITSELF: hub, "evict": evict, "end": end, "rollback": rollback},
    "keys": {"init": init, "add": add, "revoke": revoke},
    "plan": plan,
    "report": report,
    "schedule": schedule,
    "simulate": simulate,
    "status": status,
}
"""The subcommands by their names."""

_WITH_CLASSES = ("--model", "--data", "--cli", "--quorum", "--config", "--set", "--methods")
"""The options that take class paths, or files with class paths."""


def main(args: list[str] | None = None) -> None:
    """Runs a subcommand and prints what it returns."""
    _search_current_folder(sys.argv[1:] if args is None else args)
    parser = _parser()
    chosen = parser.parse_args(args)
    # Objects in place of class paths; the method was renamed in jsonargparse 4.49.
    chosen = getattr(parser, "instantiate", parser.instantiate_classes)(chosen)
    try:
        text = _run(COMMANDS, chosen)
    except ValueError as error:
        parser.error(str(error))
    except Unwell as found:
        print(found)
        raise SystemExit(1) from None
    # Ranks but the first have nothing to say.
    if text:
        print(text)


def _search_current_folder(args: Sequence[str]) -> None:
    """Puts the current folder last on the path, if a class path begins with a module that is there and nowhere else."""
    missing = [module for module in _modules_in(args) if module not in sys.modules and not PathFinder.find_spec(module)]
    if any(PathFinder.find_spec(module, [""]) for module in missing):
        sys.path.append("")


def _modules_in(args: Sequence[str]) -> Iterator[str]:
    """Returns the first names of the class paths in arguments, and in the files that these name."""
    for option, following in pairwise([*args, ""]):
        name, _, value = option.partition("=")
        if name.split(".")[0] in _WITH_CLASSES:
            value = value or following
            is_readable = os.path.isfile(value) and os.access(value, os.R_OK)
            text = Path(value).read_text(errors="replace") if is_readable else value
            yield from re.findall(r"(?<![\w.])([^\W\d]\w*)\.[^\W\d]", text)


def _parser() -> ArgumentParser:
    """Makes the parser of all subcommands; jsonargparse's auto_cli would take --config, of `simulate`, for itself."""
    parser = _Parser(prog="sdiloco", description="Tools for Streaming DiLoCo.")
    _add_subcommands(parser, COMMANDS)
    return parser


def _add_subcommands(parser: ArgumentParser, commands: Mapping[str, Any]) -> None:
    if ITSELF in commands:
        _add_arguments(parser, commands[ITSELF])
    subcommands = parser.add_subcommands(dest="command", required=ITSELF not in commands)
    for name, command in commands.items():
        if name == ITSELF:
            continue
        several = isinstance(command, Mapping)
        # One that runs without a subcommand lists the others below.
        parts = command.values() if several and ITSELF not in command else [command[ITSELF] if several else command]
        summary = " ".join(map(_summary, parts))
        subparser = _Parser(description=summary)
        if not several:
            _add_arguments(subparser, command)
        subcommands.add_subcommand(name, subparser, help=summary)
        # From the top down: jsonargparse takes no other order.
        if several:
            _add_subcommands(subparser, command)


def _add_arguments(parser: ArgumentParser, command: Callable[..., str]) -> None:
    shared = _shared_options(command)
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip=set(shared))
    for options in shared.values():
        parser.add_class_arguments(options, as_group=False, instantiate=False)


def _shared_options(command: Callable[..., str]) -> dict[str, Any]:
    """Returns the parameters of a command that stand for several options, each with its dataclass."""
    return {name: hint for name, hint in get_type_hints(command).items() if is_dataclass(hint)}


def _summary(command: Callable[..., str]) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]


def _run(commands: Mapping[str, Any], chosen: Any) -> str:
    """Runs what was chosen, down to the last subcommand."""
    if chosen.command is None:
        return _called(commands[ITSELF], chosen)
    command, arguments = commands[chosen.command], chosen[chosen.command]
    return _run(command, arguments) if isinstance(command, Mapping) else _called(command, arguments)


def _called(command: Callable[..., str], chosen: Any) -> str:
    given = _arguments_of(chosen)
    for name, options in _shared_options(command).items():
        given[name] = options(**{field.name: given.pop(field.name) for field in fields(options)})
    return command(**given)


def _arguments_of(chosen: Any) -> dict[str, Any]:
    # jsonargparse puts a space without width before names that are methods of its namespaces, such as keys.
    named = {name.lstrip("\u200b"): value for name, value in vars(chosen).items()}
    return {name: value for name, value in named.items() if name != "command"}


class _Parser(ArgumentParser):
    """Spells options with dashes as well, and takes flags and lists as is usual on a command line."""

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
            return super().add_argument(*spellings, action="append", default=[], help=kwargs["help"])
        option = super().add_argument(*spellings, **kwargs)
        # Where an option is a class, jsonargparse would list all that are imported: hundreds of torch's.
        option.extra_help = str
        return option


def _require_at_least(least: int, name: str, value: int, advice: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is out of range: it must be at least {least}. {advice}")


if __name__ == "__main__":
    main()
