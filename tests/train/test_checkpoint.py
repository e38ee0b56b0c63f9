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
from checkpoint_bed import CountingDisk, fork_ranks, pieces_of, save_step, tensors_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints import checkpoint as checkpoint_module
from moeclipse.train.checkpoints import shard as shard_module
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


def whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name=name, shape=tuple(tensor.shape), start=0, data=tensor)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit."""
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


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


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    path = save(tmp_path, 0, [whole("x", bits.view(torch.float32))], {}, ONE, keep=1)
    assert torch.equal(Checkpoint.open(path, ONE).read("x").view(torch.int32), bits)


def test_views_are_saved_in_row_major_order(tmp_path: Path) -> None:
    base = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    path = save(tmp_path, 0, [whole("t", base.t()), whole("s", base[:, 1])], {}, ONE, keep=1)
    checkpoint = Checkpoint.open(path, ONE)
    assert torch.equal(checkpoint.read("t").reshape(4, 3), base.t())
    assert torch.equal(checkpoint.read("s"), base[:, 1])
    assert not checkpoint.read("t").requires_grad


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
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    script = next(part.split("```")[0] for part in text.split("```python\n")[1:] if "hashlib" in part)
    names: dict[str, Any] = {}
    exec(script.replace("runs/NAME/checkpoints", str(tmp_path)), names)
    assert names["tensors"].keys() == tensors_at(200).keys()
    for name, tensor in tensors_at(200).items():
        assert names["tensors"][name].shape == tensor.shape
        assert same(names["tensors"][name], tensor)


def test_a_large_tensor_leaves_through_a_small_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHUNK_BYTES", 64)
    tensor, disk = torch.randn(1000), CountingDisk()
    path = save(tmp_path, 0, [whole("x", tensor)], {}, ONE, keep=1, disk=disk)
    assert sum(name == "write" for name, _ in disk.log) > 1000 * 4 // 64
    assert same(Checkpoint.open(path, ONE).read("x"), tensor)


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


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# ---- which are kept


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a" / "checkpoints"
    for step in (5, 10, 20, 100_000_000, 100_000_010):
        save_step(folder, step, ONE, keep=3)
    assert names_in(folder) == ["step-00000020", "step-100000000", "step-100000010"]
    found = newest(folder, ONE)
    assert found.passed_over == ()
    assert_holds(found.checkpoint, 100_000_010)


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-final").mkdir()
    for step in (1, 2, 3):
        save_step(tmp_path, step, ONE, keep=1)
    assert names_in(tmp_path) == ["notes.txt", "step-00000003", "step-final"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, [whole("x", torch.zeros(3))], {}, ONE, keep=1)
    save(tmp_path, 10, [whole("x", torch.ones(3))], {}, ONE, keep=1)
    assert names_in(tmp_path) == ["step-00000010"]
    assert Checkpoint.open(tmp_path / "step-00000010", ONE).read("x").tolist() == [1, 1, 1]


def test_a_run_that_went_back_does_not_resume_the_way_it_left(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, ONE, keep=3)
    save_step(tmp_path, 15, ONE, keep=2)
    assert names_in(tmp_path) == [
        "step-00000010",
        "step-00000015",
        "step-00000020.abandoned",
        "step-00000030.abandoned",
    ]
    assert_holds(newest(tmp_path, ONE).checkpoint, 15)
    assert_holds(Checkpoint.open(tmp_path / "step-00000030.abandoned", ONE), 30)


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


def test_bad_pieces(tmp_path: Path) -> None:
    refused(
        tmp_path, [whole("c", torch.zeros(2, dtype=torch.complex64))], "dtype torch.complex64.*convert it"
    )
    refused(tmp_path, [whole("__metadata__", torch.zeros(2))], "'__metadata__' cannot be a tensor's name")
    refused(tmp_path, [whole("w", torch.zeros(2))] * 2, "tensor 'w' was given twice")
    outside = Piece(name="w", shape=(2,), start=1, data=torch.zeros(2))
    refused(tmp_path, [outside], r"has 2 elements, but a piece holds \[1, 3\)")


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
    state = {"fingerprint": {"model": {"d_model": 128, "vocab_size": 256}, "moe": {"num_experts": 8}}}
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
