"""Runs the command ``sdiloco`` in this process, for its output and its exit code."""

import contextlib
import io
from collections.abc import Iterable
from typing import NamedTuple

from lightning_sdiloco.tools.cli import main


class Ran(NamedTuple):
    out: str
    err: str
    code: int


def ran(*args: str) -> Ran:
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(args))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ran(out.getvalue(), err.getvalue(), code)


def told(*args: str) -> str:
    """The output of a command, which succeeds."""
    out, err, code = ran(*args)
    assert code == 0, err
    return out


def refused(*args: str) -> str:
    """The error of a command, which prints nothing else and no traceback, on one line."""
    out, err, code = ran(*args)
    assert (out, code) == ("", 2)
    assert "Traceback" not in err
    return " ".join(err.split())


def not_refused_with(name: str, cases: Iterable[tuple[list[str], str]]) -> dict[str, str]:
    """The errors, by arguments, that lack the words of their case; {} if all have them."""
    wrong_errors = {}
    for args, words in cases:
        error = refused(name, *args)
        if words not in error:
            wrong_errors[" ".join(args)] = error
    return wrong_errors
