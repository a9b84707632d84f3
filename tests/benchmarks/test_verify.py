"""The pages quote what was measured; and a number that differs is named."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks.verify import __main__ as verify
from benchmarks.verify import check, gaps, pages, plans
from benchmarks.verify.claims import (
    About,
    AtLeast,
    AtMost,
    Claim,
    Expected,
    Missing,
    Sentence,
    Source,
    Table,
)
from benchmarks.verify.pages import Page
from tests.scripts import ROOT

SOURCE = """# Speed

Training takes **61 s** in place of
612 s, with [4 bits](page.md#bits-32) and `H=20`: 1/152 of 3,268,000 bytes, -1.5 % (Python 3.10).

## Losses

| | M=2 | M=4 |
|---|---:|---:|
| `bare` name | -3.3 ± 1.1 | +0.9 ± 1.6 |
| task, 5 | 1.794 | 2 |

```text
99 s
```
"""
PAGE = Page("page.md", SOURCE)


def errors(*claims: Claim, page: Page = PAGE) -> list[str]:
    """What is wrong with claims about a page."""
    checked_page = check.Checked(page)
    for claim in claims:
        check._note(checked_page, "file.json", claim)
    return checked_page.errors


def test_the_pages_quote_the_files_of_results() -> None:
    assert verify.problems(verify.checked_pages()) == []


def test_a_plan_is_older_than_its_first_result() -> None:
    try:
        assert list(plans.wrong(ROOT)) == []
    except plans.Skipped as reason:
        pytest.skip(str(reason))


def test_numbers_that_look_measured_are_found_without_markup_and_code() -> None:
    numbers = [number.text for number in PAGE.numbers]
    assert numbers == ["61", "612", "152", "3,268,000", "-1.5", *_IN_THE_TABLE]
    assert [PAGE.line(number.start) for number in PAGE.numbers[:2]] == [3, 4]


_IN_THE_TABLE = ["-3.3", "1.1", "+0.9", "1.6", "1.794", "2"]


def test_a_number_that_differs_is_named_with_its_line_and_both_values() -> None:
    claim = Sentence("page.md", "Training takes # s in place of # s", [61.4, 611.4])
    assert errors(claim) == ["page.md:4: reads 612, but it is 611.4 by file.json"]
    table = Table("page.md", ["", "M=2"], {"bare name": [-3.26, 1.1, 0.94, 1.66]})
    assert errors(table) == ["page.md:10: reads 1.6, but it is 1.66 by file.json"]


@pytest.mark.parametrize(
    ("expected", "agrees"),
    [
        (3_268_000, True),
        (3_268_001, False),
        (About(3_268_499), True),
        (About(3_268_501), False),
        (AtMost(3_267_000), True),
        (AtMost(3_269_000), False),
        (AtLeast(3_269_000), True),
        (AtLeast(3_267_000), False),
        (None, True),
    ],
)
def test_a_number_agrees_within_its_last_digit_or_a_bound(expected: Expected, agrees: bool) -> None:
    claim = Sentence("page.md", "with 4 bits ... 1/152 of # bytes", [expected])
    assert (errors(claim) == []) == agrees


def test_a_half_of_the_last_digit_agrees_both_ways() -> None:
    for value in (1.7935, 1.7945):
        assert errors(Table("page.md", ["", "M=2"], {"task, 5": [value, 2]})) == []
    assert errors(Table("page.md", ["", "M=2"], {"task, 5": [1.79451, 2]})) != []


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (Sentence("page.md", "Nobody takes # s", [1]), "no text like 'Nobody takes # s'"),
        (Table("page.md", ["site"], {}), "no table whose header begins with 'site'"),
        (Table("page.md", [""], {"a": [1]}), "no row 'a'; there are 'bare name', 'task, 5'"),
        (Table("page.md", [""], {"task, 5": [1]}), "row 'task, 5' has 2 numbers, and 1 are known"),
        (Source("page.md", "Times", "a table"), "no section and no text like 'Times'"),
    ],
)
def test_an_anchor_that_is_gone_is_named(claim: Claim | Source, message: str) -> None:
    with pytest.raises(Missing, match=message):
        list(claim.spans(PAGE) if isinstance(claim, Source) else claim.judge(PAGE))


def test_numbers_count_by_where_they_are_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(SOURCE)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    claim = Table("page.md", ["", "M=2"], {"bare name": [-3.3, 1.1, 0.9, 1.6]})
    sources = [Source("page.md", "Losses", "a run"), Source("page.md", "| task, 5 | 1.794", None)]
    (page,) = check.checked(["page.md"], [("file.json", claim)], sources)
    assert len(page.derived) == 4
    assert [number.text for number in page.sourced] == ["2"]
    assert [number.text for number in page.open] == [
        "61",
        "612",
        "152",
        "3,268,000",
        "-1.5",
        "1.794",
    ]
    assert page.errors == ["page.md:4: -1.5 has no interval, and nothing says how many seeds"]


def test_the_command_prints_counts_and_ends_with_1_if_anything_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reason_to_skip(root: Path) -> None:
        raise plans.Skipped("a shallow clone has no history")

    checked_page = check.Checked(PAGE, derived=PAGE.numbers[1:], open=PAGE.numbers[:1])
    monkeypatch.setattr(verify, "checked_pages", lambda: [checked_page])
    monkeypatch.setattr(plans, "wrong", reason_to_skip)
    with pytest.raises(SystemExit) as ended:
        verify.main(["--open"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert f"| page.md | {len(PAGE.numbers)} | {len(PAGE.numbers) - 1} | 0 | 1 | 0 |" in printed
    assert "page.md:3: ... # Speed Training takes 61 s in place of" in printed
    assert "Plans were not checked: a shallow clone has no history." in printed
    assert "page.md: 1 numbers have no source, and 0 may have none" in printed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Four groups lose +1.2 % to DDP.", ["+1.2"]),
        ("Four groups lose +1.2 % to DDP (one seed).", []),
        ("Four groups lose +1.2 ± 0.4 % to DDP.", []),
        ("It was 0.5 to 0.8 % better, and cost 2 %.", ["0.8 %", "2 %"]),
        ("Over five seeds:\n\n| M=2 | -1.5 |\n| M=4 | +2 ± 3 |", []),
        ("Nothing is said.\n\n| M=2 | -1.5 |\n| M=4 | +2 ± 3 |", ["-1.5"]),
        ("Training keeps 95 % of its speed on kill -9.", []),
    ],
)
def test_a_gap_without_interval_and_seeds_is_found(text: str, expected: list[str]) -> None:
    assert [gap for _, gap in gaps.unmarked(Page("page.md", text))] == expected


RESULTS = "docs/benchmarks/curve.json"
PLAN = "# Plans\n\n## A curve (`benchmarks.curve`)\n\nSeed 10.\n"


class Repository:
    """A git repository with a plan and results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", *identity, *arguments], cwd=self.folder, check=True)

    def commit(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.git("add", path)
        self.git("commit", "--quiet", "--message", path)


@pytest.fixture
def one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "RESULTS", {"curve": RESULTS})


@pytest.mark.usefixtures("one_plan")
@pytest.mark.timeout(60)
def test_a_late_or_changed_plan_is_named_and_a_short_history_tells_nothing(tmp_path: Path) -> None:
    late = Repository(tmp_path)
    late.commit(RESULTS, "{}")
    late.commit(plans.PLAN, PLAN)
    (sentence,) = plans.wrong(tmp_path)
    assert "was not there before its first result" in sentence
    late.git("rm", "--quiet", RESULTS)
    late.git("commit", "--quiet", "--message", "again")
    clone = tmp_path / "clone"
    late.git("clone", "--quiet", "--depth=1", f"file://{tmp_path}", str(clone))
    with pytest.raises(plans.Skipped, match="shallow"):
        list(plans.wrong(clone))
    (tmp_path / ".git").rename(tmp_path / "no-git")
    with pytest.raises(plans.Skipped, match="no git"):
        list(plans.wrong(tmp_path))


@pytest.mark.usefixtures("one_plan")
@pytest.mark.timeout(60)
def test_a_plan_stays_as_it_was_before_the_first_result(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.commit(plans.PLAN, PLAN)
    assert list(plans.wrong(tmp_path)) == []
    repository.commit(RESULTS, "{}")
    repository.commit(plans.PLAN, PLAN.replace("\n\nSeed", "\n\n\nSeed"))
    assert list(plans.wrong(tmp_path)) == []
    repository.commit(plans.PLAN, PLAN.replace("10", "11"))
    (sentence,) = plans.wrong(tmp_path)
    assert "is not what it was before" in sentence
    repository.commit(plans.PLAN, PLAN + "\n## Faults (`benchmarks.faults`)\n\nMany.\n")
    assert "benchmarks.faults has no file of results" in next(plans.wrong(tmp_path))
