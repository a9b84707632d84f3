"""The rules of the house as tests: rooms whose imports go down only, one door to the network, no Lightning below."""

import ast
import sys
from functools import cache
from pathlib import Path

import lightning_sdiloco
from lightning_sdiloco.lightning.host import REGISTER

PACKAGE = Path(lightning_sdiloco.__file__).parent
ROOT = PACKAGE.parent
NAME = "lightning_sdiloco"
sys.path.append(str(ROOT / "docs"))

import make_architecture as architecture  # noqa: E402

SOURCE = architecture.Source(ROOT)
FLOOR = {room: floor for room, (floor, _) in architecture.ROOMS.items() if room != architecture.FACE}
GROUND = {room for room, floor in FLOOR.items() if floor == 0}  # single files, which everybody may use
FACE = {"__init__", "lightning_pytorch", "pytorch_lightning"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
# What of a federation decides, given the time and what was heard; and what of it trains. The rest moves bytes.
RULES = [f"{NAME}.federation.{name}" for name in ("run_config", "codec", "follower", "ledger", "messages", "quorum")]
SITE = [f"{NAME}.federation.{name}" for name in ("arithmetic", "config", "ranks", "site", "states")]


# Reading the source


room_of = architecture.room_of


def of_rooms(*rooms: str) -> list[str]:
    return [module for module in SOURCE.files if room_of(module) in rooms]


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """All that a module says, inside functions and for type checkers too: both hide cycles."""
    return list(ast.walk(SOURCE.trees[module]))


@cache
def tops_of(module: str) -> set[str]:
    """The packages that a module imports from."""
    names: set[str] = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names.add(str(node.module))
    return {name.split(".")[0] for name in names}


def words_of(module: str) -> set[str]:
    """The dotted names that occur in a module, such as os.environ, and their last parts."""
    names = {ast.unparse(node) for node in nodes_of(module) if isinstance(node, (ast.Attribute, ast.Name))}
    return names | {name.rpartition(".")[2] for name in names}


def calls_of(module: str, function: str) -> list[ast.Call]:
    calls = [node for node in nodes_of(module) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == function]


def imported_from(module: str) -> list[tuple[str, str]]:
    """The modules and names of its ``from`` imports."""
    statements = [node for node in nodes_of(module) if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in statements for alias in node.names]


# Rooms


def test_every_file_is_in_a_room_and_imports_go_down_only_without_a_circle() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == FACE | GROUND
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == FLOOR.keys() - GROUND
    assert [pair for pair in architecture.arrows(SOURCE) if not architecture.allowed(*pair)] == []
    assert SOURCE.circles == []
    # The reading of the source finds what is known.
    assert SOURCE.imports[f"{NAME}.engine.simulation"] >= {f"{NAME}.engine.engine", f"{NAME}.comm.topology"}
    assert f"{NAME}.lightning_pytorch" in SOURCE.imports[NAME]
    assert "lightning" in tops_of(f"{NAME}.lightning_pytorch")


def private_names(modules: list[str]) -> set[str]:
    """The private names that modules define: functions, classes, methods, and attributes of ``self``."""
    nodes = [node for module in modules for node in nodes_of(module)]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    # Not methods of named tuples, and the names of Lightning's objects.
    of_others = {"_make", "_replace", "_asdict", *(entry.name for entry in REGISTER)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - of_others


def test_no_room_reaches_into_the_private_names_of_another_says_what_it_is_for_and_forwards_no_name() -> None:
    for room in FLOOR.keys() - GROUND:
        foreign = private_names(of_rooms(*FLOOR.keys() - {room})) - private_names(of_rooms(room))
        for module in of_rooms(room):
            attributes = [node for node in nodes_of(module) if isinstance(node, ast.Attribute)]
            reached = [node for node in attributes if ast.unparse(node.value) not in ("self", "cls", "super()")]
            assert [ast.unparse(node) for node in reached if node.attr in foreign] == [], module
            ours = [name for source, name in imported_from(module) if source.startswith(NAME)]
            assert [name for name in ours if name.startswith("_")] == [], module
        if room not in ("tools", "compression"):
            (said,) = SOURCE.trees[f"{NAME}.{room}"].body
            assert len(ast.unparse(said).split("\\n")) > 3, room


# What a room may know


def test_only_the_rooms_of_lightning_know_it_and_only_its_face_imports_a_distribution() -> None:
    users = {module for module in SOURCE.files if tops_of(module) & LIGHTNING}
    # What is mixed with classes of either distribution is checked against one of them.
    for_types = set(of_rooms("lightning", "tools"))
    assert users - for_types <= {NAME, *(f"{NAME}.{face}" for face in FACE)}
    for distribution, face in (("lightning", "lightning_pytorch"), ("pytorch_lightning", "pytorch_lightning")):
        assert {module for module in users - for_types if distribution in tops_of(module)} == {f"{NAME}.{face}"}
        for module in for_types:
            statements = [node for node in SOURCE.trees[module].body if isinstance(node, (ast.Import, ast.ImportFrom))]
            assert not [node for node in statements if ast.unparse(node).split()[1].split(".")[0] == distribution]


def test_what_is_below_lightning_needs_torch_alone_and_arithmetic_not_even_that() -> None:
    standard, below = set(sys.stdlib_module_names), [room for room in FLOOR if FLOOR[room] < FLOOR["lightning"]]
    arithmetic = ("algorithm.partition", "algorithm.schedule", "errors", "planning.link", "planning.paper")
    plain = standard | {NAME, "typing_extensions"}
    for modules, allowed in (
        # typing_extensions and fsspec come with torch.
        (of_rooms(*below), plain | {"torch", "fsspec"}),
        ([f"{NAME}.{name}" for name in arithmetic], standard),
        ([*of_rooms("planning"), *RULES], plain),
    ):
        for module in modules:
            assert tops_of(module) <= allowed, module
            # An extra is imported by its name, where it is used.
            extras = {ast.literal_eval(call.args[0]).split(".")[0] for call in calls_of(module, "extra")}
            assert extras <= ({"grpc", "cryptography"} if room_of(module) == "federation" else set()), module


def test_a_compression_knows_no_other_one_and_the_rules_of_a_federation_no_clock_no_chance_and_no_file() -> None:
    ground = {f"{NAME}.{name}" for name in GROUND}
    bases = {f"{NAME}.compression.{name}" for name in ("base", "blockwise")} | ground
    members = {module for module in of_rooms("compression") if module != f"{NAME}.compression"} - bases
    assert len(members) >= 2
    assert {member: SOURCE.imports[member] - bases for member in members if SOURCE.imports[member] - bases} == {}
    assert SOURCE.imports[f"{NAME}.compression.base"] <= ground
    clocks_and_files = {"time", "datetime", "random", "secrets", "os", "pathlib", "socket", "threading", "asyncio"}
    for module in RULES:
        assert tops_of(module) & clocks_and_files == set(), module
        assert SOURCE.imports[module] <= {*RULES, f"{NAME}.errors"}, module


def test_nothing_that_another_rank_or_the_network_sends_is_unpickled() -> None:
    pickling = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    objects = {f"dist.{name}_object" for name in ("all_gather", "gather")}
    objects |= {f"dist.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}
    for module in SOURCE.files:
        # Threads of one process hand each other whatever a project broadcasts.
        assert module == f"{NAME}.tools.simulate.threads" or tops_of(module) & pickling == set(), module
        assert words_of(module) & objects == set(), module
        loads = [ast.unparse(call) for call in calls_of(module, "load") if "torch.load" in ast.unparse(call)]
        # The exception is a file that the user names, read as the user says.
        is_users = module == f"{NAME}.lightning.model_format"
        assert is_users or all("weights_only=True" in load for load in loads), module
    moving_bytes = set(of_rooms("federation")) - set(SITE)
    assert len(moving_bytes) > 10
    for module in moving_bytes:
        assert words_of(module) & {"eval", "exec", "torch"} == set(), module


def test_only_launch_and_tools_read_the_environment() -> None:
    words = {"environ", "environb", "getenv", "getenvb"}
    readers = {room_of(m) for m in SOURCE.files if (words_of(m) | {name for _, name in imported_from(m)}) & words}
    assert readers == {"launch", "tools"}


def test_only_comm_issues_collectives_and_makes_process_groups() -> None:
    """Others may take types from ``torch.distributed``, stores at which ranks meet, and files."""
    types = {"ProcessGroup", "DTensor", "DeviceMesh", "Work"}
    names_of = {"launch": {"Store", "TCPStore", "PrefixStore"}}
    modules_of = {"launch": "torch.distributed.elastic", "lightning": "torch.distributed.checkpoint"}
    for module in set(SOURCE.files) - set(of_rooms("comm")):
        room = room_of(module)
        for source, name in imported_from(module):
            is_allowed = name in types | names_of.get(room, set()) or source.startswith(modules_of.get(room, "-"))
            assert is_allowed or not f"{source}.{name}".startswith("torch.distributed"), module
        imports = [alias.name for node in nodes_of(module) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in imports if name.startswith("torch.distributed")], module
        attributes = [ast.unparse(node) for node in nodes_of(module) if isinstance(node, ast.Attribute)]
        assert not [name for name in attributes if "torch.distributed" in name], module
