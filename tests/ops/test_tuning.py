"""The tile table, its shape classes, and the file that overrides it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moeclipse.ops.tuning import TABLE, Tile, num_programs, shape_class, variants

pytest.importorskip("triton")

CPU = torch.device("cpu")


def test_every_shape_class_is_in_the_table() -> None:
    for kernel in ("up", "down", "d_rows", "d_hidden", "wgrad", "wgrad_dy", "wgrad_x"):
        for widths in ((512, 1536), (2048, 4096), (28672, 4096), (4096, 14336)):
            assert shape_class(kernel, *widths) in TABLE
    assert shape_class("wgrad_x", 28672, 4096) == "wgrad_x, huge"
    assert shape_class("wgrad_x", 2048, 4096) == "wgrad_x, wide"
    assert shape_class("wgrad_x", 512, 1536) == "wgrad_x"


def test_a_file_overrides_the_table(tmp_path: Path) -> None:
    from moeclipse.ops.tuning import key_of, tile_for

    file = tmp_path / "tiles.json"
    assert tile_for("up", CPU, 64, 32, file=tmp_path / "absent.json") == TABLE["up"]
    file.write_text(json.dumps({key_of("up", CPU, 64, 32): {"n": 64, "stages": 2}}))
    assert tile_for("up", CPU, 64, 32, file=file) == Tile(n=64, stages=2)
    assert tile_for("up", CPU, 64, 48, file=file) == TABLE["up"]


def test_a_broken_file_is_no_reason_to_stop(tmp_path: Path) -> None:
    from moeclipse.ops.tuning import tile_for

    file = tmp_path / "tiles.json"
    file.write_text("{ not json")
    assert tile_for("down", CPU, 64, 32, file=file) == TABLE["down"]


def test_variants_are_all_combinations() -> None:
    tiles = variants(Tile(), n=[64, 128], stages=[2, 3, 4])
    assert len(set(tiles)) == 6
    assert num_programs(Tile(), CPU) == 2
