"""What the command ``sdiloco`` prints in this process, and with which code it ends."""

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
    out, err, code = ran(*args)
    assert code == 0, err
    return out


def refused(*args: str) -> str:
    out, err, code = ran(*args)
    assert (out, code) == ("", 2)
    assert "Traceback" not in err
    return " ".join(err.split())


def not_refused_with(name: str, cases: Iterable[tuple[list[str], str]]) -> dict[str, str]:
    """The cases, arguments and words, that are refused with other words; {} if all is well."""
    found = [(" ".join(args), words, refused(name, *args)) for args, words in cases]
    return {args: text for args, words, text in found if words not in text}
