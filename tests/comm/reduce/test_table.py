"""Which algorithm is used for which size: defaults, a file that overrides them, and who writes it."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeclipse.comm.reduce.table import (
    Algorithm,
    algorithm_for,
    default_algorithm,
    key_of,
    read_table,
    table_lines,
    write_algorithm,
)
from moeclipse.core.errors import ConfigError


def test_the_table(tmp_path: Path) -> None:
    assert default_algorithm("NVIDIA H100", 2, True).two_stages_from is None
    assert default_algorithm("NVIDIA H100", 4, True).two_stages_from == 512 << 10
    assert default_algorithm("NVIDIA H100", 8, True).two_stages_from == 256 << 10
    assert default_algorithm("NVIDIA H100", 8, False).two_stages_from is None
    shared = default_algorithm("NVIDIA H100", 8, True, shared=True)
    assert [shared.num_stages(n << 20, copied=False) for n in (1, 2, 15, 16)] == [1, 2, 2, 1]
    assert [shared.num_stages(n << 20, copied=True) for n in (2, 4, 16)] == [1, 2, 2]
    two = default_algorithm("NVIDIA H100", 2, True, shared=True)
    assert two == Algorithm(in_place_from=4 << 20, copied_two_stages_from=8 << 20)
    assert key_of("NVIDIA H100", 8, True, shared=True) == "NVIDIA H100|8 ranks|one device"
    file = tmp_path / "table.json"
    assert algorithm_for("cpu", 2, True, file) == default_algorithm("cpu", 2, True)
    write_algorithm(
        key_of("cpu", 4, True), Algorithm(two_stages_from=1 << 10, two_stages_until=1 << 24), file
    )
    write_algorithm(key_of("cpu", 2, True), Algorithm(max_bytes=1 << 20), file)
    assert algorithm_for("cpu", 4, True, file).two_stages_from == 1 << 10
    assert table_lines("cpu", True, file)[:2] == [
        "2 ranks: up to 1 MiB, two stages never (tuned)",
        "4 ranks: any size, two stages from 1 KiB to 16 MiB (tuned)",
    ]
    assert json.loads(file.read_text())["cpu|2 ranks|linked"]["max_bytes"] == 1 << 20


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": {"stages": 1}}', '{"cpu": {"chunk_bytes": "much"}}'])
def test_a_damaged_table_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a table of all-reduce algorithms .*; remove it, or"):
        read_table(file)


def test_the_bench_writes_what_a_device_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    bench = runpy.run_path(str(Path(__file__).parents[3] / "bench" / "all_reduce.py"))

    def row(size: int, *times: float) -> dict[str, object]:
        names = ("one stage", "two stages", "one stage, graph", "two stages, graph")
        where = {"ranks": 2, "size": size, "name": "H", "dtype": "bfloat16"}
        return where | dict(zip(names, times, strict=True))

    rows = [row(1 << 10, 9, 8, 3, 5), row(1 << 20, 9, 10, 5, 6), row(1 << 24, 42, 37, 24, 29)]
    bench["tune_device"](rows)
    found = algorithm_for("H", 2, True, shared=True)
    assert found == replace(default_algorithm("H", 2, True, True), copied_two_stages_from=1 << 24)
    assert found.two_stages_from is None, "in a graph one stage won at every size"
    bench["tune_device"]([*rows, row(1 << 22, 9, 10, 7, 6), row(1 << 23, 20, 21, 13, 12)])
    found = algorithm_for("H", 2, True, shared=True)
    assert (found.two_stages_from, found.two_stages_until) == (1 << 22, 1 << 24), "it won in between"
