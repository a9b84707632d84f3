"""The command ``sdiloco``: every function in `COMMANDS` is a subcommand, and its parameters are the options.

A subcommand is added by writing one function that returns the text to print. The first line of its docstring and the
text beside each parameter are the help. A parameter without a default is given by its place. What a user can get wrong
is a ``ValueError``: its message goes to stderr, and the command ends with exit code 2.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.tools.doctor.command import Unwell, doctor
from lightning_sdiloco.tools.plan.command import plan
from lightning_sdiloco.tools.report.command import report
from lightning_sdiloco.tools.simulate.command import simulate


def schedule(
    sync_every: Annotated[int, "Inner steps between two launches of the same fragment."] = 100,
    overlap_steps: Annotated[int, "Inner steps between the launch of a fragment and its landing."] = 5,
    fragments: Annotated[int, "Number of fragments."] = 8,
    first: Annotated[int, "First inner step of the table."] = 1,
    last: Annotated[int | None, "Last inner step of the table. By default far enough to show two rounds."] = None,
) -> str:
    """Print after which inner steps fragments launch and land.

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


COMMANDS: Mapping[str, Callable[..., str]] = {
    "doctor": doctor,
    "plan": plan,
    "report": report,
    "schedule": schedule,
    "simulate": simulate,
}
"""The subcommands by their names."""


def main(args: list[str] | None = None) -> None:
    """Runs a subcommand and prints what it returns.

    Args:
        args: The arguments of the command line, without the name of the program. By default those of this process.

    Raises:
        SystemExit: With code 2 if the arguments are wrong, with code 1 if ``doctor`` finds that training would not
            work, with code 0 after ``--help``.
    """
    parser = ArgumentParser(prog="sdiloco", description="Tools for Streaming DiLoCo.")
    subcommands = parser.add_subcommands(dest="command")
    for name, command in COMMANDS.items():
        subcommands.add_subcommand(name, _parser_of(command), help=_summary(command))
    # A class path may name a file in the current folder, as with python -m.
    if "" not in sys.path:
        sys.path.insert(0, "")
    chosen = _instantiated(parser, parser.parse_args(args))
    try:
        text = COMMANDS[chosen.command](**vars(chosen[chosen.command]))
    except ValueError as error:
        parser.error(str(error))
    except Unwell as found:
        print(found)
        raise SystemExit(1) from None
    # Ranks but the first have nothing to say.
    if text:
        print(text)


def _parser_of(command: Callable[..., str]) -> ArgumentParser:
    """A parser with an option for every parameter, spelled with dashes or as in Python.

    A parameter without a default has no option: its value is given by its place.
    """
    parser = ArgumentParser(description=_summary(command))
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        value_type, text = get_args(hints[parameter.name])
        spellings = dict.fromkeys([f"--{parameter.name.replace('_', '-')}", f"--{parameter.name}"])
        if parameter.default is inspect.Parameter.empty:
            parser.add_argument(parameter.name, type=value_type, help=text)
        elif value_type is bool:
            parser.add_argument(*spellings, action="store_true", help=text)
        elif get_origin(value_type) is list:
            # One value each time that the option is given.
            parser.add_argument(*spellings, action="append", type=str, default=[], help=text)
        else:
            option = parser.add_argument(*spellings, type=value_type, default=parameter.default, help=text)
            # Where an option is a class, jsonargparse would list all that are imported: hundreds of torch's.
            option.extra_help = str
    return parser


def _instantiated(parser: ArgumentParser, chosen: Any) -> Any:
    """The options with objects in place of class paths; the method was renamed in jsonargparse 4.49."""
    return getattr(parser, "instantiate", parser.instantiate_classes)(chosen)


def _summary(command: Callable[..., str]) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]


def _require_at_least(least: int, name: str, value: int, advice: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is out of range: it must be at least {least}. {advice}")


if __name__ == "__main__":
    main()
