"""Rotary position by its properties, and each scaling by its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_model import MODEL, build

from moeclipse.model.config import ModelConfig, yarn_magnitude
from moeclipse.model.rotary import Positions, Rotary, near_rotary, rotate
from moeclipse.testing.compare import difference

CPU = torch.device("cpu")
PLAIN = Rotary(width=6, base=10000.0)


def angles(rotary: Rotary, length: int = 8) -> list[float]:
    return rotary.frequencies(length, CPU).tolist()


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotation_depends_on_distance_alone(pairs: str) -> None:
    q, k = torch.randn(2, 1, 1, 8, 6, dtype=torch.float64)
    table = PLAIN.table(torch.arange(20), 20)
    near = rotate(q, table[:, :8], pairs) @ rotate(k, table[:, :8], pairs).transpose(2, 3)
    far = rotate(q, table[:, 9:17], pairs) @ rotate(k, table[:, 9:17], pairs).transpose(2, 3)
    assert difference(far, near) < 1e-13
    assert torch.allclose(rotate(q, table[:, :8], pairs).norm(dim=-1), q.norm(dim=-1))


def test_positions_may_begin_anywhere_and_low_precision_rounds_once() -> None:
    table = PLAIN.table(torch.arange(8), 8)
    assert torch.equal(Positions.of(PLAIN, 5, CPU, first=3).table, table[:, 3:])
    x = torch.randn(1, 1, 8, 6)
    exact = rotate(x.bfloat16().double(), table)
    assert torch.equal(rotate(x.bfloat16(), table), rotate(x.bfloat16().float(), table).bfloat16())
    assert difference(rotate(x.bfloat16(), table), exact) < 2**-8


def test_neighbours_are_halves_in_another_order() -> None:
    x, table = torch.randn(1, 1, 8, 6, dtype=torch.float64), PLAIN.table(torch.arange(8), 8)
    order = [0, 2, 4, 1, 3, 5]
    assert difference(rotate(x, table, "neighbours")[..., order], rotate(x[..., order], table)) == 0


def test_components_behind_the_table_stay() -> None:
    x, table = torch.randn(1, 1, 8, 10, dtype=torch.float64), PLAIN.table(torch.arange(8), 8)
    turned = rotate(x, table)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[..., :6], rotate(x[..., :6], table))


def test_documents_begin_at_position_zero() -> None:
    documents = torch.tensor([[4, 4, 4, 1, 1], [0, 1, 1, 0, 0]])
    table = Positions.of(PLAIN, 5, CPU, documents_BS=documents).table
    plain = PLAIN.table(torch.arange(5), 5)
    assert table.shape == (2, 2, 1, 5, 3)
    assert torch.equal(table[:, 0, 0], plain[:, [0, 1, 2, 0, 1]])
    assert torch.equal(table[:, 1, 0], plain[:, [0, 0, 1, 0, 1]])


def test_linear_and_dynamic_scaling() -> None:
    plain = angles(PLAIN)
    linear = replace(PLAIN, scaling="linear", factor=4.0)
    assert angles(linear) == pytest.approx([f / 4 for f in plain], rel=1e-15)
    dynamic = replace(PLAIN, scaling="dynamic", factor=4.0, original_len=10)
    assert angles(dynamic, 10) == plain, "short texts are as they were"
    base = 10000.0 * (4 * 30 / 10 - 3) ** (6 / 4)
    assert angles(dynamic, 30) == pytest.approx([base ** (-2 * i / 6) for i in range(3)], rel=1e-14)


def test_llama3_scaling_by_wavelengths() -> None:
    rotary = Rotary(width=64, base=500000.0, scaling="llama3", factor=8.0, original_len=8192)
    for found, plain in zip(angles(rotary), angles(replace(rotary, scaling="none")), strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_pairs_and_scales_slow_ones(truncate: bool) -> None:
    rotary = Rotary(width=64, base=150000.0, scaling="yarn", factor=32.0, truncate=truncate)
    plain, found = angles(replace(rotary, scaling="none")), angles(rotary)
    share = [(1 - f / p) / (1 - 1 / 32) for f, p in zip(found, plain, strict=True)]
    borders = [64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(150000.0)) for turns in (32, 1)]
    low, high = (math.floor(borders[0]), math.ceil(borders[1])) if truncate else borders
    for pair, scaled in enumerate(share):
        assert scaled == pytest.approx(min(max((pair - low) / (high - low), 0), 1), abs=1e-12)
    assert rotary.factor_on_table == pytest.approx(0.1 * math.log(32) + 1)
    table, magnified = rotary.table(torch.arange(4), 4), replace(rotary, magnitude=2.0)
    assert difference(magnified.table(torch.arange(4), 4), table * 2 / rotary.factor_on_table) < 1e-15


def test_magnitude_of_yarn() -> None:
    assert yarn_magnitude(1.0) == yarn_magnitude(0.5) == 1.0
    assert yarn_magnitude(4.0, 0.5) == pytest.approx(1 + 0.05 * math.log(4))


def test_a_configuration_says_all_of_it() -> None:
    config = replace(MODEL, rope_scaling="yarn", rope_factor=4.0, rope_dim=4, rope_magnitude=1.5)
    rotary = Rotary.of(config)
    assert (rotary.width, rotary.scaling, rotary.factor, rotary.factor_on_table) == (4, "yarn", 4.0, 1.5)
    assert Rotary.of(ModelConfig()) == Rotary(width=32, base=10000.0)


def test_documents_under_dynamic_scaling_turn_by_their_own_length() -> None:
    """Packed beside others, a document has the angles that it has alone."""
    rotary = replace(PLAIN, scaling="dynamic", factor=3.0, original_len=4)
    lengths = [3, 9, 6]
    documents_BS = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    packed = Positions.of(rotary, sum(lengths), CPU, documents_BS=documents_BS).table[:, 0, 0]
    apart = torch.cat([Positions.of(rotary, length, CPU).table for length in lengths], dim=1)
    assert difference(packed, apart) <= 1e-14
    assert difference(packed[:, :3], PLAIN.table(torch.arange(3), 3)) <= 1e-14  # a short one is not stretched


def test_layers_with_a_window_turn_by_a_base_of_their_own() -> None:
    config = replace(MODEL, windows=(3, 0), window_rope_base=70.0, window_rope_dim=4, rope_scaling="linear")
    near, far = Rotary(width=4, base=70.0), Rotary(width=6, base=10000.0, scaling="linear")
    assert near_rotary(config) == near
    assert near_rotary(MODEL) is None
    model, ids_BS = build(config), torch.zeros(2, 5, dtype=torch.int64)
    q, k = torch.randn(2, 2, 5, 4, 6, dtype=torch.float64)
    for documents in (None, torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])):
        positions = model.positions(ids_BS, documents)
        for layer, rotary in (("0", near), ("1", far)):
            turned = model.layers[layer].attention.turn_both(q, k, positions)
            table = Positions.of(rotary, 5, CPU, documents_BS=documents).table
            for found, given in zip(turned, (q, k), strict=True):
                assert difference(found, rotate(given.transpose(1, 2), table)) < 1e-14
