"""The rules of the house, with teeth: layers, sizes, no hidden state, no device at import.

A room imports only from rooms to its left (lazy imports count too) and siblings do not import each
other. Everything here reads source text, so it needs neither torch nor a device.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from coverage_by_name import EXEMPT, MODULES_TESTED, imports_its_module, modules

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeclipse"
MAX_FILE_LINES = 400
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 60

# Left to right; rooms in one tuple are siblings. `testing` stands beside comm, for tests alone.
LAYERS: list[tuple[str, ...]] = [
    ("core",),
    ("cost",),
    ("schedule", "balance"),
    ("sim",),
    ("plan", "report"),
    ("ops",),
    ("comm",),
    ("tensor", "testing"),
    ("moe", "pipeline"),
    ("model",),
    ("hf",),
    ("train",),
    ("cli",),
]
PURE = {"core", "cost", "schedule", "balance", "sim", "plan", "report"}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# The only files that may name what torch keeps for itself, one in a room: they say what, and why.
PRIVATE_TORCH = "private_torch.py"
OF_PYTHON = {"_exit", "_replace", "_asdict"}  # os and named tuples
# The only files that may look at the environment.
READS_ENVIRONMENT = {"comm/start.py"}

FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), filename=str(path)) for path in FILES}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module) of every import in a file, those inside functions included."""
    package = ["moeclipse", *path.relative_to(SOURCE).parts[:-1]]
    found: list[tuple[int, str]] = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif is_call_to(node, "import_module") and isinstance(node.args[0], ast.Constant):
            found.append((node.lineno, node.args[0].value))
    return found


def is_call_to(node: ast.AST, name: str) -> bool:
    if not (isinstance(node, ast.Call) and node.args):
        return False
    function = node.func
    return getattr(function, "attr", getattr(function, "id", "")) == name


def layer_faults(path: Path) -> list[str]:
    room, faults = room_of(path), []
    for line, module in imported_modules(path):
        parts = module.split(".")
        where = f"{name_of(path)}:{line}"
        if parts[0] == "moeclipse" and len(parts) > 1 and parts[1] in LEVEL and room:
            other = parts[1]
            if other != room and LEVEL[other] >= LEVEL[room]:
                faults.append(f"{where}: {room} must not import {other}")
            if other == "testing" and room != "testing":
                faults.append(f"{where}: only tests import testing")
        if parts[0] in {"torch", "triton"} and room in PURE:
            faults.append(f"{where}: {room} is pure, it must not import {parts[0]}")
        if parts[0] in {"tyro", "rich"} and room != "cli":
            faults.append(f"{where}: {parts[0]} belongs to the command line")
        if parts[0] in {"pickle", "cloudpickle", "dill"}:
            faults.append(f"{where}: no pickle anywhere")
    return faults


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in FILES} - {""}
    assert rooms <= set(LEVEL), f"rooms without a layer: {rooms - set(LEVEL)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_never_step_upward(path: Path) -> None:
    assert not layer_faults(path)


def test_the_layer_check_sees_lazy_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "core"
    room.mkdir()
    bad = room / "bad.py"
    bad.write_text("def late():\n    from ..moe import layer\n    import torch\n")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    monkeypatch.setitem(TREES, bad, ast.parse(bad.read_text()))
    assert layer_faults(bad) == [
        "core/bad.py:2: core must not import moe",
        "core/bad.py:3: core is pure, it must not import torch",
    ]


def circles(needs: dict[str, set[str]]) -> list[list[str]]:
    """A way round for each file that needs itself in the end, the shortest first."""
    found = []
    for start in needs:
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            for other in sorted(needs[way[-1]]):
                if other == start:
                    found.append([*way, start])
                    ways = []
                    break
                if other not in seen:
                    seen.add(other)
                    ways.append([*way, other])
    return sorted(found, key=len)


def test_files_do_not_import_in_circles() -> None:
    """Lazy imports count, and those for types alone: a reader goes round in them just as well."""
    modules = {"moeclipse." + name_of(path).removesuffix(".py").replace("/", "."): path for path in FILES}
    needs: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = [module for _, module in imported_modules(path)]
        known = {module if module in modules else module.rpartition(".")[0] for module in named}
        needs[name] = known & modules.keys() - {name}
    assert sum(map(len, needs.values())) > 2 * len(FILES), "imports were not found"
    assert not circles(needs)


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})[0] == ["a", "b", "c", "a"]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines: there are two ideas in it"
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name_of(path)}: {node.name} has {length} lines"


def test_tests_and_benches_stay_short() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")]
    long = {str(path.relative_to(ROOT)) for path in files if path.read_text().count("\n") > MAX_TEST_LINES}
    assert len(files) > 100, "tests were not found"
    assert not long, "there are two ideas in them"


def test_modules_have_a_test_of_their_name() -> None:
    """That it covers most of their lines, `make coverage` sees."""
    assert set(EXEMPT) <= set(map(name_of, FILES))
    without = [module for module in modules() if not imports_its_module(module)]
    share = 1 - len(without) / len(modules())
    assert share >= MODULES_TESTED, f"no test file of this name imports {without}"


def repeated_classes(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    where: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(path.name)
    return {name: files for name, files in where.items() if len(files) > 1}


def test_a_class_name_stands_for_one_thing() -> None:
    assert not repeated_classes(TREES)
    texts = {"a.py": "class Move: ...", "b.py": "def late():\n class Move: ..."}
    twice = {Path(name): ast.parse(text) for name, text in texts.items()}
    assert repeated_classes(twice) == {"Move": ["a.py", "b.py"]}


def is_constant_name(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(map(is_constant_name, target.elts))
    return isinstance(target, ast.Name) and (
        target.id.lstrip("_").isupper() or (target.id.startswith("__") and target.id.endswith("__"))
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_level_mutable_state(path: Path) -> None:
    """Module level holds constants (UPPER_CASE), types and functions; nothing rebinds or fills them."""
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)
    for node in TREES[path].body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, mutable):
            bad = [t for t in targets if t is not None and not is_constant_name(t)]
            names = [ast.unparse(t) for t in bad]
            is_type = isinstance(value, ast.Call) and ast.unparse(value.func).endswith(
                ("TypeVar", "NewType", "ParamSpec")
            )
            assert is_type or not bad, f"{name_of(path)}:{node.lineno}: module-level state {names}"
    for node in ast.walk(TREES[path]):
        assert not isinstance(node, ast.Global), f"{name_of(path)}:{node.lineno}: `global`"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_environment_is_read_in_few_places(path: Path) -> None:
    if name_of(path) in READS_ENVIRONMENT or room_of(path) in {"cli", "testing"}:
        return
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            assert text not in {"os.environ", "os.getenv"}, f"{name_of(path)}:{node.lineno}: {text}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """What the package itself calls something."""
    names = set()
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def private_torch_names(tree: ast.Module, own: set[str]) -> list[str]:
    """Lines with a private name of torch: imported, behind a name that torch's was imported as, or behind any
    other object where neither this package nor Python has such a name."""
    from_torch, faults = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = (start + alias.name).split(".")
                if whole[0] == "torch":
                    from_torch.add(alias.asname or alias.name.partition(".")[0])
                    faults += [(node.lineno, ".".join(whole))] if any(map(is_private, whole)) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if dotted_root(node) in from_torch or (from_torch and node.attr not in own):
                faults.append((node.lineno, ast.unparse(node)))
        elif any(is_call_to(node, name) for name in ("getattr", "setattr", "hasattr")):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in own:
                faults.append((node.lineno, ast.unparse(node)))
    return [f"{line}: {text}" for line, text in sorted(set(faults))]


def dotted_root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


OWN_NAMES = own_names(TREES.values()) | OF_PYTHON


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_of_torch_stand_in_one_file_of_each_room(path: Path) -> None:
    if path.name != PRIVATE_TORCH:
        assert not private_torch_names(TREES[path], OWN_NAMES)


def test_a_private_name_of_torch_is_seen() -> None:
    text = """
import torch.distributed as dist
import torch
from torch.distributed import _symmetric_memory
from torch.nn.parallel import DistributedDataParallel as DDP
def late(work, module, op):
    from torch._C import _host_emptyCache
    torch._C._cuda_getCurrentRawStream(0)
    dist.distributed_c10d._get_default_store()
    DDP._set_params_and_buffers_to_ignore_for_model(module, [])
    work.own._share_cuda_()
    getattr(module, "_parameters")
    return op._replace(), work._ours, work.__class__, torch.cuda.synchronize
"""
    assert private_torch_names(ast.parse(text), {"_ours"} | OF_PYTHON) == [
        "4: torch.distributed._symmetric_memory",
        "7: torch._C._host_emptyCache",
        "8: torch._C",
        "8: torch._C._cuda_getCurrentRawStream",
        "9: dist.distributed_c10d._get_default_store",
        "10: DDP._set_params_and_buffers_to_ignore_for_model",
        "11: work.own._share_cuda_",
        "12: getattr(module, '_parameters')",
    ]


IMPORT_EVERYTHING = """
import pkgutil, socket, sys
def refuse(*args, **kwargs): raise AssertionError("importing opened a socket")
socket.socket.bind = socket.socket.connect = refuse
import moeclipse
assert "torch" not in sys.modules, "import moeclipse must not import torch"
for module in pkgutil.walk_packages(moeclipse.__path__, "moeclipse."):
    name = module.name
    if ".triton" in name or name.endswith("__main__") or ".cli" in name:
        continue
    __import__(name)
import torch
assert not torch.cuda.is_initialized(), "importing opened a device"
assert not torch.distributed.is_initialized()
assert not {"tyro", "rich"} & set(sys.modules), "the library must work without tyro and rich"
"""


def test_importing_everything_opens_no_device() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
