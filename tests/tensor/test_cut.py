"""Which part of a logical weight a rank holds: every element once, with the bits of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moeclipse.core.errors import ConfigError
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.cut import Cut, cut_of, mark, share_of


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_have_the_weights_of_the_whole(dim: int, blocks: int) -> None:
    shape = (10, 14)
    blocks = blocks if dim == 0 else 1
    whole = fill_normal(torch.empty(shape), 9, 1.0)
    covered = torch.zeros(shape)
    for index in range(3):
        cut = Cut.of(shape, dim, index=index, parts=3, blocks=blocks)
        part = torch.empty(cut.local_shape)
        cut.fill(part, 9, 1.0)
        if dim == 1:
            assert torch.equal(part, whole[:, cut.start : cut.stop])
            covered[:, cut.start : cut.stop] += 1
        else:
            flat = torch.cat([whole.view(-1)[start : start + length] for start, length in cut.runs])
            assert torch.equal(part.view(-1), flat)
            for start, length in cut.runs:
                covered.view(-1)[start : start + length] += 1
    assert torch.equal(covered, torch.ones(shape)), "every element belongs to one part"


def test_a_width_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"heads \(12\) has 3 units to be cut, fewer than the 4 ranks of tp"
    ):
        Cut.of((12, 2), 0, index=0, parts=4, unit=4, what="heads")
    with pytest.raises(ConfigError, match=r"heads \(10\) must be a multiple of 1 x 4"):
        Cut.of((10, 2), 0, index=0, parts=2, unit=4, what="heads")


def test_units_stay_together_and_the_first_parts_are_larger() -> None:
    parts = [Cut.of((28, 3), 0, index=index, parts=3, unit=4) for index in range(3)]
    assert [(part.start, part.stop) for part in parts] == [(0, 12), (12, 20), (20, 28)]
    assert [part.local_shape for part in parts] == [(12, 3), (8, 3), (8, 3)]


def test_columns_have_no_stretch_of_the_whole() -> None:
    rows, columns = (Cut.of((6, 4), dim, index=1, parts=2) for dim in (0, 1))
    assert rows.columns is None
    assert columns.columns == (2, 4)
    bias = Cut.of((8,), 0, index=1, parts=2, blocks=2)
    assert bias.runs == [(2, 2), (6, 2)], "the second half of each block"


def test_marks_say_what_gradients_are() -> None:
    weight, cut = nn.Parameter(torch.zeros(4, 2)), Cut.of((8, 2), 0, index=0, parts=2)
    assert (share_of(weight), cut_of(weight)) == ("sum", None), "without a mark"
    assert share_of(mark(weight, "same")) == "same"
    assert cut_of(weight) is None
    assert share_of(mark(weight, cut)) == "cut"
    assert cut_of(weight) is cut
