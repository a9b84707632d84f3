"""Types that tell integers apart: a checker finds a call whose arguments are swapped."""

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

FEDERATION = Path(__file__).parents[1] / "lightning_sdiloco" / "federation"
CALL = """
from lightning_sdiloco.federation.messages import Contribution
from lightning_sdiloco.federation.run_config import Terms

def steps(terms: Terms, contribution: Contribution) -> int:
    return terms.steps_before({arguments})
"""


def errors_in(text: str, folder: Path) -> list[str]:
    snippet = folder / "snippet.py"
    snippet.write_text(text)
    needed = [str(FEDERATION / f"{name}.py") for name in ("codec", "messages", "run_config")]
    report, failure, _ = api.run(
        [
            *("--config-file=", "--follow-imports=skip", f"--cache-dir={folder / 'cache'}"),
            *("--ignore-missing-imports", "--no-error-summary", str(snippet), *needed),
        ]
    )
    assert not failure
    return [line for line in report.splitlines() if line.startswith(str(snippet))]


def test_a_fragment_in_place_of_a_round_is_a_type_error(tmp_path: Path) -> None:
    right = "contribution.fragment, contribution.round"
    assert errors_in(CALL.format(arguments=right), tmp_path) == []
    swapped = "contribution.round, contribution.fragment"
    (error,) = errors_in(CALL.format(arguments=swapped), tmp_path)
    assert '"int"; expected "RoundNumber"' in error
