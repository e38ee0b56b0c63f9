"""Tensors of any shape, flat and back."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.reduce.flat import flat_of, is_plain, same_kind, shaped
from moeclipse.core.errors import ConfigError


def test_a_result_of_another_kind_is_refused() -> None:
    x = torch.ones(2, 3)
    same_kind(x, None)
    same_kind(x, torch.empty(3, 2).t())
    for out in (torch.empty(6), torch.empty(2, 3, dtype=torch.float64), torch.empty(2, 3, device="meta")):
        with pytest.raises(ConfigError, match=r"expected torch.float32 \(2, 3\) on cpu as the input"):
            same_kind(x, out)


def test_a_result_is_written_where_it_is_wanted_if_that_is_contiguous() -> None:
    x = torch.arange(6.0).view(2, 3)
    out = torch.zeros(2, 3)
    flat = flat_of(out, x)
    assert flat.data_ptr() == out.data_ptr()
    assert shaped(flat.copy_(x.view(-1)), out, x) is out
    assert torch.equal(out, x)
    for spread in (torch.zeros(2, 6)[:, ::2], torch.zeros(3, 2).t()):
        flat = flat_of(spread, x)
        assert flat.is_contiguous()
        assert flat.data_ptr() != spread.data_ptr()
        assert shaped(flat.copy_(x.view(-1)), spread, x) is spread
        assert torch.equal(spread, x)
    new = shaped(flat_of(None, x).copy_(x.view(-1)), None, x)
    assert torch.equal(new, x)


def test_a_leaf_can_be_overwritten() -> None:
    x, leaf = torch.ones(4), torch.zeros(4, requires_grad=True)
    flat_of(leaf, x).fill_(7)
    assert leaf.tolist() == [7.0] * 4


def test_which_tensors_need_no_step() -> None:
    x = torch.ones(2, 3)
    assert is_plain(x, None)
    assert is_plain(x, x)
    assert is_plain(x, torch.empty(2, 3))
    base = torch.ones(8)
    assert is_plain(base[:4], base[4:]), "side by side"
    assert not is_plain(base[:4], base[2:6]), "out begins within the input"
    assert not is_plain(x.t(), None)
    assert not is_plain(torch.ones(2, requires_grad=True), None)
    assert not is_plain(x.to_sparse(), None)
    assert not is_plain(torch.ones(2, device="meta"), None)
    for out in (torch.ones(6), x.double(), torch.ones(3, 2).t(), torch.ones(2, 3, requires_grad=True)):
        assert not is_plain(x, out)
