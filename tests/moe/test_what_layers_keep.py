"""What a layer keeps: rows go when they have been computed, and what backward needs goes with it."""

from __future__ import annotations

import gc
from typing import Any

from test_layer import inputs, make
from torch.multiprocessing.reductions import StorageWeakRef

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.dispatch_combine import ForwardRun
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks


def kept(mesh: Mesh) -> list[list[str]]:
    """Of the rows that arrived and of those that the experts read: after forward, and after backward."""
    gc.disable()
    refs: list[tuple[str, StorageWeakRef]] = []

    def note(name: str, tensor: Any) -> None:
        refs.append((name, StorageWeakRef(tensor.untyped_storage())))

    def left() -> list[str]:
        return sorted({name for name, ref in refs if not ref.expired()})

    moe = make(GateConfig(top_k=2), 8, 0, mesh, exchange={"schedule": "smart", "group_size": 1, "chunks": 2})
    start, experts = ForwardRun.start, moe.experts.forward

    def noted_start(self: ForwardRun) -> None:
        start(self)
        note("arrived", self.arrived[0])

    def noted_experts(x: Any, *args: Any) -> Any:
        note("read by experts", x)
        return experts(x, *args)

    ForwardRun.start, moe.experts.forward = noted_start, noted_experts  # type: ignore[method-assign]
    x = inputs(20)[0][10 * mesh.rank : 10 * mesh.rank + 10].requires_grad_()
    y, _ = moe.run(x, Tokens(mesh=mesh, first=10 * mesh.rank, total=20))
    after_forward = left()
    y.sum().backward()
    return [after_forward, left()]  # y is still here, and with it the node


def test_rows_go_when_they_have_been_computed_and_all_goes_with_backward() -> None:
    assert run_ranks(2, kept) == [[["read by experts"], []]] * 2
