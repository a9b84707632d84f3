"""How heavy code is to read: ``python -m tests.readability FOLDER ... [--worst N]``.

Each number counts what a reader has to hold in the head:

* tokens, without docstrings and comments, and tokens in a statement
* complexity: 1, and 1 for each branch, loop, handler, ternary, comprehension, and operand of
  ``and`` and ``or``; asserts do not count
* locals: the names that a function binds, with its arguments and those of nested functions
* late attributes: attributes of ``self`` that a class first sets outside ``__init__``
* shortcuts: assignments of several values at once, and walruses
* vague names: names of `VAGUE` for locals, arguments, methods and attributes
* noun clauses: sentences of comments and docstrings that begin with What, Who or Where
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_VAGUE_WORDS = """
    own one told other others given made each found whole known here there was at of by asked say
    says kept came every heard said what who mine it rest item thing data val vals result tmp info
"""
VAGUE = frozenset(_VAGUE_WORDS.split())
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
_CONSTRUCTORS = ("__init__", "__post_init__", "__setstate__", "__new__")
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_NOUN_CLAUSE = re.compile(r"(?:^|[.!?:]\s+)(?:What|Who|Whose|Whom|Where|Whether)\b")


class Function(NamedTuple):
    place: str
    complexity: int
    locals: int
    parameters: int
    lines: int


class Weight(NamedTuple):
    """The sums over the files of a folder, and its functions."""

    counts: Counter[str]
    functions: list[Function]

    def table(self) -> dict[str, float]:
        counts = self.counts
        thousands = max(1, counts["statements"]) / 1000
        functions = self.functions
        return {
            "tokens": counts["tokens"],
            "tokens a statement": round(counts["tokens"] / max(1, counts["statements"]), 1),
            "complexity over 15": sum(f.complexity > 15 for f in functions),
            "complexity over 10": sum(f.complexity > 10 for f in functions),
            "over 15 locals": sum(f.locals > 15 for f in functions),
            "over 6 parameters": sum(f.parameters > 6 for f in functions),
            "over 60 lines": sum(f.lines > 60 for f in functions),
            "late attributes": counts["late attributes"],
            "shortcuts per 1,000 statements": round(counts["shortcuts"] / thousands, 1),
            "nested comprehensions per 1,000": round(counts["nested"] / thousands, 1),
            "ternaries per 1,000": round(counts["ternaries"] / thousands, 1),
            "vague names": counts["vague names"],
            "noun clauses per 1,000 words": round(
                1000 * counts["noun clauses"] / max(1, counts["words"]), 1
            ),
            "words of comments per 1,000": round(counts["words"] / thousands),
        }


def weigh(folder: Path) -> Weight:
    weight = Weight(Counter(), [])
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        docstrings = list(_docstrings(tree))
        weight.counts["statements"] -= len(docstrings)
        _weigh_tokens(text, docstrings, weight.counts)
        for node in ast.walk(tree):
            _weigh_node(node, weight.counts)
            if isinstance(node, _FUNCTIONS):
                weight.functions.append(_function(node, f"{path}:{node.lineno} {node.name}"))
    return weight


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                assert isinstance(first, ast.Expr)
                yield first


def _weigh_tokens(text: str, docstrings: list[ast.Expr], counts: Counter[str]) -> None:
    prose = [ast.literal_eval(docstring.value) for docstring in docstrings]
    skipped: set[int] = set()
    for docstring in docstrings:
        skipped.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token.string.lstrip("#: "))
        elif token.type not in _LAYOUT and token.start[0] not in skipped:
            counts["tokens"] += 1
    for passage in prose:
        counts["words"] += len(passage.split())
        counts["noun clauses"] += len(_NOUN_CLAUSE.findall(passage))


def _weigh_node(node: ast.AST, counts: Counter[str]) -> None:
    counts["statements"] += isinstance(node, ast.stmt)
    counts["shortcuts"] += isinstance(node, ast.NamedExpr) or _assigns_several(node)
    counts["ternaries"] += isinstance(node, ast.IfExp)
    if isinstance(node, _COMPREHENSIONS):
        inner = [part for part in ast.walk(node) if part is not node]
        counts["nested"] += any(isinstance(part, _COMPREHENSIONS) for part in inner)
    if isinstance(node, ast.ClassDef):
        _weigh_class(node, counts)
    if isinstance(node, _FUNCTIONS):
        names = {name.strip("_") for name in _bound(node)}
        is_operator = node.name in ("__eq__", "__lt__", "__or__", "__add__", "__ne__")
        counts["vague names"] += len(names & VAGUE) - (is_operator and "other" in names)


def _assigns_several(node: ast.AST) -> bool:
    several = (ast.Tuple, ast.List)
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], several) and isinstance(node.value, several)


def _weigh_class(node: ast.ClassDef, counts: Counter[str]) -> None:
    early: set[str] = set()
    late: set[str] = set()
    methods: set[str] = set()
    for part in node.body:
        if isinstance(part, _FUNCTIONS):
            methods.add(part.name.strip("_"))
            (early if part.name in _CONSTRUCTORS else late).update(_attributes_set(part))
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            early.add(part.target.id)
        elif isinstance(part, ast.Assign):
            early.update(t.id for t in part.targets if isinstance(t, ast.Name))
    counts["late attributes"] += len(late - early)
    attributes = {name.strip("_") for name in early | late}
    counts["vague names"] += len((methods | attributes) & VAGUE)


def _attributes_set(function: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _bound(function: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> Function:
    complexity = 1
    for part in ast.walk(node):
        complexity += isinstance(part, _BRANCHES)
        complexity += len(part.values) - 1 if isinstance(part, ast.BoolOp) else 0
        complexity += 1 + len(part.ifs) if isinstance(part, ast.comprehension) else 0
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    parameters = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return Function(
        place,
        complexity,
        locals=len(_bound(node)),
        parameters=0 if node.name == "__init__" else len(parameters),
        lines=lines,
    )


def main() -> None:
    arguments = sys.argv[1:]
    worst = 0
    if "--worst" in arguments:
        position = arguments.index("--worst")
        worst = int(arguments[position + 1])
        del arguments[position : position + 2]
    for folder in arguments:
        weight = weigh(Path(folder))
        print(folder)
        for name, number in weight.table().items():
            print(f"  {name:34}{number:>10,}")
        heaviest = sorted(weight.functions, key=lambda f: (f.complexity, f.locals), reverse=True)
        for function in heaviest[:worst]:
            print(f"  {function.complexity:4} {function.locals:3} {function.place}")


if __name__ == "__main__":
    main()
