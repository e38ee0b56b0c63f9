"""What type checkers see of `moeclipse` is what Python gives."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moeclipse

SNIPPET = """\
import moeclipse
reveal_type(moeclipse.MoE)
reveal_type(moeclipse.clip_grad_norm_)
moeclipse.MoE(8, 16, 4, top_k="two")
moeclipse.GateConfig(kind="softmx")
"""


def test_checkers_see_the_names_that_python_loads() -> None:
    tree = ast.parse(Path(str(moeclipse.__file__)).read_text())
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moeclipse."):
            for name in node.names:
                seen[name.asname or name.name] = f"{node.module}:{name.name}"
    loaded = {
        name: where if ":" in where else f"{where}:{name}" for name, where in moeclipse._EXPORTS.items()
    }
    assert seen == loaded
    assert set(moeclipse.__all__) == {"__version__", *loaded}


@pytest.mark.full
def test_mypy_sees_real_signatures(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    said = done.stdout.replace("builtins.", "")  # which versions of mypy say, and others do not
    assert "d_model: int, d_ff: int, num_experts: int" in said, said
    assert 'Argument "top_k" to "MoE" has incompatible type "str"' in done.stdout
    assert 'Argument "kind" to "GateConfig" has incompatible type' in done.stdout
