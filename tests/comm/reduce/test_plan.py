"""What a plan repeats, and what it leaves to the whole call. Host tensors stand in for those of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from moeclipse.comm.reduce.plan import MAX_VIEWS, CudaPlan

LENGTH = 64


class Inputs:
    """One shared tensor."""

    def __init__(self, x: torch.Tensor | None) -> None:
        self.starts = [] if x is None else [x.data_ptr()]
        self._end = 0 if x is None else x.data_ptr() + x.nbytes

    def find(self, address: int, num_bytes: int) -> object:
        inside = bool(self.starts) and self.starts[0] <= address and address + num_bytes <= self._end
        return "found" if inside else None


class Setup:
    def __init__(self, shared: torch.Tensor | None = None, large: bool = True) -> None:
        self.calls: list[tuple[object, int, int]] = []
        self.seen = [0]
        self.owner: Any = SimpleNamespace(
            device=SimpleNamespace(index=-1), seen=self.seen, capturing=False, label="",
            inputs=Inputs(shared), is_large=lambda _: large,
        )  # fmt: skip
        self.plan = CudaPlan(self.owner, LENGTH * 4)

    def keep(self, name: str, x: torch.Tensor, out: torch.Tensor, row: int = 0) -> None:
        def again(_: object) -> Any:
            return SimpleNamespace(launch=lambda x, out: self.calls.append((name, x, out)))

        launch: Any = SimpleNamespace(launcher=SimpleNamespace(again=again), inputs=row)
        self.plan.keep(launch, x.data_ptr(), out.data_ptr())


def test_a_plan_repeats_what_was_launched() -> None:
    setup, x, y = Setup(), torch.zeros(LENGTH), torch.zeros(LENGTH)
    assert setup.plan.call(x, y, "sum") is None, "nothing was launched yet"
    setup.keep("copied", x, y)
    assert setup.plan.call(x, y, "sum") is y
    assert setup.plan.call(x, x, "sum") is x
    new = setup.plan.call(x, None, "last")
    assert new is not None
    assert [at for _, _, at in setup.calls] == [y.data_ptr(), x.data_ptr(), new.data_ptr()]
    assert setup.owner.label == "last"


@pytest.mark.parametrize("known", [False, True], ids=["first", "after a good one"])
def test_a_plan_refuses_what_it_was_not_made_for(known: bool) -> None:
    setup, x, y = Setup(), torch.zeros(8, 8), torch.zeros(8, 8)
    setup.keep("copied", x, y)
    if known:
        assert setup.plan.call(x, y, "sum") is y
    calls = len(setup.calls)
    assert setup.plan.call(x, y.view(64), "shape") is None
    assert setup.plan.call(x, y.to(torch.int32), "dtype") is None
    assert setup.plan.call(x, y.t(), "stride") is None
    assert setup.plan.call(x.t(), y, "stride of the input") is None
    assert setup.plan.call(torch.zeros(65)[1:].view(8, 8), y, "alignment") is None
    both = torch.zeros(72)
    assert setup.plan.call(both[:64].view(8, 8), both[8:].view(8, 8), "out begins within the input") is None
    assert setup.plan.call(x, y.t_(), "the same object, turned round") is None
    y.t_()
    setup.seen[0] = 1
    assert setup.plan.call(x, y, "a peer is late") is None
    setup.seen[0] = 0
    setup.owner.capturing = True
    assert setup.plan.call(x, y, "captured") is None
    assert len(setup.calls) == calls


def test_a_plan_keeps_no_result_alive() -> None:
    setup, x, y = Setup(), torch.zeros(LENGTH), torch.zeros(LENGTH)
    setup.keep("copied", x, y)
    setup.plan.call(x, y, "sum")
    left = ref(y)
    del y
    assert left() is None


def test_shared_tensors_have_launches_of_their_own() -> None:
    base = torch.zeros(4 * LENGTH)
    x, other, y = base[:LENGTH], base[LENGTH : 2 * LENGTH], torch.zeros(LENGTH)
    setup = Setup(shared=base)
    setup.keep("copied", y, y)
    assert setup.plan.call(x, y, "sum") is None, "a shared one is never copied"
    setup.keep("row 1", x, y, row=1)
    assert setup.plan.call(x, y, "sum") is y
    assert setup.plan.call(x, x, "sum") is None, "in place takes two stages"
    setup.keep("row 1, in place", x, x, row=1)
    assert setup.plan.call(x, x, "sum") is x
    assert setup.plan.call(other, y, "sum") is None, "another part of it"
    assert setup.plan.call(x, base[16 : 16 + LENGTH], "sum") is None, "it begins within the input"
    assert setup.plan.call(y, x, "sum") is x
    assert [name for name, _, _ in setup.calls] == ["row 1", "row 1, in place", "copied"]
    for place in range(0, 3 * LENGTH, 4):
        setup.keep("row 2", base[place:], y, row=2)
    assert len(setup.plan.there) <= MAX_VIEWS
    small = Setup(shared=base, large=False)
    small.keep("copied", x, y)
    assert small.plan.call(x, y, "sum") is y, "small ones are copied in any case"
