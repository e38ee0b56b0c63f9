"""The tile table, its shape classes, and the file that overrides it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moeclipse.ops.triton
from moeclipse.ops.tuning import (
    TABLE,
    Tile,
    delay,
    device_fits,
    has_warpgroups,
    num_programs,
    shape_class,
    variants,
)

pytest.importorskip("triton")

CPU = torch.device("cpu")


def test_every_shape_class_is_in_the_table() -> None:
    kernels = ["up", "up, no gate", "down", "d_rows", "d_hidden"]
    wgrads = [f"{kind}{rows}" for kind in ("wgrad", "wgrad_roles") for rows in ("", "_dy", "_x")]
    kernels += [f"{kind}{mode}" for kind in wgrads for mode in ("", ", add")]
    for kernel in kernels:
        for widths in ((512, 1536), (2048, 4096), (28672, 4096), (4096, 14336), (8, 8)):
            assert shape_class(kernel, *widths) in TABLE
    assert shape_class("wgrad_x", 28672, 4096) == "wgrad_x, huge"
    assert shape_class("wgrad_x", 8, 8) != shape_class("wgrad_x", 28672, 4096)


def test_kernels_need_a_device_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not device_fits(CPU)
    for number, (major, kib, fits) in enumerate([(9, 227, True), (8, 163, False), (12, 99, False)]):
        found = SimpleNamespace(major=major, shared_memory_per_block_optin=kib * 1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert device_fits(torch.device("cuda", 90 + number)) is fits


def test_warps_divide_the_work_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_warpgroups(CPU)
    for number, (major, divides) in enumerate([(9, True), (10, False)]):
        found = SimpleNamespace(major=major, shared_memory_per_block_optin=227 * 1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert has_warpgroups(torch.device("cuda", 80 + number)) is divides


def test_only_many_tiles_are_staggered() -> None:
    assert delay(Tile(stagger=800), CPU, 10**6) == 0, "nothing runs at the same time"


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
    assert tile_for("down", CPU, 64, 32, file=file) == TABLE["down, small"]


def test_variants_are_all_combinations() -> None:
    tiles = variants(Tile(), n=[64, 128], stages=[2, 3, 4])
    assert len(set(tiles)) == 6
    assert num_programs(Tile(), CPU) == 2


def test_the_fastest_candidate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.testing

    from moeclipse.ops.tuning import tile_for, tune

    times = {64: 3.0, 128: 1.0, 256: 2.0}

    def do_bench(run: Callable[[], int], **_: object) -> float:
        return times[run()]

    def run(tile: Tile) -> int:
        if tile.n == 512:
            raise RuntimeError("out of shared memory")
        return tile.n

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    file = tmp_path / "folder" / "tiles.json"
    candidates = variants(Tile(), n=[64, 512, 128, 256])
    assert tune("up", CPU, (64, 32), candidates, run, file) == Tile(n=128)
    assert tile_for("up", CPU, 64, 32, file=file) == Tile(n=128), "later calls read it"
    times[64] = 0.5
    assert tune("down", CPU, (64, 32), candidates, run, file) == Tile(n=64)
    assert tile_for("up", CPU, 64, 32, file=file) == Tile(n=128), "other lines stay"
    assert [path.name for path in file.parent.iterdir()] == ["tiles.json"]


def test_programs_for_each_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    device = torch.device("cuda", 0)
    assert num_programs(Tile(per_sm=2), device) == 264
    assert delay(Tile(stagger=800), device, 1320) == 800
    assert delay(Tile(stagger=800), device, 1319) == 0, "waiting would cost more than it gives"


def test_a_triton_without_gluon_has_no_dividing_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(major=9, shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setitem(sys.modules, "moeclipse.ops.triton.wgrad_gluon", None)
    monkeypatch.delattr(moeclipse.ops.triton, "wgrad_gluon", raising=False)
    assert not has_warpgroups(torch.device("cuda", 70))
