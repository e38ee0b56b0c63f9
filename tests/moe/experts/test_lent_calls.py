"""What a single call lends, by name, by table or by a function: that call alone, and gradients stay."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from layer_parity import compare, gradients, make
from torch.utils.checkpoint import checkpoint

from moeclipse.balance.shadow_policy import ShadowQuestion
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.module_experts import joint
from moeclipse.testing.run_ranks import run_alone, run_ranks
from probed import lend

WAYS: dict[str, Any] = {
    "nothing": (),
    "experts by name": (0, 3, 6),
    "all, as truths would say": [expert for expert, stored in enumerate([True] * 8) if stored],
    "a table": {0: (1, 3), 6: (2,), 7: [0]},
    "a function": lambda call: call.lend({1: (1, 2), 5: (0,)}),
    "a function, for all rows": lambda call: call.lend({1: (1, 2), 5: (0,)}, serving=True),
}


def called(mesh: Mesh, way: str, sizes: list[int]) -> tuple[dict, list[Any]]:
    """Gradients of the second of three calls, which lends; what each of them lent."""
    moe, lent = make(GateConfig(top_k=3, z_loss=0.1), 8, 1, mesh, **lend("off")), []
    found: dict = {}
    for call in range(3):
        moe.zero_grad()
        inside = moe.schedule.shadows.lending(WAYS[way]) if call == 1 else nullcontext()
        with inside:
            each = gradients(moe, mesh, sizes)
        found = each if call == 1 else found
        lent.append(moe.schedule.shadow_plan and moe.schedule.shadow_plan.shadows)
    return found, lent


@pytest.mark.parametrize("way", WAYS)
def test_one_call_lends_and_gradients_are_those_of_one_process(way: str) -> None:
    sizes = [5, 0, 9, 1]
    reference, _ = run_alone(called, "nothing", [sum(sizes)])
    outcomes = run_ranks(4, called, way, sizes)
    compare([found for found, _ in outcomes], reference, 1, 4)
    for _, (before, inside, after) in outcomes:
        assert (before, after) == (None, None), "the calls around it lend nothing"
        assert bool(inside) == (way != "nothing")
    assert len({repr(lent) for _, lent in outcomes}) == 1


def test_names_are_lent_to_ranks_that_have_rows() -> None:
    """As `stored_models` of FastMoE: a truth for each expert, in each call."""
    _, (_, inside, _) = run_ranks(4, called, "all, as truths would say", [1, 0, 1, 0])[0]
    assert {rank for _, ranks in inside for rank in ranks} <= {0, 2}


def again(mesh: Mesh, checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    moe = make(GateConfig(top_k=2), 8, 0, mesh, **lend("off"))
    torch.manual_seed(mesh.rank)
    x = torch.randn(7, moe.gate.weight.shape[1], dtype=moe.gate.weight.dtype, requires_grad=True)
    moe.gate.requires_grad_(True)
    with moe.schedule.shadows.lending({0: (1,), 5: (0,), 6: (0,)}):
        y = checkpoint(moe, x, use_reentrant=False) if checkpointed else moe(x)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    assert x.grad is not None
    assert moe.experts.up.grad is not None
    return x.grad, moe.experts.up.grad


def test_a_call_that_is_computed_again_lends_the_same() -> None:
    """Backward computes it again, long after the call."""
    for kept, repeated in zip(run_ranks(2, again, False), run_ranks(2, again, True), strict=True):
        for one, other in zip(kept, repeated, strict=True):
            assert torch.equal(one, other)


def refused(mesh: Mesh, case: str) -> str:
    more: dict[str, Any] = {"exchange": {"schedule": "gathered"}} if case == "gathered" else lend("off")
    if case == "joint":
        more = {"experts": joint(lambda ids: Both()), "d_out": 12}
    moe = make(GateConfig(top_k=1), 4, 0, mesh, **more)
    wanted: dict[str, Any] = {
        "no such expert": (0, 9),
        "no such rank": {0: (7,)},
        "one for each": (mesh.rank,),
    }
    with pytest.raises(ConfigError) as caught, moe.schedule.shadows.lending(wanted.get(case, (0,))):
        gradients(moe, mesh, [3, 3])
    return str(caught.value)


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return self.up(rows)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("no such expert", "expert 9 cannot be lent; experts are 0 to 3"),
        ("no such rank", "expert 0 cannot be lent to rank 7; ranks are 0 to 1"),
        ("one for each", "a shadow policy must say the same on all ranks"),
        ("gathered", "moe.schedule = 'gathered' lends nothing"),
        ("joint", "one module for all experts cannot lend one"),
    ],
)
def test_what_cannot_be_lent_is_refused_on_all_ranks(case: str, told: str) -> None:
    for text in run_ranks(2, refused, case):
        assert told in text


def test_calls_of_other_threads_do_not_lend() -> None:
    shadows = make(GateConfig(top_k=1), 4, 0, None).schedule.shadows
    seen: list[Any] = []

    def own(call: ShadowQuestion) -> Any:
        return call.lend({})

    with shadows.lending((0,)):
        inner = shadows.now
        with shadows.lending(own):
            assert shadows.now is own
        assert shadows.now is inner is not None
        other = Thread(target=lambda: seen.append(shadows.now))
        other.start()
        other.join()
    assert seen == [None]
    assert shadows.now is None
