"""One rank's tensors as a file: every bit in its place, through a small buffer, and readable by anyone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_bed import CountingDisk, same, whole
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from moeclipse.core.errors import CheckpointError
from moeclipse.train.checkpoints import shard as shard_module
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, save
from moeclipse.train.checkpoints.shard import DTYPE_NAMES, Piece, Shard

ONE = OneRank()


def content(shard: Shard) -> bytes:
    return b"".join(map(bytes, shard.chunks()))


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_NAMES, key=str)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_the_safetensors_library_reads_it(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = {
        f"t{number}": (torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 9).to(dtype)
        for number, (dtype, shape) in enumerate(kinds)
    }
    shard = Shard(whole(name, tensor) for name, tensor in tensors.items())
    data = content(shard)
    found = load(data)
    stored = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    assert found.keys() == stored.keys()
    assert all(same(found[name], tensor) for name, tensor in stored.items())
    assert shard.num_bytes == sum(t.numel() * t.element_size() for t in stored.values())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin = 8 + length
    for name, tensor in stored.items():
        offset = header[name]["data_offsets"][0]
        assert (begin + offset) % tensor.element_size() == 0, "readers map the file and need it aligned"


def test_a_piece_of_a_tensor_is_stored_flat_under_its_range() -> None:
    piece = Piece(name="w", shape=(2, 3), start=2, data=torch.arange(2.0, 5.0))
    assert (piece.key, piece.stop, piece.is_whole, piece.num_bytes) == ("w[2:5]", 5, False, 12)
    shard = Shard([piece, Piece(name="w", shape=(2, 3), start=6, data=torch.zeros(0))])
    assert load(content(shard))["w[2:5]"].tolist() == [2.0, 3.0, 4.0]
    assert [record["key"] for record in shard.records()] == ["w[2:5]", "w[6:6]"], "others know of both"
    assert shard.stored == [piece], "a share of nothing has no place in the file"


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


def test_a_large_tensor_leaves_through_a_small_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHUNK_BYTES", 64)
    tensor, disk = torch.randn(1000), CountingDisk()
    path = save(tmp_path, 0, [whole("x", tensor)], {}, ONE, keep=1, disk=disk)
    assert sum(name == "write" for name, _ in disk.log) > 1000 * 4 // 64
    assert same(Checkpoint.open(path, ONE).read("x"), tensor)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([whole("c", torch.zeros(2, dtype=torch.complex64))], "dtype torch.complex64.*convert it"),
        ([whole("__metadata__", torch.zeros(2))], "'__metadata__' cannot be a tensor's name"),
        ([whole("w", torch.zeros(2))] * 2, "tensor 'w' was given twice"),
        (
            [Piece(name="w", shape=(2,), start=1, data=torch.zeros(2))],
            r"has 2 elements, but a piece holds \[1, 3\)",
        ),
    ],
)
def test_bad_pieces(tmp_path: Path, pieces: list[Piece], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Shard(pieces)
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 2, pieces, {}, ONE, keep=1)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
