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
from moeclipse.ops import tuning
from moeclipse.ops.architecture import ARCHITECTURES
from moeclipse.ops.grouping import FEW_ROWS
from moeclipse.ops.tuning import (
    FEW,
    HOPPER,
    TABLES,
    Tile,
    candidates,
    delay,
    device_fits,
    fits,
    grid_of,
    has_warpgroups,
    line_in,
    num_programs,
    shared_memory,
    tile_for,
    variants,
)

pytest.importorskip("triton")

CPU = torch.device("cpu")


KERNELS = ["up", "up, no gate", "down", "d_rows", "d_hidden"]
KERNELS += [f"{kernel} and adapter" for kernel in KERNELS]
KERNELS += [f"wgrad{rows}{mode}" for rows in ("", "_dy", "_x") for mode in ("", ", add")]
KERNELS += ["narrow", "narrow, 256 columns", "wgrad_narrow"]


@pytest.mark.parametrize("name", TABLES)
def test_every_kernel_has_a_line_in_every_table(name: str) -> None:
    for kernel in KERNELS:
        for widths in ((512, 1536), (2048, 4096), (28672, 4096), (4096, 14336), (8, 8)):
            assert TABLES[name][line_in(TABLES[name], kernel, *widths)]


def test_lines_by_width_and_by_family() -> None:
    assert line_in(HOPPER, "wgrad_x", 28672, 4096) == "wgrad_x, huge"
    assert line_in(HOPPER, "wgrad_x", 8, 8) == "wgrad_x"
    assert line_in(HOPPER, "down and adapter", 8192, 8192) == "down and adapter"
    found = [
        line_in(TABLES["sm_86"], kernel, 8192, 64) for kernel in ("wgrad_x, add", "d_rows", "up and adapter")
    ]
    assert found == ["wgrad", "product", "up"]
    for table in TABLES.values():
        few = ("few up", "few up and adapter", "few up, no gate", "few down", "few down and adapter")
        found = [line_in(table, kernel, 8192, 64) for kernel in few]
        assert found == ["few up", "few up", "few product", "few product", "few product"]


def test_the_form_of_a_table_is_that_of_its_architecture() -> None:
    for name, found in ARCHITECTURES.items():
        forms = {tile.pointers for line, tile in TABLES[name].items() if line not in FEW}
        assert forms == {found.form == "pointer"}
        assert all(tile.pointers and tile.m == FEW_ROWS for tile in FEW.values())
        if found.vendor == "hip":
            assert not any(tile.stagger for tile in TABLES[name].values()), "waiting is written in PTX"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiles_of_the_tables_pass_the_model(name: str) -> None:
    bad = {line: tile for line, tile in TABLES[name].items() if not fits(line, tile, ARCHITECTURES[name])}
    assert not bad


def test_the_model_counts_what_a_tile_takes() -> None:
    a100, h200 = ARCHITECTURES["sm_80"], ARCHITECTURES["sm_90"]
    tile = Tile(n=128, k=64, stages=3, pointers=True)
    assert shared_memory("down", tile, a100) == 2 * 256 * 64 * 2 + 1024
    assert shared_memory("down", tile, h200) == 3 * 256 * 64 * 2 + 1024
    assert shared_memory("up", tile, h200) == 3 * 384 * 64 * 2 + 1024
    assert shared_memory("wgrad", Tile(n=128, k=16, stages=2, pointers=True), a100) == 128 * 128 * 4 + 1024
    assert shared_memory("down", HOPPER["down"], h200) == 229376 + 1024


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["up", "down", "wgrad_x, add"])
def test_candidates_are_what_fits(name: str, kernel: str) -> None:
    found = ARCHITECTURES[name]
    tiles = candidates(kernel, found)
    assert len(set(tiles)) > 3
    assert all(fits(kernel, tile, found) for tile in tiles)
    assert len({tile.pointers for tile in tiles}) == 1
    assert tiles[0] == TABLES[name][line_in(TABLES[name], kernel, 0)]


def test_kernels_run_in_the_form_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not device_fits(CPU)
    device = torch.device("cuda", 40)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    for name, found in ARCHITECTURES.items():
        monkeypatch.setattr(tuning, "architecture_of", lambda _, found=found: found)
        assert device_fits(device)
        assert has_warpgroups(device) is (name == "sm_90")
        assert tile_for("down", device, 64, 32, file=Path("absent")).pointers is (found.form == "pointer")
    monkeypatch.setattr(tuning, "architecture_of", lambda _: None)
    assert not device_fits(device)


def test_a_program_for_each_tile_makes_no_kernel_of_its_own() -> None:
    assert grid_of(Tile(per_sm=0), CPU, 77) == (77, 1 << 30)
    assert grid_of(Tile(), CPU, 77) == (2, 2)


def test_only_many_tiles_are_staggered() -> None:
    assert delay(Tile(stagger=800), CPU, 10**6) == 0, "nothing runs at the same time"


def test_a_file_overrides_the_table(tmp_path: Path) -> None:
    from moeclipse.ops.tuning import key_of

    file = tmp_path / "tiles.json"
    assert tile_for("up", CPU, 64, 32, file=tmp_path / "absent.json") == HOPPER["up"]
    file.write_text(json.dumps({key_of("up", CPU, 64, 32): {"n": 64, "stages": 2}}))
    assert tile_for("up", CPU, 64, 32, file=file) == Tile(n=64, stages=2)
    assert tile_for("up", CPU, 64, 48, file=file) == HOPPER["up"]


def test_a_broken_file_is_no_reason_to_stop(tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    file.write_text("{ not json")
    assert tile_for("down", CPU, 64, 32, file=file) == HOPPER["down, small"]


@pytest.mark.parametrize("damaged", [{"stagse": 2}, {"stages": "2"}, {"stages": 2.0}, [2], None])
def test_what_is_no_tile_is_left_out_alone(tmp_path: Path, damaged: object) -> None:
    from moeclipse.ops.tuning import key_of

    file = tmp_path / "tiles.json"
    file.write_text(json.dumps({key_of("up", CPU, 64, 32): damaged, key_of("up", CPU, 64, 48): {"n": 64}}))
    assert tile_for("up", CPU, 64, 32, file=file) == HOPPER["up"]
    assert tile_for("up", CPU, 64, 48, file=file) == Tile(n=64)


def test_variants_are_all_combinations() -> None:
    tiles = variants(Tile(), n=[64, 128], stages=[2, 3, 4])
    assert len(set(tiles)) == 6
    assert num_programs(Tile(), CPU) == 2


def test_the_fastest_candidate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.testing

    from moeclipse.ops.tuning import tune

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
    monkeypatch.setattr(tuning, "architecture_of", lambda _: ARCHITECTURES["sm_90"])
    monkeypatch.setitem(sys.modules, "moeclipse.ops.triton.wgrad_gluon", None)
    monkeypatch.delattr(moeclipse.ops.triton, "wgrad_gluon", raising=False)
    tuning._has_gluon.cache_clear()
    assert not has_warpgroups(torch.device("cuda", 70))
    tuning._has_gluon.cache_clear()
