"""Rounding by chance: right on average, exact where it can be, and the same bits however a tensor is cut."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.rounding import Stretch, Stretches, random_bits, round_stochastically

CPU = torch.device("cpu")


def rounded(x: torch.Tensor, *stretches: Stretch, step_key: int = 9) -> torch.Tensor:
    return round_stochastically(x, Stretches(stretches, len(x), CPU, 64), step_key)


def test_on_average_nothing_is_lost() -> None:
    length = 100_000
    x = torch.full((length,), 1 + 2**-7 * 0.3)
    found = rounded(x, Stretch(offset=0, length=length, key=1, start=0, columns=100)).float()
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert float(((found - 1) * 2**7).mean()) == pytest.approx(0.3, abs=0.01)
    below = rounded(-x, Stretch(offset=0, length=length, key=1, start=0, columns=100)).float()
    assert torch.equal(below, -found), "by magnitude"


def test_what_bf16_has_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e38, 1e-40, torch.inf, -torch.inf]).bfloat16().float()
    found = rounded(x, Stretch(offset=0, length=len(x), key=3, start=0, columns=8))
    assert torch.equal(found.float(), x)
    assert rounded(torch.tensor([torch.nan]), Stretch(offset=0, length=1, key=3, start=0, columns=1)).isnan()


def test_every_part_of_a_matrix_gets_the_bits_of_the_whole() -> None:
    rows, columns = 6, 10
    all_of_it = Stretch(offset=0, length=60, key=5, start=0, columns=columns)
    whole = random_bits(all_of_it, 7, CPU).view(rows, columns)
    tail = random_bits(Stretch(offset=3, length=25, key=5, start=20, columns=columns), 7, CPU)
    assert torch.equal(tail, whole.flatten()[20:45])
    column_shard = random_bits(Stretch(offset=0, length=24, key=5, start=0, columns=4, left=3), 7, CPU)
    assert torch.equal(column_shard.view(rows, 4), whole[:, 3:7])
    assert 0 <= int(whole.min()) <= int(whole.max()) < 1 << 16


def test_steps_and_tensors_draw_other_bits() -> None:
    stretch = Stretch(offset=0, length=100, key=5, start=0, columns=10)
    other = Stretch(offset=0, length=100, key=6, start=0, columns=10)
    drawn = [random_bits(stretch, 7, CPU), random_bits(stretch, 8, CPU), random_bits(other, 7, CPU)]
    for first in range(3):
        for second in range(first):
            assert (drawn[first] == drawn[second]).float().mean() < 0.1


def test_blocks_know_what_they_meet() -> None:
    cuts = [(0, 50), (50, 10), (60, 100)]
    parts = [Stretch(offset=first, length=n, key=1, start=0, columns=5) for first, n in cuts]
    tables = Stretches(parts, 200, CPU, 64)
    assert tables.of_blocks.tolist() == [[0, 3], [2, 3], [2, 3], [3, 3]]
    assert tables.table.shape == (3, 6)


def test_tensors_beyond_31_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="rounded stochastically"):
        Stretches([Stretch(offset=0, length=1 << 31, key=1, start=0, columns=5)], 1 << 31, CPU, 64)
