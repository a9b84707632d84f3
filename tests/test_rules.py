"""The rules of the house as tests: rooms whose imports go down only, one door to the network, no
Lightning below.

Documentation cannot lie: pictures are those of the imports, and what pages name exists and is
described.
"""

import ast
import inspect
import re
import sys
import types
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
GROUND = {
    room for room, floor in FLOOR.items() if floor == 0
}  # single files, which everybody may use
FACE = {"__init__", "lightning_pytorch", "pytorch_lightning", "ray"}
LIGHTNING = {
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "torchmetrics",
}
# What of a federation decides, given the time and what was heard; and what of it trains. The rest
# moves bytes.
RULES = [
    f"{NAME}.federation.{name}"
    for name in ("run_config", "codec", "follower", "ledger", "messages", "quorum", "untrained")
]
TRITON = f"{NAME}.compression.fp4_triton"  # imported on a GPU alone, by what it does the work of
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
    names = {
        ast.unparse(node)
        for node in nodes_of(module)
        if isinstance(node, (ast.Attribute, ast.Name))
    }
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
    names = set()
    for node in nodes_of(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            }
    return names


# Rooms


def test_every_file_is_in_a_room_and_imports_go_down_only_without_a_circle() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == FACE | GROUND
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == FLOOR.keys() - GROUND
    assert [pair for pair in architecture.arrows(SOURCE) if not architecture.allowed(*pair)] == []
    assert SOURCE.circles == []
    # The reading of the source finds what is known.
    assert SOURCE.imports[f"{NAME}.engine.simulation"] >= {
        f"{NAME}.engine.engine",
        f"{NAME}.comm.topology",
    }
    assert f"{NAME}.lightning_pytorch" in SOURCE.imports[NAME]
    assert "lightning" in tops_of(f"{NAME}.lightning_pytorch")


def private_names(modules: list[str]) -> set[str]:
    """The private names that modules define, without methods of named tuples, and the names of
    Lightning's objects.
    """
    names = set[str]().union(*map(defined_in, modules)) - {entry.name for entry in REGISTER}
    return {name for name in names if re.match("_[^_]", name)} - {"_make", "_replace", "_asdict"}


def test_rooms_use_no_private_names_of_others_forward_none_and_state_their_purpose() -> None:
    for room in FLOOR.keys() - GROUND:
        foreign = private_names(of_rooms(*FLOOR.keys() - {room})) - private_names(of_rooms(room))
        for module in of_rooms(room):
            attributes = [node for node in nodes_of(module) if isinstance(node, ast.Attribute)]
            reached = [
                node
                for node in attributes
                if ast.unparse(node.value) not in ("self", "cls", "super()")
            ]
            assert [ast.unparse(node) for node in reached if node.attr in foreign] == [], module
            ours = [name for source, name in imported_from(module) if source.startswith(NAME)]
            assert [name for name in ours if name.startswith("_")] == [], module
        if room not in ("tools", "compression"):
            (said,) = SOURCE.trees[f"{NAME}.{room}"].body
            assert len(ast.unparse(said).split("\\n")) > 3, room


# What a room may know


def test_only_lightnings_rooms_know_it_and_only_the_face_imports_a_distribution() -> None:
    users = {module for module in SOURCE.files if tops_of(module) & LIGHTNING}
    # What is mixed with classes of either distribution is checked against one of them.
    for_types = set(of_rooms("lightning", "tools"))
    assert users - for_types <= {NAME, *(f"{NAME}.{face}" for face in FACE)}
    for distribution, face in (
        ("lightning", "lightning_pytorch"),
        ("pytorch_lightning", "pytorch_lightning"),
    ):
        assert {module for module in users - for_types if distribution in tops_of(module)} == {
            f"{NAME}.{face}"
        }
        for module in for_types:
            statements = [
                node
                for node in SOURCE.trees[module].body
                if isinstance(node, (ast.Import, ast.ImportFrom))
            ]
            assert not [
                node
                for node in statements
                if ast.unparse(node).split()[1].split(".")[0] == distribution
            ]


def test_rooms_below_lightning_need_only_torch_and_arithmetic_not_even_that() -> None:
    standard = set(sys.stdlib_module_names)
    below = [room for room in FLOOR if FLOOR[room] < FLOOR["lightning"]]
    arithmetic = (
        "algorithm.partition",
        "algorithm.schedule",
        "errors",
        "planning.link",
        "planning.paper",
    )
    plain = standard | {NAME, "typing_extensions"}
    mean = f"{NAME}.federation.mean"
    for modules, allowed in (
        # typing_extensions and fsspec come with torch.
        (
            [module for module in of_rooms(*below) if module not in (mean, TRITON)],
            plain | {"torch", "fsspec"},
        ),
        ([mean], plain | {"numpy"}),
        ([TRITON], plain | {"torch", "triton"}),
        ([f"{NAME}.{name}" for name in arithmetic], standard),
        ([*of_rooms("planning"), *RULES], plain),
    ):
        for module in modules:
            assert tops_of(module) <= allowed, module
            # An extra is imported by its name, where it is used.
            extras = {
                ast.literal_eval(call.args[0]).split(".")[0] for call in calls_of(module, "extra")
            }
            assert extras <= (
                {"grpc", "grpc_health", "cryptography"}
                if room_of(module) == "federation"
                else set()
            ), module


def test_compressions_know_no_others_and_federation_rules_no_clock_chance_or_file() -> None:
    ground = {f"{NAME}.{name}" for name in GROUND}
    bases = {f"{NAME}.compression.{name}" for name in ("base", "blockwise")} | ground | {TRITON}
    # The table of names holds all families, and a wrapper takes one by its name.
    table = {f"{NAME}.compression", f"{NAME}.compression.names"}
    members = set(of_rooms("compression")) - bases - table
    bases |= table | {f"{NAME}.compression.feedback"}  # ByLink gives its codes error feedback
    assert len(members) >= 2
    assert {
        member: SOURCE.imports[member] - bases
        for member in members
        if SOURCE.imports[member] - bases
    } == {}
    assert SOURCE.imports[f"{NAME}.compression.base"] <= ground
    clocks_and_files = {
        "time",
        "datetime",
        "random",
        "secrets",
        "os",
        "pathlib",
        "socket",
        "threading",
        "asyncio",
    }
    arithmetic = [f"{NAME}.algorithm.{name}" for name in ("schedule", "weighting")]
    for module in RULES:
        assert tops_of(module) & clocks_and_files == set(), module
        assert SOURCE.imports[module] <= {*RULES, f"{NAME}.errors", *arithmetic}, module
    pure = {
        "abc",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "operator",
        "re",
        "statistics",
    }
    for module in arithmetic:
        assert tops_of(module) <= {*pure, "struct", "typing", "typing_extensions", NAME}, module
        assert SOURCE.imports[module] <= {f"{NAME}.errors"}, module


def test_nothing_that_another_rank_or_the_network_sends_is_unpickled() -> None:
    pickling = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    objects = {f"dist.{name}_object" for name in ("all_gather", "gather")}
    objects |= {f"dist.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}
    for module in SOURCE.files:
        # Threads of one process hand each other whatever a project broadcasts.
        assert module == f"{NAME}.tools.simulate.threads" or tops_of(module) & pickling == set(), (
            module
        )
        assert words_of(module) & objects == set(), module
        loads = [
            ast.unparse(call)
            for call in calls_of(module, "load")
            if "torch.load" in ast.unparse(call)
        ]
        # The exception is a file that the user names, read as the user says.
        is_users = module == f"{NAME}.lightning.model_format"
        assert is_users or all("weights_only=True" in load for load in loads), module
    moving_bytes = set(of_rooms("federation")) - set(SITE)
    assert len(moving_bytes) > 10
    for module in moving_bytes:
        assert words_of(module) & {"eval", "exec", "torch"} == set(), module


def test_only_launch_and_tools_read_the_environment() -> None:
    words = {"environ", "environb", "getenv", "getenvb"}
    readers = {
        room_of(m)
        for m in SOURCE.files
        if (words_of(m) | {name for _, name in imported_from(m)}) & words
    }
    assert readers == {"launch", "tools"}


def test_only_comm_issues_collectives_and_makes_process_groups() -> None:
    """Others may take types from ``torch.distributed``, stores at which ranks meet, and files."""
    types = {"ProcessGroup", "DTensor", "DeviceMesh", "Work"}
    names_of = {"launch": {"Store", "TCPStore", "PrefixStore"}}
    modules_of = {
        "launch": "torch.distributed.elastic",
        "lightning": "torch.distributed.checkpoint",
    }
    for module in set(SOURCE.files) - set(of_rooms("comm")):
        room = room_of(module)
        for source, name in imported_from(module):
            is_allowed = name in types | names_of.get(room, set()) or source.startswith(
                modules_of.get(room, "-")
            )
            assert is_allowed or not f"{source}.{name}".startswith("torch.distributed"), module
        imports = [
            alias.name
            for node in nodes_of(module)
            if isinstance(node, ast.Import)
            for alias in node.names
        ]
        assert not [name for name in imports if name.startswith("torch.distributed")], module
        attributes = [
            ast.unparse(node) for node in nodes_of(module) if isinstance(node, ast.Attribute)
        ]
        assert not [name for name in attributes if "torch.distributed" in name], module


# Documentation

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_pictures_are_those_of_the_imports() -> None:
    for picture in ("architecture", "architecture-dark"):
        text = (ROOT / "docs" / "images" / f"{picture}.svg").read_text()
        drawn = re.findall(r'id="(\w+)-imports-(\w+)-(\d+)"', text)
        assert {(one, other): int(count) for one, other, count in drawn} == dict(
            architecture.arrows(SOURCE)
        ), "imports changed: run python docs/make_architecture.py, and look at the picture"


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


def test_files_and_names_in_the_architecture_page_exist() -> None:
    """Files, also those of CONTRIBUTING.md; names, such as of functions and arguments; what a
    step's file defines.
    """
    page = quoted(PAGE)
    files = {
        name
        for name in page + quoted((ROOT / "CONTRIBUTING.md").read_text())
        if re.fullmatch(r"\S+(\.py|\.md|/)", name)
    }
    names = {name.removesuffix("()") for name in page if not name.endswith(".py")}
    names = {name for name in names if re.fullmatch(r"\w+(\.\w+)?", name)}
    steps = re.findall(r"\| `([\w/]+)\.py`<br>([^|]*)\|", PAGE)
    assert min(len(files), len(names), 2 * len(steps)) > 20
    there = {module: defined_in(module) for module in SOURCE.files}
    wrong = {name for name in files if not (PACKAGE / name).exists() and not (ROOT / name).exists()}
    wrong |= names - set().union(*there.values())
    for file, told in steps:
        wrong |= {
            f"{file}: {name}"
            for name in set(quoted(told)) - there.get(f"{NAME}.{file.replace('/', '.')}", set())
        }
    assert wrong == set()


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
            assert any(
                f"\ndef {test}(" in path.read_text() for path in (ROOT / "tests").rglob(file)
            ), (page, file, test)
    rows = [
        line
        for line in (ROOT / "docs" / "works-with.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    heads = ("| what ", "| works ", "| refused ")
    assert [row for row in rows if not row.startswith(heads) and "::test_" not in row] == []


def test_each_promise_has_a_page_whose_tests_the_specification_lists() -> None:
    """The files that the pages of decisions name exist, too."""
    folder = ROOT / "docs" / "decisions"
    specification = (folder / "specification.md").read_text()
    rows = re.findall(r"^\| (\d+)\. \[[^\]]+\]\(([\w-]+\.md)\) \|", specification, flags=re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    tests_of_promises = set(named_tests("decisions/specification.md"))
    assert set().union(*(named_tests(f"decisions/{page}") for _, page in rows)) == tests_of_promises
    index = (folder / "index.md").read_text()
    for path in folder.glob("*.md"):
        text = path.read_text()
        assert path.name == "index.md" or f"({path.name})" in index, path.name
        code = re.search(r"\*\*In the code\.\*\* ([^*]+)", text)
        for file in quoted(code[1]) if code else ():
            assert (PACKAGE / file).exists(), (path.name, file)


def test_names_of_tests_are_statements_of_at_most_80_characters() -> None:
    headless = re.compile("test_(what|who|whom|whose|where|which|that)_")
    names = [
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)
    ]
    assert len(names) > 700
    assert [name for name in names if len(name) > 80 or headless.match(name)] == []


def test_public_names_are_unique_in_the_api_reference_and_documented_with_an_example() -> None:
    """What users can name, with the public members that the package defines; internals describe
    themselves.
    """
    names = lightning_sdiloco.__all__
    assert len(set(names)) == len(names)
    assert "StreamingDiLoCoStrategy" in names
    page = (ROOT / "docs" / "api.md").read_text()
    assert (
        set(names)
        - {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", page, flags=re.M)}
        == set()
    )
    found: dict[str, object] = {}
    for room in (lightning_sdiloco, lightning_sdiloco.compression):
        found |= {f"{room.__name__}.{name}": getattr(room, name) for name in room.__all__}
    for thing in list(found.values()):
        for base in getattr(thing, "__mro__", ()):
            # Methods that override Lightning's are described there.
            if base.__module__.startswith(f"{NAME}.") and room_of(base.__module__) not in (
                "lightning",
                architecture.FACE,
            ):
                members = [
                    (name, member)
                    for name, member in vars(base).items()
                    if not name.startswith("_")
                ]
                found |= {f"{base.__qualname__}.{name}": member for name, member in members}
    assert {"StreamingDiLoCo.step", "Compression.encode", f"{NAME}.FP4"} <= found.keys()
    described = (type, types.FunctionType, property, classmethod, staticmethod)
    assert [
        name
        for name, thing in found.items()
        if isinstance(thing, described) and not inspect.getdoc(thing)
    ] == []
    classes = [
        thing
        for thing in (getattr(lightning_sdiloco, name) for name in names)
        if isinstance(thing, type)
    ]
    bare = [thing for thing in classes if "Examples:\n" not in (inspect.getdoc(thing) or "")]
    assert all(issubclass(thing, Exception) for thing in bare), bare
