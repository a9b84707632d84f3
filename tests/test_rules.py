"""The rules of the house as tests: rooms whose imports go down only, one door to the network, no Lightning below."""

import ast
import inspect
import re
import subprocess
import sys
import types
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import lightning_sdiloco
from lightning_sdiloco.lightning.host.patching import REGISTER

PACKAGE = Path(lightning_sdiloco.__file__).parent
ROOT = PACKAGE.parent
NAME = "lightning_sdiloco"

GROUND = {"errors", "memory", "registration"}  # single files, which everybody may use
FLOORS = [
    GROUND,
    {"compression", "comm"},
    {"algorithm", "launch"},
    {"engine", "planning"},
    {"federation"},
    {"lightning"},
    {"tools"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FACE = {"__init__", "lightning_pytorch", "pytorch_lightning"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
# What of a federation decides, given the time and what was heard; and what of it trains. The rest moves bytes.
RULES = [f"{NAME}.federation.{name}" for name in ("charter", "codec", "follower", "ledger", "messages", "quorum")]
SITE = [f"{NAME}.federation.{name}" for name in ("arithmetic", "config", "ranks", "site", "states")]


# Reading the source


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The room of a module; that of the face is its own file."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def of_rooms(*rooms: str) -> list[str]:
    return [module for module in MODULES if room_of(module) in rooms]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """All that a module says, inside functions and for type checkers too: both hide cycles."""
    return list(ast.walk(tree_of(module)))


@cache
def imports_of(module: str) -> frozenset[str]:
    """The full names of all that a module imports; of ours the files, of others whatever stands in the statement."""
    names = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & MODULES.keys() or {str(node.module)}
    return frozenset(names)


def tops_of(module: str) -> set[str]:
    """The packages that a module imports from."""
    return {name.split(".")[0] for name in imports_of(module)}


@cache
def graph() -> dict[str, frozenset[str]]:
    return {module: imports_of(module) & MODULES.keys() - {module} for module in MODULES}


def words_of(module: str) -> set[str]:
    """The dotted names that occur in a module, such as os.environ, and their last parts."""
    names = {ast.unparse(node) for node in nodes_of(module) if isinstance(node, (ast.Attribute, ast.Name))}
    return names | {name.rpartition(".")[2] for name in names}


def calls_of(module: str, function: str) -> list[ast.Call]:
    calls = [node for node in nodes_of(module) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == function]


# Rooms


def test_the_reading_of_the_source_finds_what_is_known() -> None:
    assert graph()[f"{NAME}.engine.simulation"] >= {f"{NAME}.engine.engine", f"{NAME}.comm.topology"}
    assert "lightning" in tops_of(f"{NAME}.lightning_pytorch")
    assert f"{NAME}.lightning_pytorch" in graph()[NAME]
    assert all(of_rooms(room) for room in FLOOR)


def test_every_file_is_in_a_room_and_imports_go_down_only_without_a_circle() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == FACE | GROUND
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == FLOOR.keys() - GROUND
    for module in of_rooms(*FLOOR):
        own = room_of(module)
        # A room knows itself; the face, which is above all, is no room.
        others = {other for other in graph()[module] if room_of(other) != own}
        assert [other for other in others if FLOOR.get(room_of(other), len(FLOORS)) >= FLOOR[own]] == [], module
    # It raises an error that names the circle.
    assert len(list(TopologicalSorter(graph()).static_order())) == len(graph())


# Methods of named tuples, and the names of Lightning's objects.
OF_OTHERS = {"_make", "_replace", "_asdict", *(entry.name for entry in REGISTER)}


def private_names(modules: list[str]) -> set[str]:
    """The private names that modules define: functions, classes, methods, and attributes of ``self``."""
    nodes = [node for module in modules for node in nodes_of(module)]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - OF_OTHERS


def test_no_room_reaches_into_the_private_names_of_another() -> None:
    for room in FLOOR.keys() - GROUND:
        own, others = private_names(of_rooms(room)), private_names(of_rooms(*FLOOR.keys() - {room}))
        for module in of_rooms(room):
            for node in nodes_of(module):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                    assert node.attr not in others - own, f"{module}: {ast.unparse(node)}"
                elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(NAME):
                    assert not [alias for alias in node.names if alias.name.startswith("_")], module


def test_a_room_says_what_it_is_for_and_forwards_no_name() -> None:
    for room in FLOOR.keys() - GROUND - {"tools", "compression"}:
        (said,) = tree_of(f"{NAME}.{room}").body
        assert len(ast.unparse(said).split("\\n")) > 3, room


# What a room may know


def test_only_the_rooms_of_lightning_know_it_and_only_its_face_imports_a_distribution() -> None:
    users = {room_of(module) for module in MODULES if tops_of(module) & LIGHTNING}
    assert users <= {"lightning", "tools", *FACE}
    # What is mixed with classes of either distribution is checked against one of them.
    for_types = set(of_rooms("lightning", "tools"))
    for distribution, face in (("lightning", "lightning_pytorch"), ("pytorch_lightning", "pytorch_lightning")):
        assert {module for module in MODULES if distribution in tops_of(module)} - for_types == {f"{NAME}.{face}"}
        for module in for_types:
            statements = [node for node in tree_of(module).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            assert not [node for node in statements if ast.unparse(node).split()[1].split(".")[0] == distribution]


PLAIN = {NAME, "typing_extensions"} | sys.stdlib_module_names


def test_what_is_below_lightning_needs_torch_alone_and_arithmetic_not_even_that() -> None:
    arithmetic = [f"{NAME}.{name}" for name in ("algorithm.partition", "algorithm.schedule", "errors")]
    for modules, allowed in (
        # typing_extensions and fsspec come with torch.
        (of_rooms(*set().union(*FLOORS[:5])), PLAIN | {"torch", "fsspec"}),
        ([*arithmetic, f"{NAME}.planning.link", f"{NAME}.planning.paper"], sys.stdlib_module_names),
        ([*of_rooms("planning"), *RULES], PLAIN),
    ):
        for module in modules:
            assert tops_of(module) <= allowed, module
            # An extra is imported by its name, where it is used.
            extras = {ast.literal_eval(call.args[0]).split(".")[0] for call in calls_of(module, "extra")}
            assert extras <= ({"grpc", "cryptography"} if room_of(module) == "federation" else set()), module


def test_a_compression_knows_no_other_one() -> None:
    ground = {f"{NAME}.{name}" for name in GROUND}
    bases = {f"{NAME}.compression.{name}" for name in ("base", "blockwise")} | ground
    members = [module for module in MODULES if module.startswith(f"{NAME}.compression.") and module not in bases]
    assert len(members) >= 2
    assert {member: graph()[member] - bases for member in members if graph()[member] - bases} == {}
    assert graph()[f"{NAME}.compression.base"] <= ground


def test_the_rules_of_a_federation_have_no_clock_no_chance_and_no_file() -> None:
    clocks_and_files = {"time", "datetime", "random", "secrets", "os", "pathlib", "socket", "threading", "asyncio"}
    for module in RULES:
        assert tops_of(module) & clocks_and_files == set(), module
        assert graph()[module] <= {*RULES, f"{NAME}.errors"}, module


PICKLING = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
OBJECTS = {f"dist.{name}_object" for name in ("all_gather", "gather")}
OBJECTS |= {f"dist.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}


def test_nothing_that_another_rank_or_the_network_sends_is_unpickled() -> None:
    for module in MODULES:
        # Threads of one process hand each other whatever a project broadcasts.
        assert module == f"{NAME}.tools.simulate.threads" or tops_of(module) & PICKLING == set(), module
        assert words_of(module) & OBJECTS == set(), module
        loads = [ast.unparse(call) for call in calls_of(module, "load") if "torch.load" in ast.unparse(call)]
        # The exception is a file that the user names, read as the user says.
        is_users = module == f"{NAME}.lightning.model_format"
        assert is_users or all("weights_only=True" in load for load in loads), module
    moving_bytes = [module for module in of_rooms("federation") if module not in SITE]
    assert len(moving_bytes) > 10
    for module in moving_bytes:
        assert words_of(module) & {"eval", "exec", "torch"} == set(), module


# The environment and the network


def test_only_launch_and_tools_read_the_environment() -> None:
    words = {"environ", "environb", "getenv", "getenvb"}
    imported = {f"os.{word}" for word in words}
    readers = {room_of(module) for module in MODULES if words_of(module) & words}
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, ast.ImportFrom) and {f"{node.module}.{alias.name}" for alias in node.names} & imported:
                readers.add(room_of(module))
    assert readers
    assert readers <= {"launch", "tools"}


# What rooms other than comm may take from torch.distributed: types, stores at which ranks meet, and files.
OF_DISTRIBUTED = {
    "launch": ("torch.distributed.elastic", "Store", "TCPStore", "PrefixStore"),
    "lightning": ("torch.distributed.checkpoint",),
}
TYPES = ("ProcessGroup", "DTensor", "DeviceMesh", "Work")


def test_only_comm_issues_collectives_and_makes_process_groups() -> None:
    for module in set(MODULES) - set(of_rooms("comm")):
        allowed = OF_DISTRIBUTED.get(room_of(module), ())
        for node in nodes_of(module):
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name.startswith("torch.distributed")], module
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.distributed"):
                names = {alias.name for alias in node.names}
                assert str(node.module).startswith(allowed or ("-",)) or names <= {*TYPES, *allowed}, module
            elif isinstance(node, ast.Attribute):
                assert "torch.distributed" not in ast.unparse(node), module


# Without Lightning

WITHOUT_LIGHTNING = """
import sys


class Hidden:
    '''Finds what another finder finds, but for the blocked packages: as if they were not installed.'''

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked} else self.finder.find_spec(name, path, target)


sys.meta_path = [Hidden(finder) for finder in sys.meta_path]
"""

TRAINING = """
import torch

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCo

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
engine = StreamingDiLoCo(model, sync_every=3, overlap_steps=1, fragments="strided:1")
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
assert not [name for name in sys.modules if name.split(".")[0] in {blocked}]
for name in {blocked}:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " was not hidden")
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_trains_where_no_lightning_is_installed() -> None:
    run_python((WITHOUT_LIGHTNING + TRAINING).format(blocked=sorted(LIGHTNING | {"jsonargparse", "rich"})))


# Documentation


def test_everything_exported_has_a_docstring() -> None:
    """What users can name, with the public members that the package defines; internals describe themselves."""
    found: dict[str, object] = {}
    for room in (lightning_sdiloco, lightning_sdiloco.compression):
        found |= {f"{room.__name__}.{name}": getattr(room, name) for name in room.__all__}
    for thing in list(found.values()):
        for base in getattr(thing, "__mro__", ()):
            # Methods that override Lightning's are described there.
            if base.__module__.startswith(f"{NAME}.") and room_of(base.__module__) not in ("lightning", *FACE):
                members = [(name, member) for name, member in vars(base).items() if not name.startswith("_")]
                found |= {f"{base.__qualname__}.{name}": member for name, member in members}
    assert {"StreamingDiLoCo.step", "Compression.encode", f"{NAME}.FP4"} <= found.keys()
    described = (type, types.FunctionType, property, classmethod, staticmethod)
    assert [name for name, thing in found.items() if isinstance(thing, described) and not inspect.getdoc(thing)] == []


def test_the_first_line_of_a_file_says_what_it_is_about() -> None:
    for module in MODULES:
        docstring = ast.get_docstring(tree_of(module)) or ""
        assert MODULES[module].read_text().startswith('"""'), module
        assert docstring.split("\n")[0].endswith("."), module


def test_the_tests_that_a_page_names_exist_and_every_row_of_what_works_with_what_names_one() -> None:
    for name in ("works-with.md", "methods.md"):
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "docs" / name).read_text())
        assert named
        for file, test in named:
            assert any(f"\ndef {test}(" in path.read_text() for path in (ROOT / "tests").rglob(file)), (file, test)
    rows = [line for line in (ROOT / "docs" / "works-with.md").read_text().splitlines() if line.startswith("| ")]
    heads = ("| what ", "| works ", "| refused ")
    assert [row for row in rows if not row.startswith(heads) and "::test_" not in row] == []


def test_public_names_appear_once_and_are_in_the_api_reference() -> None:
    names = lightning_sdiloco.__all__
    assert len(set(names)) == len(names)
    assert "StreamingDiLoCoStrategy" in names
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(names) - {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", page, flags=re.M)} == set()
