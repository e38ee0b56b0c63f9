"""Experts over grouped rows: each pass by its definition, and which operands the kernels take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import assert_equal_references

from apart import apart
from moeclipse.ops import expert_mlp
from moeclipse.ops.activation import ACTIVATIONS, activate, hidden_width
from moeclipse.ops.grouping import group_rows

D, F, E = 6, 4, 3


def given(activation: str, bias: bool) -> Any:
    """Five tokens, two choices each, one unused: nine rows that are gathered."""
    torch.manual_seed(0)
    ids = torch.tensor([[0, 2], [2, 0], [0, -1], [2, 0], [0, 2]])
    h = hidden_width(activation, F)
    options = {"dtype": torch.float64}
    return SimpleNamespace(
        grouping=group_rows(ids, E), x=torch.randn(5, D, **options), scores=torch.rand(10, **options),
        up=torch.randn(E, h, D, **options), down=torch.randn(E, D, F, **options),
        up_bias=torch.randn(E, h, **options) if bias else None,
        down_bias=torch.randn(E, D, **options) if bias else None,
        owners=[0, 0, 0, 0, 0, 2, 2, 2, 2], used=9,
    )  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@apart
def test_passes_are_autograd_of_one_row_after_the_other(activation: str, bias: bool) -> None:
    it = given(activation, bias)
    index = it.grouping.row_token_M
    options = {"activation": activation}
    h, a = expert_mlp.up(it.x, it.up, it.grouping, index, bias_EH=it.up_bias, **options)
    y = expert_mlp.down(a, it.down, it.grouping, bias_ED=it.down_bias)
    rows = it.x[index.long()].requires_grad_()
    scores = it.scores.clone().requires_grad_()
    expected_h = torch.stack([it.up[e] @ x for e, x in zip(it.owners, rows, strict=False)])
    expected_h = expected_h if it.up_bias is None else expected_h + it.up_bias[it.owners]
    expected_a = activate(expected_h, activation)
    expected_y = torch.stack([it.down[e] @ row for e, row in zip(it.owners, expected_a, strict=True)])
    expected_y = expected_y if it.down_bias is None else expected_y + it.down_bias[it.owners]
    torch.testing.assert_close(h[: it.used], expected_h)
    torch.testing.assert_close(a[: it.used], expected_a)
    torch.testing.assert_close(y[: it.used], expected_y)
    d_out = torch.randn(5, D, dtype=torch.float64)
    weighted = expected_y * scores[: it.used, None]
    wanted = (expected_h, scores, rows)
    grads = torch.autograd.grad(weighted, wanted, d_out[index[: it.used].long()])
    d_h, scaled, d_score = expert_mlp.d_hidden(
        d_out, it.scores, h, it.down, it.grouping, index, bias_ED=it.down_bias, **options
    )
    dx = expert_mlp.d_rows(d_h, it.up, it.grouping)
    torch.testing.assert_close(d_h[: it.used], grads[0])
    torch.testing.assert_close(scaled[: it.used], (expected_a * it.scores[: it.used, None]).detach())
    torch.testing.assert_close(d_score[: it.used], grads[1][: it.used])
    torch.testing.assert_close(dx[: it.used], grads[2][: it.used])


class Rows:
    """What is asked of rows before a kernel gets them."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    def __init__(self, **change: Any) -> None:
        self.strides, self.address, self.count = (16, 1), 256, 5
        vars(self).update(change)

    def __len__(self) -> int:
        return self.count

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def data_ptr(self) -> int:
        return self.address


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({"dtype": torch.float32}, 16),
        ({"strides": (17, 1)}, 16),
        ({"strides": (1, 16)}, 16),
        ({"address": 8}, 16),
        ({}, 12),
    ],
)
def test_a_refusal_on_a_device_is_told(
    change: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_mlp, "device_fits", lambda _: True)
    tiled: Any = SimpleNamespace(tiles_3C=torch.zeros(3, 1), num_rows=4)
    weight = torch.zeros(3, 16, width, dtype=torch.bfloat16)
    rows: Any = Rows(**change)
    with pytest.warns(UserWarning, match="run in plain torch: the kernels take bf16 and fp16"):
        assert not expert_mlp.mlp_fits(rows, weight, tiled)
    good: Any = Rows()
    assert expert_mlp.mlp_fits(good, torch.zeros(3, 16, 24, dtype=torch.bfloat16), tiled)


def test_no_rows_and_no_device_are_no_reason_to_warn(recwarn: pytest.WarningsRecorder) -> None:
    grouping = group_rows(torch.zeros(0, 2, dtype=torch.int64), E)
    empty: Any = Rows(count=0)
    assert not expert_mlp.mlp_fits(empty, torch.zeros(3, 16, 16), grouping)
    rows_without_pairs: Any = Rows()
    assert not expert_mlp.mlp_fits(rows_without_pairs, torch.zeros(3, 16, 16), grouping)
    assert not expert_mlp.mlp_fits(torch.zeros(4, 16), torch.zeros(3, 16, 16), grouping)
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["h ", "a ", "y ", "dh ", "scaled ", "dscore ", "dx ", "u "])
def test_kernels_equal_their_references(kind: str) -> None:
    assert_equal_references("experts", kind)
