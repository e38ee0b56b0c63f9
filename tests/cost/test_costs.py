"""Costs: derived entries, files with all their problems at once, shapes and hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.cost.file import costs_from, load_costs
from moeclipse.cost.hardware import DEVICES, LINKS, device, link, measure_cpu, measure_loopback
from moeclipse.cost.model import DEEPSEEK_V3, PRESETS, UNIT, Costs, LayerWork, layer_costs


def test_what_a_table_leaves_out_is_derived() -> None:
    costs = Costs(seconds={"F": 1.0, "I": 2.0, "W": 3.0}, wire=0.5)
    assert costs.of("B") == 5.0
    assert costs.of("PAIR") == 6.0
    assert costs.of("SELF", "F") == 1.0
    assert costs.of("RECV_B") == costs.of("SEND_F") == 0.5
    assert Costs(seconds={"F": 1.0, "B": 3.0, "W": 1.0}).of("I") == 2.0
    assert Costs(seconds={"F": 1.0, "SELF_F": 0.8}).of("SELF", "F") == 0.8
    assert DEEPSEEK_V3.of("MLP_R") == DEEPSEEK_V3.of("MLP_F")
    with pytest.raises(ConfigError, match="say nothing about MLP_F; known: B, F, I, PAIR, W"):
        UNIT.of("MLP_F")


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Costs(
            seconds={"F": -1.0},
            launch=-2.0,
            contention={("compute", "gpu"): 1.5},
            rank_speed=(0.0,),
            stage_scale=(-1.0,),
        )
    assert len(caught.value.problems) == 6


def test_a_file_with_a_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        'name = "mine"\nlaunch = 5e-6\nwire = 1e-4\ninline_compute = true\nrank_speed = [1.0, 0.5]\n'
        '[seconds]\nF = 1.0\nB = 2\n[fixed]\nF = 0.1\n[contention]\n"compute/a2a" = 0.85\n'
    )
    costs = load_costs(str(path))
    assert costs == Costs(
        name="mine",
        seconds={"F": 1.0, "B": 2},
        fixed={"F": 0.1},
        launch=5e-6,
        wire=1e-4,
        inline_compute=True,
        rank_speed=(1.0, 0.5),
        contention={("compute", "a2a"): 0.85},
    )
    assert load_costs("unit") is PRESETS["unit"]


def test_a_file_with_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        'device = "h200"\nlink = "infiniband"\nnum_ranks = 64\ncomm_processors = 20\n'
        "[layer]\ntokens = 8192\n[seconds]\nROUTE_F = 0.0\n"
    )
    costs = load_costs(str(path))
    assert costs.of("ROUTE_F") == 0.0
    assert costs.contention["compute", "a2a"] == pytest.approx(112 / 132)
    small = load_costs_with(tmp_path, tokens=4096)
    assert costs.of("MLP_F") == pytest.approx(2 * small.of("MLP_F"))
    assert costs.of("DISPATCH_F") == pytest.approx(2 * small.of("DISPATCH_F"), rel=0.01)


def load_costs_with(folder: Path, tokens: int) -> Costs:
    path = folder / f"{tokens}.toml"
    path.write_text(f'device = "h200"\nlink = "infiniband"\nnum_ranks = 64\n[layer]\ntokens = {tokens}\n')
    return load_costs(str(path))


def test_bad_files_name_every_fault_and_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        costs_from({"secnds": {}, "launch": "fast", "contention": {"compute": 0.5}, "seconds": {"F": "x"}})
    text = str(caught.value)
    assert "unknown key 'secnds'; did you mean 'seconds'?" in text
    assert "launch ('fast') must be a number" in text
    assert 'must look like "compute/a2a"' in text
    assert "seconds.F ('x') must be a number" in text
    with pytest.raises(ConfigError, match="device, link and num_ranks go together"):
        costs_from({"device": "h100"})
    with pytest.raises(ConfigError, match="needs a table"):
        costs_from({"name": "empty"})
    with pytest.raises(ConfigError, match="neither a file nor one of unit, deepseek-v3"):
        load_costs("nowhere.toml")


def test_broken_toml_is_told(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("seconds = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_costs(str(path))


def test_every_constant_carries_its_source() -> None:
    assert {"h100", "h200", "b200", "cpu"} <= set(DEVICES)
    assert {"nvlink4", "nvlink5", "infiniband", "pcie5", "loopback"} <= set(LINKS)
    for entry in (*DEVICES.values(), *LINKS.values()):
        assert len(entry.source) > 20
        assert 0 < entry.efficiency <= 1
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        device("h10")
    with pytest.raises(ConfigError, match="choose one of nvlink4"):
        link("carrier pigeon")


def test_this_machine_can_be_measured() -> None:
    cpu = measure_cpu(size=128, repeats=2)
    assert 0 < cpu.flops < 1e14
    assert 0 < cpu.memory_bandwidth < 1e13
    assert "measured" in cpu.source
    wire = measure_loopback(num_bytes=1 << 20, repeats=2)
    assert wire.bandwidth > 0
    assert wire.latency > 0


def test_layer_costs_follow_the_shape() -> None:
    work = LayerWork()
    costs = layer_costs(work, device("h100"), link("infiniband"), 64)
    flops = 6 * work.tokens * work.top_k * work.d_model * work.d_ff
    assert costs.of("MLP_F") == pytest.approx(flops / (989e12 * 0.75))
    assert costs.of("ATTN_B") > costs.of("ATTN_F") > costs.of("ATTN_W")
    assert costs.of("ATTN_B") + costs.of("ATTN_W") == pytest.approx(2 * costs.of("ATTN_F"))
    rows = work.tokens * work.top_k * work.d_model * 2 * 63 / 64
    assert costs.of("DISPATCH_F") == pytest.approx(5e-6 + rows / (50e9 * 0.85))
    assert layer_costs(work, device("h100"), link("infiniband"), 1).of("COMBINE_B") == 0.0
    assert layer_costs(work, device("cpu"), link("loopback"), 2).inline_compute


def test_exchange_costs() -> None:
    costs = ExchangeCosts(
        row_bytes=100, near_bandwidth=1000, far_bandwidth=100, row_seconds=2, latency=1, kernel=3
    )
    assert costs.transfer(10, near=True) == 2.0
    assert costs.transfer(10, near=False) == 11.0
    assert costs.compute(4) == 11.0
    with pytest.raises(ConfigError, match="2 problems"):
        ExchangeCosts(row_bytes=0, near_bandwidth=1, far_bandwidth=1, row_seconds=-1)
