"""The Python in README and docs compiles, what it imports is there, and what can run here runs."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from code_blocks import ROOT, Block, all_blocks, imports_of, pages, unfenced_in
from forked import exit_status
from release import FOLDER
from torch import nn

import moeclipse

BLOCKS = all_blocks()
SEVERAL_RANKS = "needs several ranks"
CANNOT = {
    "README.md#1": SEVERAL_RANKS,
    "docs/adapters.md#0": "needs a folder of a model; tests/train/generate/test_adapters.py makes one",
    "docs/all-reduce.md#0": SEVERAL_RANKS,
    "docs/all-reduce.md#1": "needs several ranks and a GPU; tests/gpu/test_peer_all_reduce.py shares",
    "docs/all-reduce.md#2": "needs several ranks and a GPU; tests/gpu/test_peer_all_reduce.py captures",
    "docs/generate.md#0": "needs a run with a checkpoint; tests/train/generate/test_text.py makes one",
    "docs/hf.md#0": "needs a folder of a model; tests/hf/test_implementation.py makes one",
    "docs/hf.md#1": SEVERAL_RANKS,
    "docs/layer.md#1": SEVERAL_RANKS,
    "docs/own-loop.md#0": SEVERAL_RANKS,
    "docs/own-loop.md#3": SEVERAL_RANKS,
    "docs/placement.md#0": SEVERAL_RANKS,
    "docs/tensor-parallel.md#0": SEVERAL_RANKS,
    "docs/transports.md#0": SEVERAL_RANKS,
    "docs/tutorial-3-hugging-face.md#0": "needs a folder of a model; tests/compatibility/test_tutorial.py",
}
"""Blocks that cannot run in one process, and why."""


def a_layer(folder: Path) -> dict[str, Any]:
    # The block makes `moe` itself; the model of its last line has another, which has run.
    model = nn.Sequential(moeclipse.MoE(8, 8, 2))
    model(torch.randn(3, 8))
    return {"x": torch.randn(2, 512), "model": model, "task_loss": torch.zeros(())}


def a_checkpoint(folder: Path) -> dict[str, Any]:
    shutil.copytree(FOLDER / "old/checkpoints/step-00000002", folder / "runs/NAME/checkpoints/step-00000200")
    return {}


def a_file(folder: Path) -> dict[str, Any]:
    shutil.copy(FOLDER / "corpus.txt", folder)
    text = (FOLDER / "my.toml").read_text()
    (folder / "my.toml").write_text(text)
    return {}


def a_corpus(folder: Path) -> dict[str, Any]:
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("a text of some length; " * 200)
    return {}


def own_experts(folder: Path) -> dict[str, Any]:
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 256)

        def forward(self, rows: Any) -> torch.Tensor:
            rows = rows["h"] if isinstance(rows, dict) else rows
            return self.linear(rows)

    class All(nn.Module):
        def __init__(self, ids: Any) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, rows: torch.Tensor, counts: Any) -> torch.Tensor:
            return self.linear(rows)

    moe = moeclipse.MoE(512, 1, 8, experts=lambda expert: Each(), d_out=256)
    tensors = {"h": torch.randn(4, 512), "position": torch.arange(4), "mask": torch.ones(4)}
    return {"MyExpert": Each, "MyExperts": All, "moe": moe, **tensors}


def a_scaled_loss(folder: Path) -> dict[str, Any]:
    model = nn.Sequential(moeclipse.MoE(8, 8, 2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    return {"model": model, "optimizer": optimizer, "scaler": scaler, "loss": model(torch.randn(3, 8)).sum()}


def microbatches(folder: Path) -> dict[str, Any]:
    given = {"model": nn.Sequential(moeclipse.MoE(8, 8, 2)), "task_loss": torch.sum}
    return given | {"first": torch.randn(3, 8), "second": torch.randn(2, 8)}


RUN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md#0": a_layer,
    "docs/checkpoints.md#0": a_checkpoint,
    "docs/checkpoints.md#1": a_checkpoint,
    "docs/configuration.md#0": a_file,
    "docs/data.md#0": a_corpus,
    **{f"docs/extending.md#{number}": lambda folder: {} for number in range(6)},
    "docs/gates.md#0": lambda folder: {"nn": nn},
    "docs/kernels.md#0": lambda folder: {},
    "docs/tutorial-2-own-model.md#0": lambda folder: {},
    "docs/kernels.md#1": lambda folder: {"torch": torch, "down_EDF": torch.randn(4, 32, 64)},
    "docs/layer.md#0": lambda folder: {},
    "docs/layer.md#2": own_experts,
    "docs/own-loop.md#1": a_scaled_loss,
    "docs/own-loop.md#2": microbatches,
    "docs/schedules.md#0": lambda folder: {},
    "docs/skew.md#0": lambda folder: {},
    "docs/smart-schedule.md#0": lambda folder: {"moe": moeclipse.MoE(8, 16, 4, top_k=2)},
    "docs/writing-tests.md#0": lambda folder: {"x": torch.ones(2)},
}
"""Blocks that run, and what they find there."""


def test_of_every_block_it_is_known_whether_it_runs() -> None:
    names = [block.name for block in BLOCKS]
    assert sorted([*RUN, *CANNOT]) == sorted(names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_stands_in_fences(page: Path) -> None:
    assert not unfenced_in(page), "write ```python, so that the block is tested"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_blocks_compile_and_find_what_they_import(block: Block) -> None:
    compile(block.source, block.name, "exec")
    for module, name in imports_of(block.source):
        found = hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None
        assert found, f"{block.name}: {module} has no {name}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.name in RUN], ids=lambda block: block.name)
def test_blocks_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"moeclipse": moeclipse, **RUN[block.name](tmp_path)}
    assert exit_status(lambda: exec(compile(block.source, block.name, "exec"), names)) == 0


def test_an_import_that_is_not_there_is_seen() -> None:
    source = "from moeclipse.train.config import Nothing\nmoeclipse.Nobody()\n"
    assert imports_of(source) == [("moeclipse", "Nobody"), ("moeclipse.train.config", "Nothing")]
