"""An adapter of one projection: its products by their definition, and gradients wider than their place."""

from __future__ import annotations

import pytest
import torch

from apart import apart
from moeclipse.ops.grouping import group_rows
from moeclipse.ops.low_rank import LowRank, add_wgrad

E, R, K, N = 3, 2, 6, 4
OWNERS = [0, 0, 0, 2, 2]
IDS = torch.tensor([[0, 2], [2, 0], [0, -1]])


def given() -> tuple[LowRank, torch.Tensor]:
    torch.manual_seed(0)
    a, b = torch.randn(E, R, K, dtype=torch.float64), torch.randn(E, N, R, dtype=torch.float64)
    adapter = LowRank.of(a, b, 1.5)
    assert adapter is not None
    return adapter, torch.randn(6, K, dtype=torch.float64)


@apart
def test_both_halves_are_a_weight_of_low_rank() -> None:
    adapter, x = given()
    grouping = group_rows(IDS, E)
    more = adapter.forward(adapter.inner(x, grouping))
    dy = torch.randn(6, N, dtype=torch.float64)
    back = adapter.backward(adapter.d_inner(dy, grouping))
    for row, expert in enumerate(OWNERS):
        weight = 1.5 * adapter.b_ENR[expert] @ adapter.a_ERK[expert]
        torch.testing.assert_close(more.weight[expert] @ more.rows_MR[row], weight @ x[row])
        torch.testing.assert_close(back.rows_MR[row] @ back.weight[expert], dy[row] @ weight)
    assert LowRank.of(None, None, 1.0) is None


@pytest.mark.parametrize("accumulate", [True, False])
@apart
def test_columns_that_a_gradient_lacks_are_left_out(accumulate: bool) -> None:
    torch.manual_seed(0)
    grouping = group_rows(IDS, E)
    dy, x = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    whole, part = torch.ones(E, 8, 5, dtype=torch.float64), torch.ones(E, 3, 5, dtype=torch.float64)
    for into in (whole, part):
        add_wgrad(dy, x, grouping, into, accumulate=accumulate)
    torch.testing.assert_close(part, whole[:, :3])
    assert torch.equal(part[1], torch.full_like(part[1], float(accumulate))), "an expert without rows"
