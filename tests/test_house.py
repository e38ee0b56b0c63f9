"""Rules of the house see what they are for (`make lint` applies them); importing everything opens nothing."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import house
from house import OF_PYTHON, private_torch_names


@pytest.mark.parametrize(
    ("rule", "files", "faults"),
    [
        (
            "unknown_rooms",
            {"attic/a.py": "", "core/a.py": "", "a.py": ""},
            ["attic/: a room without a layer"],
        ),
        (
            "imports_upward",
            {"core/bad.py": "def late():\n    from ..moe import layer\n    import torch\n"},
            [
                "core/bad.py:2: core must not import moe",
                "core/bad.py:3: core is pure, it must not import torch",
            ],
        ),
        (
            "imports_upward",
            {"moe/bad.py": "from moeclipse.testing import run_ranks\nimport rich, pickle, moeclipse.ops"},
            [
                "moe/bad.py:1: only tests import testing",
                "moe/bad.py:2: rich belongs to the command line",
                "moe/bad.py:2: no pickle anywhere",
            ],
        ),
        (
            "circles",
            {"moe/a.py": "from moeclipse.moe.b import x", "moe/b.py": "def f():\n import moeclipse.moe.a"},
            [
                "a circle of imports: moeclipse.moe.a -> moeclipse.moe.b -> moeclipse.moe.a",
                "a circle of imports: moeclipse.moe.b -> moeclipse.moe.a -> moeclipse.moe.b",
            ],
        ),
        (
            "untyped_signatures",
            {
                "comm/a.py": 8 * "def f(x: list[Any]) -> None: ...\ndef g(x: Any): ...\n",
                "cost/a.py": "def f() -> Any: ...",
            },
            ["comm/: 16 signatures have Any in them; UNTYPED says 4, and only falls"],
        ),
        (
            "circles",
            {"moe/a.py": "import moeclipse.moe.b, moeclipse.moe.c", "moe/b.py": "from .c import x"},
            [],
        ),
        (
            "fragments",
            {
                **dict.fromkeys(house.ALONE, ""),
                "moe/a.py": "from moeclipse.moe import b, c, used\n" + 60 * "x()\n",
                "moe/d.py": "from moeclipse.moe import b, used\n" + 60 * "x()\n",
                "moe/e.py": "from moeclipse.moe.used import x\n" + 60 * "x()\n",
                "moe/b.py": "x()",
                "moe/c.py": 60 * "x()\n",
                "moe/used.py": "x()",
                "ops/triton/b.py": "x()",
            },
            ["moe/b.py has 1 lines and hardly a user: say in ALONE why, or merge it"],
        ),
        (
            "files_read_elsewhere",
            {
                "core/outside.py": "open(path)",
                **dict.fromkeys(house.READS_ITS_OWN, ""),
                "moe/a.py": "open(p)\njson.loads(p.read_text())\nsafe_open(p)\np.open('r+b')\nnp.load(p)",
                "moe/b.py": "p.open('wb')\nsafe_open(regular(p))\nCheckpoint.open(p)\nself.parts[0].open()",
            },
            [
                "moe/a.py:1: open(p) does not go through core/outside.py",
                "moe/a.py:2: json.loads(p.read_text()) does not go through core/outside.py",
                "moe/a.py:3: safe_open(p) does not go through core/outside.py",
                "moe/a.py:4: p.open('r+b') does not go through core/outside.py",
                "moe/a.py:5: np.load(p) does not go through core/outside.py",
                "moe/a.py:2: p.read_text() does not go through core/outside.py",
            ],
        ),
        (
            "printed_elsewhere",
            {
                **dict.fromkeys([*house.PRINTS, *house.PRINTS_ITS_OWN], "print(name)"),
                "cli/a.py": "print(name)\nConsole()\nsys.stderr.write(name)\nsay(name)\nfile.write(name)\n"
                "warn(name)\nwarnings.warn(name)\nlogging.getLogger(__name__).warning(name)",
            },
            [
                "cli/a.py:1: print(name) does not go through core/shown.py",
                "cli/a.py:2: Console() does not go through core/shown.py",
                "cli/a.py:3: sys.stderr.write(name) does not go through core/shown.py",
                "cli/a.py:7: warnings.warn(name) does not go through core/shown.py",
                "cli/a.py:8: logging.getLogger(__name__) does not go through core/shown.py",
            ],
        ),
        (
            "long_ones",
            {"moe/a.py": "def f():\n" + "    pass\n" * 60 + "\n" * 340 + "x = 1\n"},
            ["moe/a.py has 402 lines: there are two ideas in it", "moe/a.py:1: f has 61 lines"],
        ),
        ("long_ones", {"moe/a.py": "def f():\n" + "    pass\n" * 59 + "\n" * 339 + "x = 1\n"}, []),
        (
            "repeated_classes",
            {"moe/a.py": "class Move: ...", "cli/b.py": "def late():\n class Move: ..."},
            ["class Move stands for several things: moe/a.py, cli/b.py"],
        ),
        (
            "module_level_state",
            {"moe/a.py": "T = TypeVar('T')\nLIMITS = {}\ncache = {}\ndef f():\n    global cache"},
            ["moe/a.py:3: module-level state cache", "moe/a.py:5: `global`"],
        ),
        (
            "environment_read",
            {"moe/a.py": "import os\nos.environ['A']", "cli/a.py": "import os\nos.getenv('A')"},
            ["moe/a.py:2: os.environ"],
        ),
        (
            "private_names_of_torch",
            {"moe/a.py": "import torch\ntorch._C", "moe/private_torch.py": "import torch\ntorch._C"},
            ["moe/a.py:2: torch._C"],
        ),
    ],
)
def test_a_rule_sees_what_it_is_for(rule: str, files: dict[str, str], faults: list[str]) -> None:
    trees = {name: ast.parse(text) for name, text in files.items()}
    assert list(getattr(house, rule)(trees)) == faults
    assert getattr(house, rule) in house.RULES


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
assert "rich" not in sys.modules, "the library must work without rich"
"""


def test_importing_everything_opens_no_device() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
