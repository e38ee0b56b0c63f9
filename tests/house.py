"""The rules of the house, with teeth: layers, sizes, no hidden state, names. `make lint` runs it.

A room imports only from rooms to its left (lazy imports count too) and siblings do not import each other.
Everything here reads source text, so it needs neither torch nor a device, and it tells all faults at once.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from coverage_by_name import EXEMPT, MODULES_TESTED, imports_its_module, modules
from selection import LONG_PART, LongPart
from static_cases import declared_tests

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeclipse"
MAX_FILE_LINES = 400
MOST_LINES = 500
LONGER = {
    "moe/exchange/dispatch_combine.py": "one node of autograd: what each op does forward and backward",
    "moe/layer.py": "a reader follows forward through the stages of the layer without changing file",
}
"""Files that may have up to MOST_LINES, and why."""
LEAST_LINES, OFTEN = 60, 3
"""A file with fewer lines is used by so many others, or is a fragment of one that uses it."""
ONE_EACH = ("ops/", "schedule/", "hf/private_torch.py", "comm/private_torch.py")
"""One operation or generator a file; one file a room that names what torch keeps for itself."""
ALONE = {
    "cli/ask_seat.py": "a program of its own, which the launcher starts on a seat",
    "cli/evaluated.py": "in words, without the display that shows them",
    "cli/heatmap.py": "a drawing for two commands",
    "cli/launcher_folder.py": "owner, mode and lock of a folder: guarded, and tested apart",
    "cli/page_line.py": "loads the report's figures, when a run is over",
    "cli/pin.py": "what is asked of the system, apart from launching",
    "cli/stopped_ranks.py": "a thread beside the launcher",
    "cli/train_help.py": "loads all of a run's configuration, for help alone",
    "comm/connect.py": "for a mesh and for pipelines",
    "comm/reduce/begun.py": "all_reduce.py and collectives.py would import each other",
    "comm/reduce/flat.py": "shapes alone; all_reduce.py is as long as a file may be",
    "comm/reduce/plain.py": "for ranks that share no memory: without any of peer memory's code",
    "core/renames.py": "old keys, until nobody has them",
    "hf/dense_families.py": "a table",
    "hf/manifest.py": "for who writes a folder, and who reads one",
    "hf/missing_families.py": "a table",
    "hf/trainer_callback.py": "loads transformers' trainer",
    "model/conv_mixer.py": "a mixer",
    "model/sampling.py": "torch, which its configuration does without",
    "report/equal.py": "several runs, where figures are of one",
    "report/slowdown.py": "pure, and fed while a run goes",
    "testing/compare.py": "for tests",
    "train/data/standard_library.py": "text of another program; corpus.py is as long as a file may be",
    "train/documents/recipe.py": "between a configuration and documents, which know nothing of it",
    "train/generate/sample.py": "what a run ends with; text.py knows nothing of runs",
    "train/observe/metrics_config.py": "keys, without what they configure",
    "train/optim/state_place.py": "between a configuration and state_travel's plan",
    "train/run/observers.py": "what a display has to be, without a display",
    "train/step/memory_state.py": "only models with segment memory have it",
}
"""Shorter ones that stand alone all the same, and why."""
UNTYPED = {"comm": 4, "moe": 15, "train": 9}
"""Functions of a room with `Any` in their signature; whoever takes one away writes the new number.

What is left: numbers of a tensor as lists, as deep as it is (comm 3); what experts take, keep for backward
(moe 8); hooks, options and state of torch's own classes (moe 7); JSON of files, of other processes and of
earlier versions, before it was looked at (comm 1, train 6); options checked by name (train 2); a row of a
table from other ranks (train 1).
"""
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

# The only file that opens and parses what others may have made; the others that read say what.
READS_FILES = "core/outside.py"
READS_ITS_OWN = {
    "comm/failure.py": "words that a rank has signed",
    "comm/gather_json.py": "words of ranks over their own connections",
    "comm/mesh.py": "its own words",
    "comm/group.py": "/proc",
    "comm/watch/op_log.py": "a log of its own, mapped",
    "cli/two_ranks.py": "words of a process of its own",
    "cli/launch.py": "/sys",
    "cli/guard.py": "a file of its own",
    "cli/launcher_folder.py": "a lock",
    "cli/main.py": "/dev/null",
    "cli/signals.py": "/proc",
    "comm/shared/host.py": "memory of ranks",
    "core/forking.py": "/proc",
    "core/host_memory.py": "/proc",
    "core/toml.py": "text that was read",
    "report/page.py": "files of the package",
    "train/fingerprint.py": "its own words",
    "train/presets.py": "files of the package",
    "train/run/run_lock.py": "/proc",
    "train/checkpoints/disk.py": "a folder, to make it durable",
    "train/run/run_files.py": "a file that grows",
    "testing/run_ranks.py": "/proc and stacks of ranks",
}
"""Why these may read without `core/outside`."""
READERS = {"read_text", "read_bytes", "fromfile", "from_file"}
BY_NAME = {"safe_open", "memmap", "load_file", "read_metadata", "ParquetFile", "np.load"}
"""Of libraries that open by name: the name must come from `regular`."""

# The only files that print: through what makes words of others harmless.
PRINTS = ("core/shown.py", "cli/terminal.py")
PRINTS_ITS_OWN = {
    "cli/completion.py": "a script",
    "cli/words.py": "help",
    "cli/failures.py": "the end of a line",
    "testing/run_ranks.py": "stacks of ranks, for developers",
}
"""Why these may write to a terminal without it."""

Trees = dict[str, ast.Module]
"""Syntax trees by the name of their file, as `moe/layer.py`."""


def trees_of(source: Path = SOURCE) -> Trees:
    files = sorted(source.rglob("*.py"))
    return {path.relative_to(source).as_posix(): ast.parse(path.read_text(), str(path)) for path in files}


def room_of(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Walked once for all rules: walking is most of what they cost."""
    return tuple(ast.walk(tree))


@functools.cache
def imported_modules(name: str, tree: ast.Module) -> list[tuple[int, str]]:
    """(line, absolute module) of every import in a file, those inside functions included."""
    package = ["moeclipse", *name.split("/")[:-1]]
    found: list[tuple[int, str]] = []
    for node in nodes_of(tree):
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


def unknown_rooms(trees: Trees) -> Iterator[str]:
    for room in sorted({room_of(name) for name in trees} - {"", *LEVEL}):
        yield f"{room}/: a room without a layer"


def imports_upward(trees: Trees) -> Iterator[str]:
    for name, tree in trees.items():
        room = room_of(name)
        for line, module in imported_modules(name, tree):
            parts = module.split(".")
            where = f"{name}:{line}"
            if parts[0] == "moeclipse" and len(parts) > 1 and parts[1] in LEVEL and room in LEVEL:
                other = parts[1]
                if other != room and LEVEL[other] >= LEVEL[room]:
                    yield f"{where}: {room} must not import {other}"
                if other == "testing" and room != "testing":
                    yield f"{where}: only tests import testing"
            if parts[0] in {"torch", "triton"} and room in PURE:
                yield f"{where}: {room} is pure, it must not import {parts[0]}"
            if parts[0] == "rich" and room != "cli":
                yield f"{where}: {parts[0]} belongs to the command line"
            if parts[0] in {"pickle", "cloudpickle", "dill"}:
                yield f"{where}: no pickle anywhere"


def circles(trees: Trees) -> Iterator[str]:
    """Lazy imports count, and those for types alone: a reader goes round in them just as well."""
    modules = {"moeclipse." + name.removesuffix(".py").replace("/", "."): name for name in trees}
    needs: dict[str, set[str]] = {}
    for module, name in modules.items():
        named = [other for _, other in imported_modules(name, trees[name])]
        known = {other if other in modules else other.rpartition(".")[0] for other in named}
        needs[module] = known & modules.keys() - {module}
    for way in sorted(ways_round(needs), key=len):
        yield f"a circle of imports: {' -> '.join(way)}"


def ways_round(needs: dict[str, set[str]]) -> Iterator[list[str]]:
    """The shortest way round for each file that needs itself in the end."""
    for start in needs:
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            for other in sorted(needs[way[-1]]):
                if other == start:
                    yield [*way, start]
                    ways = []
                    break
                if other not in seen:
                    seen.add(other)
                    ways.append([*way, other])


def long_ones(trees: Trees) -> Iterator[str]:
    for name, tree in trees.items():
        lines = max((node.end_lineno or 0 for node in tree.body), default=0)
        if lines > (MOST_LINES if name in LONGER else MAX_FILE_LINES):
            yield f"{name} has {lines} lines: there are two ideas in it"
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    yield f"{name}:{node.lineno}: {node.name} has {length} lines"


def fragments(trees: Trees) -> Iterator[str]:
    """A reader of one question should not be sent to a file that answers a part of it."""
    yield from (f"{name}: may stand alone, and is gone" for name in ALONE if name not in trees)
    modules = {"moeclipse." + name.removesuffix(".py").replace("/", "."): name for name in trees}
    users: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for _, module in imported_modules(name, tree):
            used = modules.get(module) or modules.get(module.rpartition(".")[0], "")
            users.setdefault(used, set()).add(name)
    for name, tree in trees.items():
        lines = max((node.end_lineno or 0 for node in tree.body), default=0)
        apart = name in ALONE or name in EXEMPT or name.startswith(ONE_EACH) or "/__" in f"/{name}"
        if lines < LEAST_LINES and not apart and len(users.get(name, set()) - {name}) < OFTEN:
            yield f"{name} has {lines} lines and hardly a user: say in ALONE why, or merge it"


def long_tests_and_benches(_: Trees) -> Iterator[str]:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")]
    assert len(files) > 100, "tests were not found"
    for path in files:
        if path.read_text().count("\n") > MAX_TEST_LINES:
            yield f"{path.relative_to(ROOT)}: there are two ideas in it"


def stale_names_in_the_long_part(_: Trees) -> Iterator[str]:
    """A test that is gone ends every run of the suite before it begins; a case that is gone runs no more."""
    for name, (_, cases) in LongPart(LONG_PART.read_text()).cases.items():
        file, _, test = name.partition("::")
        tests = declared_tests(ROOT / file) if (ROOT / file).is_file() else {}
        if test not in tests:
            yield f"{LONG_PART.name}: nobody has {name}"
        elif cases:
            known = tests[test].cases()
            gone = sorted(case for case in cases if not known.fullmatch(case[1:-1]))
            yield from (f"{LONG_PART.name}: {name} has no case {case}" for case in gone)


def untyped_signatures(trees: Trees) -> Iterator[str]:
    """What a function takes and gives is what a reader, and an editor, knows of it."""
    for room, most in UNTYPED.items():
        files = [tree for name, tree in trees.items() if room_of(name) == room]
        number = sum(map(says_any, chain.from_iterable(map(nodes_of, files))))
        if files and number != most:
            yield f"{room}/: {number} signatures have Any in them; UNTYPED says {most}, and only falls"


def says_any(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    hints = [node.returns, *(part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg))]
    names = chain.from_iterable(ast.walk(hint) for hint in hints if hint is not None)
    return any(isinstance(name, ast.Name) and name.id == "Any" for name in names)


def modules_without_a_test_of_their_name(trees: Trees) -> Iterator[str]:
    """That it covers most of their lines, `make coverage` sees."""
    yield from (f"{name}: exempt from a test of its name, and gone" for name in EXEMPT if name not in trees)
    without = [module for module in modules() if not imports_its_module(module)]
    if len(without) > (1 - MODULES_TESTED) * len(modules()):
        yield from (f"{module}: no test file of this name imports it" for module in without)


def repeated_classes(trees: Trees) -> Iterator[str]:
    where: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    for name, files in where.items():
        if len(files) > 1:
            yield f"class {name} stands for several things: {', '.join(files)}"


def is_constant_name(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(map(is_constant_name, target.elts))
    return isinstance(target, ast.Name) and (
        target.id.lstrip("_").isupper() or (target.id.startswith("__") and target.id.endswith("__"))
    )


def module_level_state(trees: Trees) -> Iterator[str]:
    """Module level holds constants (UPPER_CASE), types and functions; nothing rebinds or fills them."""
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)
    for name, tree in trees.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, mutable):
                bad = [ast.unparse(t) for t in targets if t is not None and not is_constant_name(t)]
                is_type = isinstance(value, ast.Call) and ast.unparse(value.func).endswith(
                    ("TypeVar", "NewType", "ParamSpec")
                )
                if bad and not is_type:
                    yield f"{name}:{node.lineno}: module-level state {', '.join(bad)}"
        for node in nodes_of(tree):
            if isinstance(node, ast.Global):
                yield f"{name}:{node.lineno}: `global`"


def environment_read(trees: Trees) -> Iterator[str]:
    for name, tree in trees.items():
        if name in READS_ENVIRONMENT or room_of(name) in {"cli", "testing"}:
            continue
        for node in nodes_of(tree):
            if isinstance(node, ast.Attribute) and (text := ast.unparse(node)) in {"os.environ", "os.getenv"}:
                yield f"{name}:{node.lineno}: {text}"


def files_read_elsewhere(trees: Trees) -> Iterator[str]:
    """Whatever comes from outside comes through one door, so that bounds hold for every reader."""
    yield from (f"{name}: may read its own, and is gone" for name in READS_ITS_OWN if name not in trees)
    for name, tree in trees.items():
        if name == READS_FILES or name in READS_ITS_OWN:
            continue
        for node in nodes_of(tree):
            if isinstance(node, ast.Call) and (reads_a_file(node) or opens_by_name(node)):
                yield f"{name}:{node.lineno}: {ast.unparse(node)[:60]} does not go through {READS_FILES}"


def printed_elsewhere(trees: Trees) -> Iterator[str]:
    """Whatever is shown passes one door, so that no file's name and no table's key drives a terminal."""
    yield from (f"{name}: may print its own, and is gone" for name in PRINTS_ITS_OWN if name not in trees)
    for name, tree in trees.items():
        if name in PRINTS or name in PRINTS_ITS_OWN:
            continue
        for node in nodes_of(tree):
            if isinstance(node, ast.Call) and prints(node):
                yield f"{name}:{node.lineno}: {ast.unparse(node)[:60]} does not go through {PRINTS[0]}"


def prints(node: ast.Call) -> bool:
    direct = {
        "print",
        "Console",
        "sys.stdout.write",
        "sys.stderr.write",
        "warnings.warn",
        "logging.getLogger",
    }
    return ast.unparse(node.func) in direct


def reads_a_file(node: ast.Call) -> bool:
    """It opens or parses a file without a look at what it is."""
    function = node.func
    if not isinstance(function, ast.Attribute):
        return isinstance(function, ast.Name) and function.id == "open"
    owner, name = ast.unparse(function.value), function.attr
    if name in READERS or (owner in {"json", "tomllib"} and name in {"load", "loads"}):
        return True
    if name != "open" or owner[:1].isupper() or owner == "cls" or owner.startswith("self"):
        return False
    first = node.args[0] if node.args else None
    mode = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "r"
    return owner == "os" or not set(mode) & set("wax") or "+" in mode


def opens_by_name(node: ast.Call) -> bool:
    """A library does, and the name was not looked at in the same call."""
    name = ast.unparse(node.func)
    known = name in BY_NAME or name.rpartition(".")[2] in BY_NAME
    return known and not (bool(node.args) and is_call_to(node.args[0], "regular"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """What the package itself calls something."""
    names = set()
    for node in chain.from_iterable(map(nodes_of, trees)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def private_torch_names(tree: ast.Module, own: set[str]) -> list[str]:
    """Lines with a private name of torch: imported, behind a name that torch's was imported as, or behind any
    other object where neither this package nor Python has such a name."""
    from_torch, faults = set(), []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = (start + alias.name).split(".")
                if whole[0] == "torch":
                    from_torch.add(alias.asname or alias.name.partition(".")[0])
                    faults += [(node.lineno, ".".join(whole))] if any(map(is_private, whole)) else []
    for node in nodes_of(tree):
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


def private_names_of_torch(trees: Trees) -> Iterator[str]:
    own = own_names(trees.values()) | OF_PYTHON
    for name, tree in trees.items():
        if not name.endswith(f"/{PRIVATE_TORCH}"):
            yield from (f"{name}:{fault}" for fault in private_torch_names(tree, own))


RULES: tuple[Callable[[Trees], Iterator[str]], ...] = (
    unknown_rooms,
    imports_upward,
    circles,
    long_ones,
    fragments,
    long_tests_and_benches,
    stale_names_in_the_long_part,
    untyped_signatures,
    modules_without_a_test_of_their_name,
    repeated_classes,
    module_level_state,
    environment_read,
    files_read_elsewhere,
    printed_elsewhere,
    private_names_of_torch,
)


def main() -> int:
    trees = trees_of()
    found = sum(len(imported_modules(name, tree)) for name, tree in trees.items())
    assert found > 5 * len(trees), "imports were not found"
    faults = [fault for rule in RULES for fault in rule(trees)]
    print("\n".join(faults) if faults else f"the house is in order: {len(RULES)} rules, {len(trees)} files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
