"""Plants mutants in the engine, the algorithm and the rules of a federation, and reports those that
no test notices.

A mutant is one small change of one expression or statement. A seed chooses a sample, and each
mutant runs against the few test files that exercise its module, in a copy of the checkout. A mutant
that survives is a gap in the tests, unless the program means the same with it: then
``survivors.json`` says why. `make audit` fails if a mutant survives that is not listed there.

    python -m tests.audit.mutants --count 3 --seed 0
"""

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_sdiloco"
SURVIVORS = Path(__file__).with_name("survivors.json")

RULES = ("codec", "follower", "ledger", "messages", "quorum", "run_config", "untrained")
"""The modules of a federation that decide, without clock, network and file."""

MARKERS = "not large and not slow and not chaos and not soak and not foreign"

# Tests by module. A room stands for those of its modules that have no row. Doctests of the module
# run first.
TESTS = {
    "algorithm": ("algorithm",),
    "algorithm/config.py": ("lightning/test_refusals.py", "engine/test_policies.py"),
    "algorithm/direction.py": ("algorithm/test_direction.py", "engine/test_matrices.py"),
    "algorithm/gossip.py": ("engine/test_policies.py", "engine/test_every_way.py"),
    "algorithm/merge.py": ("engine/test_agreement.py", "engine/test_policies.py"),
    "algorithm/partition.py": ("algorithm/test_partition.py",),
    "algorithm/reduce.py": ("algorithm/test_reduction.py", "engine/test_payloads.py"),
    "algorithm/schedule.py": ("algorithm/test_schedule.py", "engine/test_policies.py"),
    "algorithm/guard.py": ("algorithm/test_guard.py",),
    "algorithm/weighting.py": ("algorithm/test_aggregation.py", "engine/test_guard.py"),
    "engine": ("engine/test_reference.py", "engine/test_agreement.py", "engine/test_every_way.py"),
    "engine/background.py": ("engine/test_reference.py", "engine/test_accelerator.py"),
    "engine/checkpoint.py": ("engine/test_every_way.py", "engine/test_untrained.py"),
    "engine/diagnosis.py": ("engine/test_payloads.py", "lightning/test_monitor.py"),
    "engine/drop_compute.py": ("test_methods.py",),
    "engine/matrices.py": ("engine/test_matrices.py",),
    "engine/outer.py": ("engine/test_reference.py", "engine/test_accelerator.py"),
    "engine/per_rank.py": ("lightning/test_resume_per_rank.py",),
    "engine/shards.py": ("engine/test_models.py", "lightning/test_sharded.py"),
    "engine/start.py": ("engine/test_recut.py", "lightning/test_refusals.py"),
    "engine/untrained.py": ("engine/test_untrained.py", "engine/test_untrained_trees.py"),
    "engine/weight_copies.py": ("engine/test_weight_copies.py",),
    "federation": (
        "federation/test_messages.py",
        "federation/test_known_answers.py",
        "federation/test_simulate.py",
        "federation/test_site.py",
    ),
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}

# Calls of these names only write logs.
TALK = ("debug", "info", "warning", "error", "warn", "log")


class Mutant(NamedTuple):
    """One change.

    Attributes:
        key: Names it: module, function, old and new text, and a number where there are several
            alike. It does not change when other lines of the file do.
        module: The file, below the package.
        start: Where the old text begins in the bytes of the file.
        end: Where it ends.
        new: The new text.
    """

    key: str
    module: str
    start: int
    end: int
    new: str

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


# Making mutants


class _Finder(ast.NodeVisitor):
    """Collects the nodes that may change, each with its function and what replaces it."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ast.AST, str]] = []
        self._scope: list[str] = []

    def _add(self, old: ast.AST, new: ast.AST) -> None:
        self.changes.append((".".join(self._scope), old, f"({ast.unparse(new)})"))

    def _visit_scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        # Neither decorators nor annotations, nor base classes.
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not node.name.startswith("__") or node.name == "__init__":
            self._visit_scope(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_scope(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Error texts have tests of their own."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """No test should need what is never false."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts, too."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        # A wrong index ends in an error at once, and some subscripts are types.
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            return
        if ast.unparse(node.value.func).rpartition(".")[2] in TALK:
            return
        self.changes.append((".".join(self._scope), node, "pass"))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        first, *further = node.ops
        swapped = COMPARISONS[type(first)]()
        self._add(node, ast.Compare(node.left, [swapped, *further], node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        swapped = ARITHMETIC.get(type(node.op))
        if swapped is not None and not _is_text(node.left) and not _is_text(node.right):
            self._add(node, ast.BinOp(node.left, swapped(), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, ast.BoolOp(swapped, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, node.operand)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, ast.Constant(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add(node, ast.Constant(node.value + 1))


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.JoinedStr, ast.List))


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    """Returns all mutants of a file."""
    finder = _Finder()
    finder.visit(ast.parse(source))
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    counts: Counter[str] = Counter()
    mutants = []
    for scope, node, new in finder.changes:
        assert isinstance(node, (ast.expr, ast.stmt)), "it has a place"
        assert node.end_lineno is not None, "so does its end"
        assert node.end_col_offset is not None, "so does its end"
        start = line_starts[node.lineno - 1] + node.col_offset
        end = line_starts[node.end_lineno - 1] + node.end_col_offset
        key = f"{module}:{scope}: {ast.unparse(node)} -> {new}"
        counts[key] += 1
        if counts[key] > 1:
            key = f"{key} #{counts[key]}"
        mutants.append(Mutant(key, module, start, end, new))
    return mutants


def modules() -> list[str]:
    """Returns the files that get mutants, below the package."""
    package = ROOT / PACKAGE
    files = [path for room in ("algorithm", "engine") for path in (package / room).glob("*.py")]
    files += [package / "federation" / f"{name}.py" for name in RULES]
    return sorted(path.relative_to(package).as_posix() for path in files)


def all_mutants() -> list[Mutant]:
    mutants = list[Mutant]()
    for module in modules():
        mutants += mutants_of(module, (ROOT / PACKAGE / module).read_bytes())
    return mutants


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns some mutants, chosen by their keys: a change of the source changes few of them."""

    def rank(mutant: Mutant) -> bytes:
        return sha256(f"{seed} {mutant.key}".encode()).digest()

    return sorted(mutants, key=rank)[:count]


# Running them


def files_for(module: str) -> list[str]:
    """Returns what runs against the mutants of a module: its doctests, then tests."""
    names = TESTS.get(module) or TESTS[module.partition("/")[0]]
    return [f"{PACKAGE}/{module}", *(f"tests/{name}" for name in names)]


def copied(folder: Path) -> Path:
    """Copies the checkout, without ignored files, and the compiled library into a folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    for name in [*names, f"{PACKAGE}/compression/libfp4.so"]:
        if name and (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def passes(folder: Path, files: Sequence[str], timeout: float) -> bool:
    """Returns whether the tests pass in time in a copy of the checkout."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # The same examples each time.
    command += ["--hypothesis-seed=0", "-m", MARKERS, *files]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        # Ranks that a mutant left waiting.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def survivors_among(mutants: Sequence[Mutant], folder: Path) -> Iterator[Mutant]:
    """Runs each mutant in a copy of the checkout, and yields those that no test notices."""
    seconds: dict[str, float] = {}
    for number, mutant in enumerate(mutants, start=1):
        files = files_for(mutant.module)
        names = " ".join(files)
        if names not in seconds:
            start = time.monotonic()
            if not passes(folder, files, timeout=3600):
                raise SystemExit(f"Without a mutant these tests fail: {names}")
            seconds[names] = time.monotonic() - start
        path = folder / PACKAGE / mutant.module
        source = path.read_bytes()
        path.write_bytes(mutant.applied_to(source))
        try:
            # A mutant may also make a loop endless.
            survives = passes(folder, files, timeout=60 + 3 * seconds[names])
        finally:
            path.write_bytes(source)
        word = "SURVIVES" if survives else "killed"
        print(f"{number}/{len(mutants)} {word} {mutant.key}", flush=True)
        if survives:
            yield mutant


def listed_survivors() -> dict[str, str]:
    """Returns why each mutant that is known to survive means the same, by key."""
    reasons: dict[str, str] = json.loads(SURVIVORS.read_text())
    return reasons


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="how many mutants run")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--list", action="store_true", help="only name the mutants")
    return parser


def print_keys(title: str, keys: Iterable[str]) -> None:
    print(title, *keys, sep="\n  ")


def main(arguments: Sequence[str] | None = None) -> int:
    options = arguments_parser().parse_args(arguments)
    mutants = all_mutants()
    chosen = sample(mutants, options.count, options.seed)
    reasons = listed_survivors()
    outdated = reasons.keys() - {mutant.key for mutant in mutants}
    unlisted = [mutant for mutant in chosen if mutant.key not in reasons]
    if options.list:
        print("\n".join(mutant.key for mutant in unlisted))
        return 0
    shutil.rmtree(options.folder, ignore_errors=True)
    survivors = list(survivors_among(unlisted, copied(options.folder)))
    print(
        f"{len(unlisted) - len(survivors)} of {len(chosen)} mutants killed,"
        f" {len(chosen) - len(unlisted)} known to mean the same, {len(survivors)} survive."
    )
    list_name = SURVIVORS.relative_to(ROOT)
    if survivors:
        title = (
            f"Add a test that notices each of these, or list it in {list_name} with the sentence"
            " why the program means the same:"
        )
        print_keys(title, [mutant.key for mutant in survivors])
    if outdated:
        print_keys(f"{list_name} lists what is no mutant any more; remove it:", sorted(outdated))
    return 1 if survivors or outdated else 0


if __name__ == "__main__":
    raise SystemExit(main())
