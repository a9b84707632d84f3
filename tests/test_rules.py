"""The rules of the code as tests: who may import what, no Lightning in the engine, one door to the network, docs."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_sdiloco

PACKAGE = Path(lightning_sdiloco.__file__).parent
ROOT = PACKAGE.parent
NAME = "lightning_sdiloco"

# Everything else is engine: a new file belongs to it until it is named here.
EDGE = {
    NAME,
    f"{NAME}.addresses",
    f"{NAME}.averaging",
    f"{NAME}.buckets",
    f"{NAME}.callback",
    f"{NAME}.checkpoint",
    f"{NAME}.choosing",
    f"{NAME}.cli",
    f"{NAME}.collectives",
    f"{NAME}.doctor",
    f"{NAME}.doctor.checks",
    f"{NAME}.doctor.command",
    f"{NAME}.doctor.links",
    f"{NAME}.doctor.machine",
    f"{NAME}.doctor.text",
    f"{NAME}.epochs",
    f"{NAME}.failures",
    f"{NAME}.groups",
    f"{NAME}.launcher",
    f"{NAME}.lightning_pytorch",
    f"{NAME}.model_parallel",
    f"{NAME}.own_state",
    f"{NAME}.metrics",
    f"{NAME}.launched",
    f"{NAME}.meeting",
    f"{NAME}.monitor",
    f"{NAME}.placing",
    f"{NAME}.promptness",
    f"{NAME}.planning.command",
    f"{NAME}.planning.picture",
    f"{NAME}.planning.text",
    f"{NAME}.pytorch_lightning",
    f"{NAME}.reading",
    f"{NAME}.reachability",
    f"{NAME}.refused",
    f"{NAME}.reporting.command",
    f"{NAME}.reporting.page",
    f"{NAME}.reporting.pictures",
    f"{NAME}.reporting.records",
    f"{NAME}.reporting.series",
    f"{NAME}.reporting.timeline",
    f"{NAME}.reporting.verdict",
    f"{NAME}.replacing",
    f"{NAME}.requests",
    f"{NAME}.saving",
    f"{NAME}.sharded_files",
    f"{NAME}.scalars",
    f"{NAME}.signals",
    f"{NAME}.silence",
    f"{NAME}.steps",
    f"{NAME}.simulating.command",
    f"{NAME}.simulating.configuration",
    f"{NAME}.simulating.picture",
    f"{NAME}.simulating.processes",
    f"{NAME}.simulating.recording",
    f"{NAME}.simulating.running",
    f"{NAME}.simulating.sweeping",
    f"{NAME}.simulating.text",
    f"{NAME}.simulating.turns",
    f"{NAME}.strategy",
    f"{NAME}.uneven",
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
# Arithmetic on numbers and names.
WITHOUT_TENSORS = {
    f"{NAME}.{name}" for name in ("counting", "errors", "partition", "planning.link", "planning.paper", "schedule")
}
NETWORK = {f"{NAME}.{name}" for name in ("communicator", "exchange.direct", "exchange.on_device", "topology")}


# Reading the source


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
ENGINE = sorted(set(MODULES) - EDGE)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node but what only type checkers read. Inside functions too: late imports hide cycles."""
    yield node
    for child in node.orelse if is_for_types_only(node) else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from executed(child)


def imports_of(module: str) -> set[str]:
    """The full names of all that a module imports; of ours the files, of others whatever stands in the statement."""
    names = set()
    for node in executed(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & MODULES.keys() or {str(node.module)}
    return names


def tops_of(module: str) -> set[str]:
    """The packages that a module imports from."""
    return {name.split(".")[0] for name in imports_of(module)}


GRAPH = {module: imports_of(module) & MODULES.keys() for module in MODULES}


def chains(names: list[str]) -> set[str]:
    """The dotted names, such as os.environ, that occur in modules, each with its module."""
    return {
        f"{module}: {ast.unparse(node)}"
        for module in names
        for node in executed(tree_of(module))
        if isinstance(node, (ast.Attribute, ast.Name))
    }


# Imports


def test_the_reading_of_the_source_finds_what_is_known() -> None:
    assert GRAPH[f"{NAME}.simulation"] >= {f"{NAME}.engine", f"{NAME}.flight", f"{NAME}.topology"}
    assert "lightning" in tops_of(f"{NAME}.lightning_pytorch")
    assert f"{NAME}.strategy" not in GRAPH[f"{NAME}.callback"], "an import for types only"
    assert f"{NAME}.pytorch_lightning" in GRAPH[NAME]
    assert len(ENGINE) > 15


@pytest.mark.parametrize("module", ENGINE)
def test_no_file_of_the_engine_imports_lightning(module: str) -> None:
    assert not tops_of(module) & LIGHTNING


@pytest.mark.parametrize("module", ENGINE)
def test_no_file_of_the_engine_imports_the_edge(module: str) -> None:
    assert not GRAPH[module] & EDGE


@pytest.mark.parametrize("module", ENGINE)
def test_the_engine_needs_torch_alone(module: str) -> None:
    # typing_extensions comes with torch.
    assert tops_of(module) <= {NAME, "torch", "typing_extensions"} | sys.stdlib_module_names


def test_only_one_file_of_the_edge_imports_each_distribution() -> None:
    assert [module for module in MODULES if "lightning" in tops_of(module)] == [f"{NAME}.lightning_pytorch"]
    assert [module for module in MODULES if "pytorch_lightning" in tops_of(module)] == [f"{NAME}.pytorch_lightning"]


def cycle_from(module: str, path: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Modules that import each other in a circle, if following the imports of one leads into it."""
    if module in path:
        return (*path[path.index(module) :], module)
    return next(filter(None, (cycle_from(other, (*path, module)) for other in sorted(GRAPH[module]))), ())


def test_imports_go_one_way() -> None:
    for module in GRAPH:
        assert cycle_from(module) == ()


def test_the_engine_does_not_depend_on_how_it_is_used() -> None:
    users = {f"{NAME}.engine", f"{NAME}.simulation", f"{NAME}.summary"}
    for module in set(ENGINE) - users:
        assert not GRAPH[module] & users


@pytest.mark.parametrize("module", sorted(WITHOUT_TENSORS))
def test_arithmetic_needs_neither_torch_nor_the_rest_of_the_package(module: str) -> None:
    assert tops_of(module) <= sys.stdlib_module_names


@pytest.mark.parametrize(("family", "shared"), [("compression", {"base", "blockwise"}), ("exchange", {"base"})])
def test_a_member_of_a_family_knows_no_other_member(family: str, shared: set[str]) -> None:
    bases = {f"{NAME}.{family}.{name}" for name in shared} | {f"{NAME}.staging"}
    members = [module for module in MODULES if module.startswith(f"{NAME}.{family}.") and module not in bases]
    assert len(members) >= 2
    for member in members:
        assert GRAPH[member] <= bases
    assert GRAPH[f"{NAME}.{family}.base"] == set()


# The environment and the network


def test_the_engine_does_not_read_the_environment() -> None:
    reads = {name for name in chains(ENGINE) if any(word in name for word in ("environ", "getenv"))}
    assert reads == set()
    for module in ENGINE:
        imported = {
            alias.name
            for node in executed(tree_of(module))
            if isinstance(node, ast.ImportFrom) and node.module == "os"
            for alias in node.names
        }
        assert not imported & {"environ", "environb", "getenv", "getenvb"}


COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "barrier", "send", "recv", "reduce", "scatter", "all_to_all")


def test_only_the_communicator_and_the_exchanges_send_anything() -> None:
    calls = {
        name
        for name in chains(list(MODULES))
        if ": dist." in name and any(word in name.rpartition(".")[2] for word in COLLECTIVES)
    }
    assert {name.split(":")[0] for name in calls} == NETWORK - {f"{NAME}.topology"}


def test_only_the_topology_names_the_world_and_makes_process_groups() -> None:
    words = ("WORLD", "new_group", "init_process_group", "get_world_group")
    users = {name.split(":")[0] for name in chains(list(MODULES)) if name.rpartition(".")[2] in words}
    assert users == {f"{NAME}.topology"}


def test_torch_distributed_is_imported_under_one_name_by_few() -> None:
    users = {module for module in MODULES if any(name.startswith("torch.distributed") for name in imports_of(module))}
    # The engine's start asks only whether there is a world; torch itself writes sharded checkpoints.
    assert users == NETWORK | {f"{NAME}.start", f"{NAME}.sharded_files"}
    asked = {name.split(": ")[1] for name in chains([f"{NAME}.start"]) if ": dist." in name}
    assert asked <= {"dist.is_available", "dist.is_initialized", "dist.get_world_size"}


# Without Lightning

WITHOUT_LIGHTNING = f"""
import sys

BLOCKED = {sorted(LIGHTNING | {"jsonargparse", "rich"})!r}


class Hidden:
    '''Finds what another finder finds, but for the blocked packages: as if they were not installed.'''

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)


sys.meta_path = [Hidden(finder) for finder in sys.meta_path]
"""

TRAINING = """
import torch

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCo

for name in BLOCKED:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} was not hidden")

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
engine = StreamingDiLoCo(model, sync_every=3, overlap_steps=1, layers_per_fragment=1)
before = engine.outer_state_dict()
for _ in range(9):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)) - 3).square().mean().backward()
    optimizer.step()
    engine.step()
engine.finish()
assert engine.report()["landings"] == 5, engine.report()
assert any(not torch.equal(before[name], after) for name, after in engine.outer_state_dict().items())
assert not hasattr(lightning_sdiloco, "StreamingDiLoCoStrategy")
assert "StreamingDiLoCoStrategy" not in lightning_sdiloco.__all__
assert all(hasattr(lightning_sdiloco, name) for name in lightning_sdiloco.__all__)
assert not [name for name in sys.modules if name.split(".")[0] in BLOCKED]
print("trained")
"""


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_trains_where_no_lightning_is_installed() -> None:
    assert run_python(WITHOUT_LIGHTNING + TRAINING).strip() == "trained"


REGISTERED = """
import lightning_sdiloco
from {distribution}.strategies import StrategyRegistry

assert "streaming_diloco" in StrategyRegistry
assert [name for name in sys.modules if name.split(".")[0] in BLOCKED] == []
print("StreamingDiLoCoStrategy" in lightning_sdiloco.__all__)
"""


@pytest.mark.parametrize(
    ("distribution", "other", "offered"),
    [("lightning.pytorch", "pytorch_lightning", "True"), ("pytorch_lightning", "lightning", "False")],
)
def test_one_distribution_is_enough(distribution: str, other: str, offered: str) -> None:
    hidden = WITHOUT_LIGHTNING.replace(repr(sorted(LIGHTNING | {"jsonargparse", "rich"})), repr([other]))
    assert run_python(hidden + REGISTERED.format(distribution=distribution)).strip() == offered


# Documentation


def is_public(node: ast.AST) -> bool:
    definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return definition and not node.name.startswith("_")  # type: ignore[attr-defined]


def is_described(node: ast.AST) -> bool:
    """Whether a definition has a docstring, inherits that of what it overrides, or takes over another."""
    if "override" in map(ast.unparse, getattr(node, "decorator_list", [])):
        return True
    assigned = {ast.unparse(t) for child in node.body if isinstance(child, ast.Assign) for t in child.targets}  # type: ignore[attr-defined]
    return bool(ast.get_docstring(node)) or "__doc__" in assigned  # type: ignore[arg-type]


def undescribed(node: ast.AST, name: str) -> Iterator[str]:
    """The public definitions of a module or class, and theirs, that have no docstring."""
    for child in filter(is_public, ast.iter_child_nodes(node)):
        qualified = f"{name}.{child.name}"  # type: ignore[attr-defined]
        if not is_described(child):
            yield qualified
        if isinstance(child, ast.ClassDef):
            yield from undescribed(child, qualified)


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_has_a_docstring(module: str) -> None:
    assert list(undescribed(tree_of(module), module)) == []


@pytest.mark.parametrize("module", MODULES)
def test_the_first_line_of_a_file_says_what_it_is_about(module: str) -> None:
    docstring = ast.get_docstring(tree_of(module))
    assert docstring
    assert MODULES[module].read_text().startswith('"""')
    assert docstring.split("\n")[0].endswith(".")


def named_by(page: Path) -> list[str]:
    """The tests that a page names, as ``file::test``."""
    return re.findall(r"`(test_\w+\.py::\w+)`", page.read_text())


def test_every_row_of_what_works_with_what_names_a_test_that_exists() -> None:
    page = ROOT / "docs" / "works-with.md"
    named = named_by(page)
    assert named
    for name in named:
        file, test = name.split("::")
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), name
    rows = [
        line
        for line in page.read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| what ", "| works ", "| refused "))
    ]
    assert [row for row in rows if "::test_" not in row] == []


def test_public_names_exist_and_appear_once() -> None:
    names = lightning_sdiloco.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(lightning_sdiloco, name) for name in names)
    assert "StreamingDiLoCoStrategy" in names


def test_public_names_appear_in_the_api_reference() -> None:
    page = ROOT / "docs" / "api.md"
    if not page.exists():
        pytest.skip("docs/api.md is not written yet")
    identifiers = {line.split()[1] for line in page.read_text().splitlines() if line.startswith("::: ")}
    documented = {identifier.rpartition(".")[2] for identifier in identifiers}
    assert set(lightning_sdiloco.__all__) - documented == set()
