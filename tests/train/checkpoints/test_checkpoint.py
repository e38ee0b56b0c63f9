"""Checkpoints: what was saved comes back, under any layout, and bad requests say what is wrong."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_bed import fork_ranks, names_in, pieces_of, same, save_step, tensors_at, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints import checkpoint as checkpoint_module
from moeclipse.train.checkpoints.checkpoint import (
    Checkpoint,
    OneRank,
    Piece,
    Ranks,
    check_model,
    newest,
    save,
)

ONE = OneRank()
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool]


def assert_holds(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.state == {"step": step}
    expected = tensors_at(step)
    assert checkpoint.names == sorted(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert same(checkpoint.read(name), tensor)


# ---- what was saved comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5,), (4, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 10).to(dtype)
    odd = torch.arange(3, dtype=torch.uint8)  # must not push the others out of alignment
    path = save(tmp_path, 3, [whole("odd", odd), whole("x", tensor)], {}, ONE, keep=1)
    checkpoint = Checkpoint.open(path, ONE)
    assert checkpoint.shape("x") == shape
    assert checkpoint.dtype("x") == dtype
    assert same(checkpoint.read("x"), tensor)
    for start in range(tensor.numel() + 1):
        for stop in range(start, tensor.numel() + 1):
            assert same(checkpoint.read("x", start, stop), tensor.reshape(-1)[start:stop])


def test_state_is_json_and_exact(tmp_path: Path) -> None:
    state = {
        "loss": 0.1 + 0.2,
        "big": 2**70,
        "none": None,
        "list": [1, "zwei", {"drei": True}],
        "inf": float("inf"),
    }
    path = save(tmp_path, 7, [], state, ONE, keep=1)
    assert Checkpoint.open(path, ONE).state == state


def test_whole_tensors_can_be_read_by_hand(tmp_path: Path) -> None:
    path = save(tmp_path, 20, pieces_of(tensors_at(20)), {"step": 20}, ONE, keep=1)
    assert sorted(file.name for file in path.iterdir()) == [
        "index.json",
        "manifest.json",
        "rank-00000.safetensors",
    ]
    by_hand = load_file(path / "rank-00000.safetensors")
    assert all(same(by_hand[name], tensor) for name, tensor in tensors_at(20).items())
    assert by_hand["layers.0.weight"].shape == (5, 7)
    index = json.loads((path / "index.json").read_text())
    assert index["state"] == {"step": 20}
    assert index["tensors"]["layers.0.weight"] == {
        "shape": [5, 7],
        "dtype": "F32",
        "pieces": [{"file": "rank-00000.safetensors", "key": "layers.0.weight", "start": 0, "stop": 35}],
    }


def test_the_script_in_the_documentation_reads_one(tmp_path: Path) -> None:
    fork_ranks(2, lambda ranks: save_step(tmp_path, 200, ranks))
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    script = next(part.split("```")[0] for part in text.split("```python\n")[1:] if "hashlib" in part)
    names: dict[str, Any] = {}
    exec(script.replace("runs/NAME/checkpoints", str(tmp_path)), names)
    assert names["tensors"].keys() == tensors_at(200).keys()
    for name, tensor in tensors_at(200).items():
        assert names["tensors"][name].shape == tensor.shape
        assert same(names["tensors"][name], tensor)


def save_from_device(folder: str) -> bool:
    tensor = torch.randn(5000, 700, device="cuda").to(torch.bfloat16)
    path = save(Path(folder), 0, [whole("x", tensor), whole("t", tensor.t())], {}, ONE, keep=1)
    checkpoint = Checkpoint.open(path, ONE)
    return same(checkpoint.read("x"), tensor.cpu()) and same(checkpoint.read("t"), tensor.t().cpu())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_tensors_of_a_device(tmp_path: Path) -> None:
    """In a process of its own: one that has opened a device cannot fork ranks any more."""
    assert fork_ranks(1, lambda ranks: save_from_device(str(tmp_path))) == [{"result": True}]


def test_only_files_that_overlap_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(ranks: Ranks) -> str:
        piece = Piece(name="x", shape=(8,), start=2 * ranks.rank, data=torch.arange(2) + 2 * ranks.rank)
        return str(save(tmp_path, 1, [piece], {}, ranks, keep=1))

    path = fork_ranks(4, work)[0]["result"]
    opened: list[str] = []
    real = checkpoint_module.safe_open
    monkeypatch.setattr(
        checkpoint_module, "safe_open", lambda p, **kw: (opened.append(p.name), real(p, **kw))[1]
    )
    monkeypatch.setattr(checkpoint_module, "MAX_OPEN", 2)
    checkpoint = Checkpoint.open(path, ONE)
    assert opened == []
    assert checkpoint.read("x", 3, 5).tolist() == [3, 4]
    assert opened == ["rank-00001.safetensors", "rank-00002.safetensors"]
    assert checkpoint.read("x").tolist() == list(range(8))
    assert len(checkpoint._files) == 2


# ---- any layout


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[tuple[str, int, int]]]]:
    """Random tensors, and for each of 1-4 ranks the (name, start, stop) it owns."""
    num_ranks = draw(st.integers(1, 4))
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(num_ranks)]
    tensors = {}
    for number in range(draw(st.integers(0, 4))):
        name = f"tensor{number}" * draw(st.integers(1, 3))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(number))
        tensors[name] = values.to(draw(st.sampled_from(DTYPES)))
        total = prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5, unique=True)))
        edges = [0, *(cut for cut in cuts if 0 < cut < total), total]
        for start, stop in pairwise(edges):
            owned[draw(st.integers(0, num_ranks - 1))].append((name, start, stop))
    return tensors, owned


@settings(
    deadline=None,
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cut=cut_tensors(), data=st.data())
def test_saved_in_any_cut_read_in_any_other(tmp_path: Path, cut: Any, data: st.DataObject) -> None:
    tensors, owned = cut

    def work(ranks: Ranks) -> str:
        pieces = [
            Piece(name=n, shape=tuple(tensors[n].shape), start=a, data=tensors[n].reshape(-1)[a:b])
            for n, a, b in owned[ranks.rank]
        ]
        return str(save(tmp_path / "checkpoints", 1, pieces, {"ranks": ranks.num_ranks}, ranks, keep=1))

    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    reports = fork_ranks(len(owned), work)
    checkpoint = Checkpoint.open(reports[0]["result"], ONE)
    assert checkpoint.names == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        cuts = data.draw(st.lists(st.integers(0, tensor.numel()), max_size=5).map(sorted))
        edges = [0, *cuts, tensor.numel()]
        parts = [checkpoint.read(name, a, b) for a, b in pairwise(edges)]
        assert same(torch.cat(parts), tensor)


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 4)])
def test_ranks_save_and_other_ranks_load(tmp_path: Path, saving: int, loading: int) -> None:
    reports = fork_ranks(saving, lambda ranks: save_step(tmp_path, 20, ranks))
    assert reports == [{"result": "step-00000020"}] * saving
    assert_holds(newest(tmp_path, ONE).checkpoint, 20)

    def load(ranks: Ranks) -> bool:
        checkpoint = Checkpoint.open(tmp_path / "step-00000020", ranks)
        return all(
            same(checkpoint.read(piece.name, piece.start, piece.stop), piece.data)
            for piece in pieces_of(tensors_at(20), ranks.rank, ranks.num_ranks)
        )

    assert fork_ranks(loading, load) == [{"result": True}] * loading


def save_and_open(mesh: Mesh, folder: str) -> list[str]:
    save_step(Path(folder), 20, mesh)
    checkpoint = newest(folder, mesh).checkpoint
    assert_holds(checkpoint, 20)
    return names_in(Path(folder))


def test_the_mesh_serves_as_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_open, str(tmp_path)) == [["step-00000020"]] * 2


def test_a_rank_without_pieces_writes_no_file(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        save(tmp_path, 1, [whole("x", torch.ones(2))] if ranks.rank == 1 else [], {}, ranks, keep=1)

    fork_ranks(3, work)
    names = sorted(file.name for file in (tmp_path / "step-00000001").iterdir())
    assert names == ["index.json", "manifest.json", "rank-00001.safetensors"]


def test_a_matrix_stored_by_columns_is_read_as_one(tmp_path: Path) -> None:
    matrix = torch.arange(24.0).view(4, 6)
    parts = {"w[:, 0:2]": matrix[:, :2], "w[:, 2:6]": matrix[:, 2:], "v": matrix + 100}
    pieces = [whole(name, tensor.contiguous()) for name, tensor in parts.items()]
    checkpoint = Checkpoint.open(save(tmp_path, 1, pieces, {}, ONE, keep=1), ONE)
    assert checkpoint.names == ["v", "w"]
    assert "w" in checkpoint
    assert (checkpoint.shape("w"), checkpoint.dtype("w")) == ((4, 6), torch.float32)
    assert torch.equal(checkpoint.read("w"), matrix.flatten())
    assert torch.equal(checkpoint.read("w", 5, 17), matrix.flatten()[5:17])
    assert torch.equal(checkpoint.read("w[:, 1:5]"), matrix[:, 1:5].flatten()), "as another cut"
    assert torch.equal(checkpoint.read("v[:, 4:6]", 1, 3), (matrix + 100)[:, 4:].flatten()[1:3])
    with pytest.raises(IndexError, match=r"w\[:, 4:8\]: \[0, 16\) is not inside a matrix of shape \[4, 6\]"):
        checkpoint.read("w[:, 4:8]")


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    pieces = [whole(name, torch.zeros(4, 2)) for name in ("w[:, 0:2]", "w[:, 4:6]")]
    checkpoint = Checkpoint.open(save(tmp_path, 1, pieces, {}, ONE, keep=1), ONE)
    with pytest.raises(CheckpointError, match=r"lacks columns of 'w': it holds w\[:, 0:2\], w\[:, 4:6\]"):
        checkpoint.read("w")


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    found = newest(tmp_path / "nowhere", ONE)
    assert found.checkpoint is None
    assert found.passed_over == ()


# ---- bad requests


def refused(folder: Path, pieces: list[Piece], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        save(folder, 2, pieces, {}, ONE, keep=1)
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ([(0, 2), (3, 6)], r"\[2, 3\) are missing"),
        ([(1, 6)], r"\[0, 1\) are missing"),
        ([(0, 5)], r"\[5, 6\) are missing"),
        ([(0, 3), (2, 6)], r"\[2, 3\) are given twice"),
        ([(0, 6), (2, 4)], r"\[2, 6\) are given twice"),
        ([(3, 3)], r"\[0, 6\) are missing"),
    ],
)
def test_pieces_must_cover_a_tensor_once(tmp_path: Path, ranges: list[tuple[int, int]], fault: str) -> None:
    pieces = [Piece(name="w", shape=(2, 3), start=a, data=torch.zeros(b - a)) for a, b in ranges]
    refused(
        tmp_path, pieces, rf"tensor 'w' of shape \[2, 3\]: elements {fault}; its pieces must cover it exactly"
    )


def test_pieces_must_agree(tmp_path: Path) -> None:
    pieces = [
        Piece(name="w", shape=(2,), start=0, data=torch.zeros(1)),
        Piece(name="w", shape=(2,), start=1, data=torch.zeros(1, dtype=torch.int64)),
    ]
    refused(tmp_path, pieces, r"tensor 'w' is I64 \[2\] on one rank and F32 \[2\] on another")


def test_state_that_is_not_json(tmp_path: Path) -> None:
    save_step(tmp_path, 1, ONE)
    with pytest.raises(CheckpointError, match=r"cannot be written as JSON.*checkpoint step 1 is intact"):
        save(tmp_path, 2, [], {"bad": torch.zeros(1)}, ONE, keep=1)
    assert names_in(tmp_path) == ["step-00000001"]


def test_bad_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.keep \(0\) must be at least 1"):
        save(tmp_path, 2, [], {}, ONE, keep=0)


def test_ranks_that_save_different_steps(tmp_path: Path) -> None:
    reports = fork_ranks(2, lambda ranks: save_step(tmp_path, 10 + ranks.rank, ranks))
    assert reports[0] == reports[1]
    assert "ranks save different steps [10, 11]" in reports[0]["error"]
    assert names_in(tmp_path) == []


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    reports = fork_ranks(2, lambda ranks: save_step(tmp_path / f"host{ranks.rank}", 10, ranks))
    assert reports[0] == reports[1]
    assert "rank 1" in reports[0]["error"]
    assert "run.dir must be a folder that all hosts share" in reports[0]["error"]


def test_unknown_tensors_and_ranges(tmp_path: Path) -> None:
    save_step(tmp_path, 1, ONE)
    checkpoint = newest(tmp_path, ONE).checkpoint
    assert checkpoint is not None
    assert "mask" in checkpoint
    assert "layers.0.weihgt" not in checkpoint
    with pytest.raises(
        CheckpointError, match=r"no tensor 'layers.0.weihgt'; the nearest name is 'layers.0.weight'"
    ):
        checkpoint.read("layers.0.weihgt")
    with pytest.raises(IndexError, match=r"mask: \[3, 8\) is not inside a tensor of shape \[7\]"):
        checkpoint.read("mask", 3, 8)


def test_a_checkpoint_of_another_model() -> None:
    state = {"model": {"d_model": 128, "vocab_size": 256}, "moe": {"num_experts": 8}}
    check_model(state, {"model": {"d_model": 128, "vocab_size": 256}, "moe": {"num_experts": 8}})
    with pytest.raises(CheckpointError) as caught:
        check_model(state, {"model": {"d_model": 256, "vocab_size": 256}, "moe": {"num_experts": 16}})
    assert str(caught.value) == (
        "the checkpoint belongs to another model: model.d_model is 128 in the checkpoint, 256 in this run; "
        "moe.num_experts is 8 in the checkpoint, 16 in this run; "
        "resume with the configuration it was saved with, or start a new run"
    )
    with pytest.raises(CheckpointError, match=r"model.d_model is absent from the checkpoint"):
        check_model({}, {"model": {"d_model": 1}})
