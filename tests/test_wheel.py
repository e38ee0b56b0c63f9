"""The wheel, without the repository: built, installed in an environment of its own, trained for five steps.

Torch and the other packages are those of the environment that runs the tests: they are found through a path
file, and no index is asked for anything.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import moeclipse

ROOT = Path(__file__).parent.parent
SMALL = (
    *(
        "--model.num-layers",
        "2",
        "--model.d-model",
        "32",
        "--model.num-heads",
        "2",
        "--model.num-kv-heads",
        "1",
    ),
    *("--model.head-dim", "16", "--moe.num-experts", "4", "--moe.d-ff", "32", "--data.seq-len", "32"),
    *("--data.batch-size", "4", "--run.device", "cpu", "--metrics.warmup-steps", "1"),
)


def build_wheel(out: Path) -> Path:
    """By the project's own back end, from a copy of what git would ship."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = out.glob("moeclipse-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """An environment that has the wheel, and sees this one's packages but not the repository."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, text=True, timeout=300)
    # Packages of this environment come behind; editable installs of the repository among them do not.
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "moeclipse" not in path.name:
            (packages / path.name).symlink_to(path)
    inside = next((folder / "lib").glob("python3*")) / "site-packages"
    (inside / "behind.pth").write_text(f"{packages}\n")
    return folder / "bin"


def told_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return files.read(name).decode()


@pytest.mark.parametrize("address", ["", "https://example.org/somebody/moeclipse"])
def test_links_of_the_description_lead_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """An index has none of the files that README's links name."""
    monkeypatch.setenv("MOECLIPSE_ADDRESS", address)
    metadata = told_of(build_wheel(tmp_path))
    targets = re.findall(r"\]\(([^)\s]+)\)", metadata)
    assert all(target.startswith("https://") for target in targets), targets
    tag = f"v{moeclipse.__version__}"
    assert (f"{address}/blob/{tag}/docs/layer.md" in targets) == bool(address)
    assert (f"Project-URL: Repository, {address}" in metadata) == bool(address)
    assert "moeclipse.MoE(d_model=512" in metadata, "code stays"


@pytest.mark.full
def test_the_wheel_trains_where_there_is_no_repository(tmp_path: Path) -> None:
    folder = install(build_wheel(tmp_path / "dist"), tmp_path / "env")
    hidden = ("PYTHON", "MOECLIPSE", "OMP_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}

    def run(program: str, *words: str) -> str:
        done = subprocess.run(
            [str(folder / program), *words],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import moeclipse; print(moeclipse.__file__)")
    assert str(tmp_path / "env") in where, "the wheel itself, not the repository"
    shown = run("moeclipse", "train", "--ranks", "2", "--run.name", "five", "--run.steps", "5", *SMALL)
    assert "it writes" in shown
    summary = json.loads((tmp_path / "runs" / "five" / "summary.json").read_text())
    assert summary["loss_last"] > 0
    assert len((tmp_path / "runs" / "five" / "metrics.jsonl").read_text().splitlines()) >= 5
    assert run("moeclipse", "generate", "runs/five", "--prompt", "def", "--max-tokens", "3").startswith("def")
    assert "tiny" in run("moeclipse", "train", "--help"), "presets are in the wheel"


def test_the_dockerfile_copies_all_that_an_installation_needs(tmp_path: Path) -> None:
    """Its steps in a clean folder: what COPY names, then the build that `pip install .` asks for."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY "):
            *names, target = line.split()[1:]
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, tmp_path / target)
                else:
                    shutil.copy(ROOT / name, tmp_path / target)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = (tmp_path / "out").glob(f"moeclipse-{moeclipse.__version__}-*.whl")
    assert wheel.stat().st_size > 1e5
    assert any(line.startswith("RUN pip install") and '".[' in line for line in lines)


def test_one_version_everywhere() -> None:
    assert f"version: {moeclipse.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{moeclipse.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"hatchling=={importlib.metadata.version('hatchling')}" in (ROOT / "pyproject.toml").read_text()
