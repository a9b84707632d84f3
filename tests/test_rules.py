"""The rules of the house as tests: rooms whose imports go down only, one door to the network, no
Lightning below.

Documentation cannot lie: pictures are those of the imports, and names on pages exist and are
described.
"""

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterable
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
FLOOR = {
    room: floor for room, (floor, _) in architecture.ROOMS.items() if room != architecture.FACE
}
# Single files, which everybody may use.
GROUND = {room for room, floor in FLOOR.items() if floor == 0}
FACE = {"__init__", "lightning_pytorch", "pytorch_lightning", "ray"}
LIGHTNING = {
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "torchmetrics",
}


def of_federation(*names: str) -> list[str]:
    return [f"{NAME}.federation.{name}" for name in names]


# The modules of a federation that decide, given the time and the messages so far; and those that
# train. The others move bytes.
RULES = of_federation(
    "run_config", "codec", "follower", "ledger", "messages", "quorum", "untrained"
)
SITE = of_federation("arithmetic", "config", "ranks", "site", "states")
TRITON = f"{NAME}.compression.fp4_triton"  # imported on a GPU alone, by the module it replaces


# Reading the source


room_of = architecture.room_of


def of_rooms(*rooms: str) -> list[str]:
    return [module for module in SOURCE.files if room_of(module) in rooms]


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """The syntax of a module, also inside functions and for type checkers: both hide cycles."""
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


def attributes_of(module: str) -> list[ast.Attribute]:
    return [node for node in nodes_of(module) if isinstance(node, ast.Attribute)]


def words_of(module: str) -> set[str]:
    """The dotted names that occur in a module, such as os.environ, and their last parts."""
    names = {node.id for node in nodes_of(module) if isinstance(node, ast.Name)}
    names |= {ast.unparse(node) for node in attributes_of(module)}
    return names | {name.rpartition(".")[2] for name in names}


def calls_of(module: str, function: str) -> list[ast.Call]:
    calls = [node for node in nodes_of(module) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == function]


def imported_from(module: str) -> list[tuple[str, str]]:
    """The modules and names of its ``from`` imports."""
    statements = [node for node in nodes_of(module) if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in statements for alias in node.names]


def defined_in(module: str) -> set[str]:
    """The functions, classes, methods and attributes that a module defines, methods also behind
    their class.
    """
    names = set[str]()
    for node in nodes_of(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


# Rooms


def test_every_file_is_in_a_room_and_imports_go_down_only_without_a_circle() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == FACE | GROUND
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == FLOOR.keys() - GROUND
    assert [pair for pair in architecture.arrows(SOURCE) if not architecture.allowed(*pair)] == []
    assert SOURCE.circles == []
    # The reading of the source finds imports that exist.
    known_imports = {f"{NAME}.engine.engine", f"{NAME}.comm.topology"}
    assert SOURCE.imports[f"{NAME}.engine.simulation"] >= known_imports
    assert f"{NAME}.lightning_pytorch" in SOURCE.imports[NAME]
    assert "lightning" in tops_of(f"{NAME}.lightning_pytorch")


def private_names(modules: list[str]) -> set[str]:
    """The private names that modules define, without methods of named tuples, and the names of
    Lightning's objects.
    """
    names = set[str]().union(*map(defined_in, modules)) - {entry.name for entry in REGISTER}
    return {name for name in names if re.match("_[^_]", name)} - {"_make", "_replace", "_asdict"}


def reached_names(module: str) -> list[ast.Attribute]:
    """The attributes that a module uses of objects other than its own."""
    own_objects = ("self", "cls", "super()")
    return [node for node in attributes_of(module) if ast.unparse(node.value) not in own_objects]


def test_rooms_use_no_private_names_of_others_forward_none_and_state_their_purpose() -> None:
    for room in FLOOR.keys() - GROUND:
        foreign = private_names(of_rooms(*FLOOR.keys() - {room})) - private_names(of_rooms(room))
        for module in of_rooms(room):
            reached = [node for node in reached_names(module) if node.attr in foreign]
            assert [ast.unparse(node) for node in reached] == [], module
            ours = [name for source, name in imported_from(module) if source.startswith(NAME)]
            assert [name for name in ours if name.startswith("_")] == [], module
        if room not in ("tools", "compression"):
            (docstring,) = SOURCE.trees[f"{NAME}.{room}"].body
            assert len(ast.unparse(docstring).split("\\n")) > 3, room


# Knowledge that a room may have


def imported_on_top(module: str) -> set[str]:
    """The packages that a module imports outside functions and conditions."""
    statements = SOURCE.trees[module].body
    imports = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {ast.unparse(node).split()[1].split(".")[0] for node in imports}


def test_only_lightnings_rooms_know_it_and_only_the_face_imports_a_distribution() -> None:
    users = {module for module in SOURCE.files if tops_of(module) & LIGHTNING}
    # Classes that are mixed with those of either distribution are checked against one of them.
    for_types = set(of_rooms("lightning", "tools"))
    assert users - for_types <= {NAME, *(f"{NAME}.{face}" for face in FACE)}
    faces = {"lightning": "lightning_pytorch", "pytorch_lightning": "pytorch_lightning"}
    for distribution, face in faces.items():
        importers = {module for module in users - for_types if distribution in tops_of(module)}
        assert importers == {f"{NAME}.{face}"}
        for module in for_types:
            assert distribution not in imported_on_top(module)


STANDARD = set(sys.stdlib_module_names)
PLAIN = STANDARD | {NAME, "typing_extensions"}


def check_needs(modules: Iterable[str], allowed: set[str]) -> None:
    """An extra is imported by its name, where it is used."""
    for module in modules:
        assert tops_of(module) <= allowed, module
        extras = set[str]()
        if room_of(module) == "federation":
            extras = {"grpc", "grpc_health", "cryptography"}
        for call in calls_of(module, "extra"):
            assert ast.literal_eval(call.args[0]).split(".")[0] in extras, module


def test_rooms_below_lightning_need_only_torch_and_arithmetic_not_even_that() -> None:
    mean = f"{NAME}.federation.mean"
    below = of_rooms(*(room for room in FLOOR if FLOOR[room] < FLOOR["lightning"]))
    # typing_extensions and fsspec come with torch.
    check_needs(set(below) - {mean, TRITON}, PLAIN | {"torch", "fsspec"})
    check_needs([mean], PLAIN | {"numpy"})
    check_needs([TRITON], PLAIN | {"torch", "triton"})
    check_needs([*of_rooms("planning"), *RULES], PLAIN)
    arithmetic = ("algorithm.partition", "algorithm.schedule", "errors")
    arithmetic += ("planning.link", "planning.paper")
    check_needs([f"{NAME}.{name}" for name in arithmetic], STANDARD)


# The files of the distribution for hubs.
HUB_FILES = re.findall(
    r'^"\.\./(\S+)" = "\1"$', (ROOT / "hub" / "pyproject.toml").read_text(), flags=re.MULTILINE
)


def test_the_hubs_wheel_has_just_the_modules_of_its_commands_and_they_need_no_torch() -> None:
    at_import = {NAME: {f"{NAME}.registration", f"{NAME}.version"}}  # others when they are used
    modules = set[str]()
    pending = {f"{NAME}.tools.{name}" for name in ("cli", "hub", "keys", "status")}
    while pending:
        module = pending.pop()
        modules.add(module)
        parents = {module.rpartition(".")[0]} - {""}
        pending |= (parents | at_import.get(module, SOURCE.imports[module])) - modules
    assert sorted(str(SOURCE.files[module].relative_to(ROOT)) for module in modules) == HUB_FILES
    check_needs(modules - {NAME}, PLAIN | {"fsspec", "jsonargparse", "numpy", "rich"})


CLOCKS_AND_FILES = {
    *("time", "datetime", "random", "secrets", "os", "pathlib", "socket", "threading", "asyncio")
}
PURE = {
    *("abc", "collections", "dataclasses", "functools", "itertools", "math", "operator", "re"),
    *("statistics", "struct", "typing", "typing_extensions"),
}


def test_compressions_know_no_others_and_federation_rules_no_clock_chance_or_file() -> None:
    ground = {f"{NAME}.{name}" for name in GROUND}
    bases = {f"{NAME}.compression.{name}" for name in ("base", "blockwise")} | ground | {TRITON}
    # The table of names holds all families, and a wrapper takes one by its name.
    table = {f"{NAME}.compression", f"{NAME}.compression.names"}
    members = set(of_rooms("compression")) - bases - table
    bases |= table | {f"{NAME}.compression.feedback"}  # ByLink gives its codes error feedback
    assert len(members) >= 2
    for member in members:
        assert SOURCE.imports[member] <= bases, member
    assert SOURCE.imports[f"{NAME}.compression.base"] <= ground
    arithmetic = [f"{NAME}.algorithm.{name}" for name in ("guard", "schedule")]
    for module in RULES:
        assert tops_of(module) & CLOCKS_AND_FILES == set(), module
        assert SOURCE.imports[module] <= {*RULES, f"{NAME}.errors", *arithmetic}, module
    for module in arithmetic:
        assert tops_of(module) <= {*PURE, NAME}, module
        assert SOURCE.imports[module] <= {f"{NAME}.errors"}, module


def test_nothing_that_another_rank_or_the_network_sends_is_unpickled() -> None:
    pickling = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    objects = {f"dist.{name}_object" for name in ("all_gather", "gather")}
    objects |= {f"dist.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}
    for module in SOURCE.files:
        # Threads of one process hand each other all that a project broadcasts.
        if module != f"{NAME}.tools.simulate.threads":
            assert tops_of(module) & pickling == set(), module
        assert words_of(module) & objects == set(), module
        # The exception is a file that the user names, read as the user says.
        if module != f"{NAME}.lightning.model_format":
            loads = [ast.unparse(call) for call in calls_of(module, "load")]
            loads = [load for load in loads if "torch.load" in load]
            assert all("weights_only=True" in load for load in loads), module
    moving_bytes = set(of_rooms("federation")) - set(SITE)
    assert len(moving_bytes) > 10
    for module in moving_bytes:
        assert words_of(module) & {"eval", "exec", "torch"} == set(), module


def test_only_launch_and_tools_read_the_environment() -> None:
    words = {"environ", "environb", "getenv", "getenvb"}
    readers = set()
    for module in SOURCE.files:
        imported = {name for _, name in imported_from(module)}
        if (words_of(module) | imported) & words:
            readers.add(room_of(module))
    assert readers == {"launch", "tools"}


def test_only_comm_issues_collectives_and_makes_process_groups() -> None:
    """Others may take types from ``torch.distributed``, stores at which ranks meet, and files."""
    for module in set(SOURCE.files) - set(of_rooms("comm")):
        for source, name in imported_from(module):
            assert may_import(room_of(module), source, name), module
        imports = [node for node in nodes_of(module) if isinstance(node, ast.Import)]
        names = [alias.name for node in imports for alias in node.names]
        assert not [name for name in names if name.startswith("torch.distributed")], module
        attributes = [ast.unparse(node) for node in attributes_of(module)]
        assert not [name for name in attributes if "torch.distributed" in name], module


def may_import(room: str, source: str, name: str) -> bool:
    if not f"{source}.{name}".startswith("torch.distributed"):
        return True
    if room == "launch" and name in {"Store", "TCPStore", "PrefixStore"}:
        return True
    if room == "launch" and source.startswith("torch.distributed.elastic"):
        return True
    if room == "lightning" and source.startswith("torch.distributed.checkpoint"):
        return True
    return name in {"ProcessGroup", "DTensor", "DeviceMesh", "Work"}


# Documentation

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_pictures_are_those_of_the_imports() -> None:
    for picture in ("architecture", "architecture-dark"):
        text = (ROOT / "docs" / "images" / f"{picture}.svg").read_text()
        drawn = re.findall(r'id="(\w+)-imports-(\w+)-(\d+)"', text)
        arrows = {(upper, lower): int(count) for upper, lower, count in drawn}
        assert arrows == dict(architecture.arrows(SOURCE)), (
            "imports changed: run python docs/make_architecture.py, and look at the picture"
        )


def test_chains_and_circles_of_imports_are_found(tmp_path: Path) -> None:
    package = tmp_path / NAME
    package.mkdir()
    for name, text in {
        "__init__": "from lightning_sdiloco.a import x",
        "a": "def f():\n    from lightning_sdiloco import b",
        "b": "if TYPE_CHECKING:\n    import lightning_sdiloco.c",
        "c": "from lightning_sdiloco.b import y\nfrom lightning_sdiloco.d import z",
        "d": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    source = architecture.Source(tmp_path)
    assert source.circles == [{f"{NAME}.b", f"{NAME}.c"}]
    assert [len(link) for link in source.longest_chain] == [1, 1, 2, 1]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def exists(file: str) -> bool:
    return (PACKAGE / file).exists() or (ROOT / file).exists()


def test_files_and_names_in_the_architecture_page_exist() -> None:
    """Files, also those of CONTRIBUTING.md; names, such as of functions and arguments; and the names
    in the row of a step, which its file defines.
    """
    page = quoted(PAGE)
    with_contributing = page + quoted((ROOT / "CONTRIBUTING.md").read_text())
    files = {name for name in with_contributing if re.fullmatch(r"\S+(\.py|\.md|/)", name)}
    names = {name.removesuffix("()") for name in page if not name.endswith(".py")}
    names = {name for name in names if re.fullmatch(r"\w+(\.\w+)?", name)}
    steps = re.findall(r"\| `([\w/]+)\.py`<br>([^|]*)\|", PAGE)
    assert min(len(files), len(names), 2 * len(steps)) > 20
    definitions = {module: defined_in(module) for module in SOURCE.files}
    assert {file for file in files if not exists(file)} == set()
    assert names - set().union(*definitions.values()) == set()
    for file, row in steps:
        defined = definitions.get(f"{NAME}.{file.replace('/', '.')}", set())
        assert set(quoted(row)) - defined == set(), file


def named_tests(page: str) -> list[tuple[str, str]]:
    """Returns the tests that a page names, each as its file and its function."""
    return re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "docs" / page).read_text())


def test_tests_that_pages_name_exist_and_every_row_of_works_with_names_one() -> None:
    decisions = [f"decisions/{path.name}" for path in (ROOT / "docs" / "decisions").glob("*.md")]
    assert len(decisions) > 20
    pages = {"works-with.md", "methods.md", *decisions} - {"decisions/index.md"}
    for page in sorted(pages):
        tests = named_tests(page)
        assert tests, page
        for file, test in tests:
            texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
            assert any(f"\ndef {test}(" in text for text in texts), (page, file, test)
    lines = (ROOT / "docs" / "works-with.md").read_text().splitlines()
    heads = ("| what ", "| works ", "| refused ")
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(heads)]
    assert [row for row in rows if "::test_" not in row] == []


def test_each_promise_has_a_page_whose_tests_the_specification_lists() -> None:
    """The files that the pages of decisions name exist, too."""
    folder = ROOT / "docs" / "decisions"
    specification = (folder / "specification.md").read_text()
    rows = re.findall(r"^\| (\d+)\. \[[^\]]+\]\(([\w-]+\.md)\) \|", specification, flags=re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    tests_of_pages = set().union(*(named_tests(f"decisions/{page}") for _, page in rows))
    assert tests_of_pages == set(named_tests("decisions/specification.md"))
    index = (folder / "index.md").read_text()
    for path in folder.glob("*.md"):
        text = path.read_text()
        assert path.name == "index.md" or f"({path.name})" in index, path.name
        code = re.search(r"\*\*In the code\.\*\* ([^*]+)", text)
        for file in quoted(code[1]) if code else ():
            assert (PACKAGE / file).exists(), (path.name, file)


def test_names_of_tests_are_statements_of_at_most_80_characters() -> None:
    headless = re.compile("test_(what|who|whom|whose|where|which|that)_")
    names = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        names += re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)
    assert len(names) > 700
    assert [name for name in names if len(name) > 80 or headless.match(name)] == []


def public_objects() -> dict[str, object]:
    """Everything that users can name, with the public members that the package defines; internals
    describe themselves.
    """
    objects: dict[str, object] = {}
    for room in (lightning_sdiloco, lightning_sdiloco.compression):
        objects |= {f"{room.__name__}.{name}": getattr(room, name) for name in room.__all__}
    for public in list(objects.values()):
        for base in getattr(public, "__mro__", ()):
            # Methods that override Lightning's are described there.
            if base.__module__.startswith(f"{NAME}.") and room_of(base.__module__) not in (
                "lightning",
                architecture.FACE,
            ):
                names = [name for name in vars(base) if not name.startswith("_")]
                objects |= {f"{base.__qualname__}.{name}": vars(base)[name] for name in names}
    return objects


def test_each_public_name_has_a_page_that_index_and_navigation_list() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    described = [re.findall(r"^::: (\S+)", page.read_text(), flags=re.M) for page in pages]
    described_names = {path.rpartition(".")[2] for paths in described for path in paths}
    assert set(lightning_sdiloco.__all__) - described_names == set()
    first_names = [paths[0].rpartition(".")[2] for paths in described]
    assert first_names == [page.stem for page in pages], "each class has the page of its name"
    index = (ROOT / "docs" / "api.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in pages:
        assert f"](api/{page.name})" in index, page.name
        assert f" {page.stem}: api/{page.name}\n" in navigation, page.name


def test_public_names_are_unique_and_documented_with_an_example() -> None:
    names = lightning_sdiloco.__all__
    assert len(set(names)) == len(names)
    assert "StreamingDiLoCoStrategy" in names
    objects = public_objects()
    assert {"StreamingDiLoCo.step", "Compression.encode", f"{NAME}.FP4"} <= objects.keys()
    kinds = (type, types.FunctionType, property, classmethod, staticmethod)
    described = {name: public for name, public in objects.items() if isinstance(public, kinds)}
    assert [name for name, public in described.items() if not inspect.getdoc(public)] == []
    public_classes = [getattr(lightning_sdiloco, name) for name in names]
    for public in public_classes:
        if isinstance(public, type) and "Examples:\n" not in (inspect.getdoc(public) or ""):
            assert issubclass(public, Exception), public
