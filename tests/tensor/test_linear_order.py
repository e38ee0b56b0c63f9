"""What a linear launches before what in backward: an exchange hides only behind what comes after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeclipse.comm.async_ops.lane import Lane, Transfer
from moeclipse.comm.mesh import Mesh
from moeclipse.tensor.linear import column_linear, row_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.run_ranks import run_ranks

T, D, N = 8, 6, 5


class Journal(TorchDispatchMode):
    """Transfers as they are launched and waited for, and products by the shape of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._real = (Lane.launch, Transfer.get)

    def __enter__(self) -> Journal:
        (launch, get), lines = self._real, self.lines

        def noted_launch(lane: Lane, group: Any, label: str, *args: Any, **options: Any) -> Transfer[Any]:
            lines.append(f"start {label.split(',')[0]}")
            return launch(lane, group, label, *args, **options)

        def noted_get(transfer: Transfer[Any]) -> Any:
            if not transfer._waited:
                lines.append(f"end {transfer._op.label.split(',')[0]}")
            return get(transfer)

        Lane.launch, Transfer.get = noted_launch, noted_get  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Lane.launch, Transfer.get = self._real  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name.split("::")[1] in ("mm", "addmm", "addmm_"):
            self.lines.append("wgrad" if out.shape[0] == N else "dgrad")
        return out


def backward_of_column(mesh: Mesh, mode: dict[str, Any], num: int, deferred: bool = False) -> list[str]:
    tp = TensorParallel.of(mesh, **mode)
    weights = [nn.Parameter(torch.ones(N, D)) for _ in range(num)]
    x = torch.ones(T // tp.size if tp.parts_tokens else T, D, requires_grad=True)
    loss = sum(y.sum() for y in column_linear(x, weights, tp))
    with Journal() as journal:
        if deferred:
            with tp.wgrads.deferred(microbatch=0):
                loss.backward()
            tp.wgrads.run(microbatch=0)
        else:
            loss.backward()
    return journal.lines


def backward_of_row(mesh: Mesh) -> list[str]:
    tp = TensorParallel.of(mesh, sequence_parallel=True)
    x, weight = torch.ones(T, D, requires_grad=True), nn.Parameter(torch.ones(N, D))
    loss = row_linear(x, weight, tp).sum()
    with Journal() as journal:
        loss.backward()
    return journal.lines


def several(mesh: Mesh, function: Any, calls: list[tuple[Any, ...]]) -> list[list[str]]:
    """Several cases for one start of the ranks."""
    return [function(mesh, *call) for call in calls]


def orders(function: Any, *calls: tuple[Any, ...]) -> list[list[str]]:
    first, second = run_ranks(2, several, function, list(calls), tp=2)
    assert first == second, "ranks that launch in different orders exchange the wrong tensors"
    return first


GATHER = ("start backward gather of inputs", "end backward gather of inputs")
SCATTER = ("start reduce-scatter of d_x", "end reduce-scatter of d_x")
REDUCE = ("start all-reduce of d_x", "end all-reduce of d_x")


@pytest.mark.parametrize("num", [1, 3])
def test_exchanges_travel_under_the_products_that_do_not_need_them(num: int) -> None:
    """The table at the top of the module, line by line."""
    replicated, parts = orders(backward_of_column, ({}, num), ({"sequence_parallel": True}, num))
    dgrads, wgrads = ["dgrad"] * num, ["wgrad"] * num
    assert replicated == [*dgrads, REDUCE[0], *wgrads, REDUCE[1]]
    assert parts == [GATHER[0], *dgrads, GATHER[1], SCATTER[0], *wgrads, SCATTER[1]]


def test_without_overlap_each_exchange_ends_before_the_next_product() -> None:
    off: dict[str, Any] = {"overlap": False}
    replicated, one_off, parts = orders(
        backward_of_column,
        (off, 1),
        ({"async_all_reduce": False}, 1),
        (off | {"sequence_parallel": True}, 1),
    )
    assert replicated == one_off == ["dgrad", *REDUCE, "wgrad"]
    assert parts == [*GATHER, "dgrad", *SCATTER, "wgrad"]


def test_deferred_products_come_after_everything() -> None:
    replicated, parts = orders(backward_of_column, ({}, 1, True), ({"sequence_parallel": True}, 1, True))
    assert replicated == ["dgrad", *REDUCE, "wgrad"]
    assert parts == [GATHER[0], "dgrad", GATHER[1], *SCATTER, "wgrad"]


def test_both_products_of_a_row_parallel_linear_need_the_gathered_gradient() -> None:
    gather = ["start backward gather of outputs", "end backward gather of outputs"]
    assert orders(backward_of_row, ()) == [[*gather, "dgrad", "wgrad"]]
