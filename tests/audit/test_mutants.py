"""The mutants of `make audit`: which ones there are, how they are chosen, and what runs them."""

import ast
import json
from pathlib import Path

import pytest

from tests.audit import mutants
from tests.audit.mutants import (
    PACKAGE,
    ROOT,
    TESTS,
    all_mutants,
    files_for,
    modules,
    mutants_of,
    sample,
)
from tests.test_rules import RULES

SOURCE = b'''"""A file."""
class A:
    limit: int = 2
    def grows(self, x: "int" = 1) -> bool:
        """Nothing here changes: 1 < 2."""
        log.info("step %s", 3)
        self.note(x)
        if x < self.limit and not self.done:
            raise ValueError(1)
        return x + 1 == 2
'''


def test_comparisons_operators_constants_and_calls_change_but_texts_and_types_do_not() -> None:
    changes = [mutant.key.removeprefix("a.py:") for mutant in mutants_of("a.py", SOURCE)]
    assert changes == [
        "A: 2 -> (3)",
        "A.grows: self.note(x) -> pass",
        "A.grows: x < self.limit and (not self.done) -> (x < self.limit or not self.done)",
        "A.grows: x < self.limit -> (x <= self.limit)",
        "A.grows: not self.done -> (self.done)",
        "A.grows: x + 1 == 2 -> (x + 1 != 2)",
        "A.grows: x + 1 -> (x - 1)",
        "A.grows: 1 -> (2)",
        "A.grows: 2 -> (3)",
    ]


def test_each_sampled_mutant_is_another_program() -> None:
    for mutant in sample(all_mutants(), 40, seed=1):
        source = (ROOT / PACKAGE / mutant.module).read_bytes()
        changed = ast.dump(ast.parse(mutant.applied_to(source)))
        assert changed != ast.dump(ast.parse(source)), mutant.key


def test_a_sample_hardly_changes_with_the_source() -> None:
    changed = SOURCE.replace(b"class A", b"B = 5\n\n\nclass A")
    chosen = {mutant.key for mutant in sample(mutants_of("a.py", SOURCE), 4, seed=0)}
    chosen_later = {mutant.key for mutant in sample(mutants_of("a.py", changed), 4, seed=0)}
    assert len(chosen & chosen_later) >= 3


def test_every_module_with_mutants_has_tests_that_exist() -> None:
    of_rules = {f"{PACKAGE}.federation.{name}" for name in mutants.RULES}
    assert of_rules == set(RULES)
    assert TESTS.keys() <= {*modules(), "algorithm", "engine", "federation"}
    for module in modules():
        assert [name for name in files_for(module) if not (ROOT / name).exists()] == [], module


def test_a_survivor_must_be_listed_and_an_outdated_entry_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noticed = {"A: 2 -> (3)"}
    all_of_file = mutants_of("a.py", SOURCE)
    reasons = {mutant.key: "It means the same." for mutant in all_of_file[2:]}

    def passes(folder: Path, *_: object, **__: object) -> bool:
        text = (folder / PACKAGE / "a.py").read_bytes()
        planted = [mutant.key for mutant in all_of_file if text == mutant.applied_to(SOURCE)]
        return not any(key.removeprefix("a.py:") in noticed for key in planted)

    def copied(folder: Path) -> Path:
        (folder / PACKAGE).mkdir(parents=True)
        (folder / PACKAGE / "a.py").write_bytes(SOURCE)
        return folder

    monkeypatch.setattr(mutants, "all_mutants", lambda: all_of_file)
    monkeypatch.setattr(mutants, "passes", passes)
    monkeypatch.setattr(mutants, "copied", copied)
    monkeypatch.setattr(mutants, "files_for", lambda module: [module])
    monkeypatch.setattr(mutants, "listed_survivors", lambda: reasons)
    arguments = ["--folder", str(tmp_path / "copy")]
    assert mutants.main(arguments) == 1
    assert "1 of 9 mutants killed, 7 known to mean the same, 1 survive." in capsys.readouterr().out
    noticed.add("A.grows: self.note(x) -> pass")
    assert mutants.main(arguments) == 0
    reasons["a.py:gone"] = "It meant the same."
    assert mutants.main(arguments) == 1
    assert "a.py:gone" in capsys.readouterr().out


def test_every_listed_survivor_has_a_sentence() -> None:
    reasons = json.loads(mutants.SURVIVORS.read_text())
    assert [key for key, reason in reasons.items() if not reason.endswith(".")] == []
