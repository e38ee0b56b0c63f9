"""Reductions on a device, with a kernel that only notes its launches: what is launched, shared and said.

The sums themselves are shown by `tests/gpu` and, through Triton's interpreter, by `tests/ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce import on_device
from moeclipse.comm.reduce.on_device import HEAD_BYTES, CudaReducer, overlap
from moeclipse.comm.reduce.reducer import run_out
from moeclipse.comm.shared.device import CudaMemory
from moeclipse.core.errors import CommError
from moeclipse.ops.peer_reduce import GATHER, ONE, SCATTER, TWO, Launch

AREA = 1 << 12
CPU = torch.device("cpu")


class Kernel:
    """Notes (bytes, kind, row, source) of every launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, bool, Any]] = []
        self.last: Launch | None = None

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, kind: int, inputs: Any = None, source: Any = None
    ) -> None:
        self.launches.append((x.nbytes, kind, inputs is not None, source))
        launcher: Any = self
        row = 0 if inputs is None else inputs.data_ptr()
        self.last = Launch(launcher, 1, row, x.numel(), 0, 0)

    def again(self, _launch: Launch) -> Any:
        again = Kernel()
        again.launch = self.launches.append  # type: ignore[attr-defined]
        return again


class Inputs:
    """Shared tensors, of which only places count."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.held: list[torch.Tensor] = []
        self.events: list[str] = []
        self.num_captured = 0

    def share(self, x: torch.Tensor) -> None:
        self.events.append("share")
        self.held.append(x)
        self.starts.append(x.data_ptr())

    def unshare(self, x: torch.Tensor) -> None:
        self.events.append("unshare")
        self.starts.remove(x.data_ptr())

    def find(self, address: int, num_bytes: int) -> tuple[Any, int] | None:
        for start, x in zip(self.starts, self.held, strict=False):
            if start <= address and address + num_bytes <= start + x.nbytes:
                return Shared(), address - start
        return None

    def row(self, _share: Any, offset: int) -> torch.Tensor:
        return torch.tensor([offset])

    def add(self, _x: torch.Tensor) -> torch.Tensor:
        self.num_captured += 1
        return torch.zeros(1)

    def register(self) -> None:
        self.events.append("register")

    def forget(self) -> None:
        self.events.append("forget")

    def close(self) -> None:
        self.events.append("close")


class Shared:
    number = 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(on_device, "AllReduceKernel", lambda _space: Kernel())
    monkeypatch.setattr(on_device, "SharedInputs", lambda *_: Inputs())
    mesh = Mesh.single()

    def reducer(in_place_from: int | None = None, area_bytes: int = AREA) -> Any:
        own = zeros(HEAD_BYTES + 2 * area_bytes, dtype=torch.uint8)
        memory = CudaMemory(own, [own, own], None, "test")
        memory.max_blocks = 1
        group: Any = Group()
        return CudaReducer(memory, group, mesh.watch, area_bytes, in_place_from)

    return reducer


class Group:
    name, ranks, index, size = "test", (4, 7), 0, 2


def test_a_long_tensor_goes_through_its_area_in_pieces(make: Callable[..., Any]) -> None:
    reducer, x = make(), torch.ones(2500)
    steps = reducer.all_reduce(x, torch.empty(2500), False, 0, "sum")
    assert list(steps) == [], "all of it is launched"
    assert reducer.kernel.launches == [(AREA, ONE, False, None)] * 2 + [(10000 - 2 * AREA, ONE, False, None)]
    assert reducer.kernel.last is None, "several launches are no plan"
    run_out(reducer.all_reduce(x[:8], torch.empty(8), True, 0, "sum"))
    assert reducer.kernel.launches[-1] == (32, TWO, False, None)


def test_shared_tensors_are_read_where_they_lie(make: Callable[..., Any]) -> None:
    reducer, x = make(in_place_from=1024), torch.ones(4096)
    reducer.share(x)
    small, part, odd = x[:255], x[256:1280], x[1:1025]
    assert [reducer.is_shared(t) for t in (x, small, part, odd, x[::2])] == [True, False, True, False, False]
    run_out(reducer.all_reduce(x, torch.empty(4096), False, 0, "whole"))
    assert reducer.kernel.launches == [(x.nbytes, ONE, True, ("shared", 1, 0))], "in one launch"
    run_out(reducer.all_reduce(part, part, False, 0, "in place"))
    assert reducer.kernel.launches[-1] == (4096, TWO, True, ("shared", 1, 1024)), (
        "nobody reads what it writes"
    )
    run_out(reducer.all_reduce(small, torch.empty(255), False, 0, "small"))
    assert reducer.kernel.launches[-1] == (1020, ONE, False, None)
    reducer.unshare(x)
    assert not reducer.is_shared(x)
    assert reducer.inputs.events == ["share", "unshare"]


def test_parts_that_kernels_make(make: Callable[..., Any]) -> None:
    reducer = make()
    assert reducer.can_part([0, 16, 33], torch.float32)
    assert not reducer.can_part([0, 17, 34], torch.float32), "they begin on whole vectors"
    assert not reducer.can_part([0, 16, 64], torch.float32), "they are equal"
    assert not reducer.can_part([0, 0, 8], torch.float32)
    assert not reducer.can_part([0, 1024, 2048], torch.float32), "more than an area"
    assert reducer.can_part([0, 1024, 2048], torch.float16)
    assert list(reducer.reduce_scatter(torch.ones(33), [0, 16, 33], torch.empty(16), "part")) == []
    assert list(reducer.all_gather(torch.ones(16), [0, 16, 33], torch.empty(33), "whole")) == []
    assert [kind for _, kind, _, _ in reducer.kernel.launches] == [SCATTER, GATHER]


def test_a_graph_reads_its_inputs_and_shares_them_at_the_end(make: Callable[..., Any]) -> None:
    area = 1 << 19
    reducer, x = make(in_place_from=1024, area_bytes=area), torch.ones(1024)
    with reducer.capture([torch.float32]):
        assert reducer.capturing
        compiled = len(reducer.kernel.launches)
        assert compiled == 2 * 2 * 3, "one stage and two, copied and not, in every tile, are compiled before"
        before = reducer.inputs.num_captured
        run_out(reducer.all_reduce(x, torch.empty(1024), False, 0, "captured"))
        run_out(reducer.all_reduce(x[:4], torch.empty(4), False, 0, "small"))
        long = torch.ones(area // 4 + 1)
        run_out(reducer.all_reduce(long, torch.empty_like(long), False, 0, "longer than an area"))
        kinds = [(there, source) for _, _, there, source in reducer.kernel.launches[compiled:]]
    assert kinds == [(True, ("captured", before + 1)), (False, None), (False, None), (False, None)]
    assert not reducer.capturing
    assert reducer.inputs.events == ["register", "register"], "of what was compiled, and of the graph's"


def test_a_capture_that_fails_shares_nothing(make: Callable[..., Any]) -> None:
    reducer = make(in_place_from=1024)
    with suppress(ZeroDivisionError), reducer.capture([torch.float32]):
        raise ZeroDivisionError
    assert not reducer.capturing
    assert reducer.inputs.events == ["register"]


def test_inputs_that_cannot_be_shared_are_copied(make: Callable[..., Any]) -> None:
    reducer = make(in_place_from=0)

    def refuse() -> None:
        raise CommError("no handle")

    reducer.inputs.register = refuse
    reducer._begin_capture([torch.float32])
    assert not reducer.capturing, "all ranks got the error, so all of them copy"
    assert reducer.inputs.events == ["forget"]
    reducer.kernel.launches.clear()
    run_out(reducer.all_reduce(torch.ones(64), torch.empty(64), False, 0, "copied"))
    assert reducer.kernel.launches == [(256, ONE, False, None)]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1000, "rank 4 replayed a graph with sum before its inputs were shared; leave the"),
        (102, "ranks 4 and 7 made different calls, in sum or before; all ranks must make the same"),
        (2, "rank 4 waited 60 s in sum: rank 7 did not arrive"),
    ],
)
def test_what_a_kernel_gave_up_on_is_said_with_the_next_call(
    status: int, text: str, make: Callable[..., Any]
) -> None:
    reducer, x = make(), torch.ones(4)
    run_out(reducer.all_reduce(x, torch.empty(4), False, 0, "sum"))
    reducer.settle()
    run_out(reducer.all_reduce(x, torch.empty(4), False, 0, "sum"))
    reducer.seen[0] = status
    with pytest.raises(CommError, match=f"^{text}"):
        reducer.all_reduce(x, torch.empty(4), False, 0, "the next")
    with pytest.raises(CommError, match=f"^{text}"):
        reducer.settle()


def test_a_single_aligned_launch_can_be_repeated(make: Callable[..., Any]) -> None:
    reducer, x, out = make(), torch.ones(64), torch.empty(64)
    key = (torch.float32, 64, None)

    def plan(x: torch.Tensor, out: torch.Tensor) -> Any:
        run_out(reducer.all_reduce(x, out, False, 0, "sum"))
        return reducer.plan(key, x, out, False, 0, None)

    first = plan(x, out)
    assert first is plan(x, x), "one for a length, with all that was launched"
    assert plan(torch.ones(65)[1:], out) is None, "not on a whole vector"
    reducer.share(x)
    assert plan(x, out) is not first, "it knew where shared tensors lay"
    reducer.capturing = True
    assert plan(x, out) is None
    reducer.close()
    assert reducer.inputs.events == ["share", "close"]


def test_rows_go_whole_through_an_area(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def kernel(x: torch.Tensor, _residual: Any, _weight: Any, _eps: float, out: Any, _space: Any) -> None:
        rows.append(len(x))
        for part, value in zip(out, (1.0, 2.0), strict=True):
            part.fill_(value)

    monkeypatch.setattr(on_device, "all_reduce_rms_norm_kernel", kernel)
    x = torch.ones(25, 100)
    normed, h = make().all_reduce_rms_norm(x, x, torch.ones(100), 1e-6, True, "norm")
    assert rows == [10, 10, 5]
    assert normed.eq(1).all()
    assert h.eq(2).all()


def test_overlap() -> None:
    x = torch.ones(10)
    assert overlap(x[:5], x[4:])
    assert overlap(x, x)
    assert not overlap(x[:5], x[5:])


def test_opening_takes_flags_and_two_areas(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make()  # with it, nothing here needs a device
    asked: list[int] = []

    def open_memory(_group: Any, _watch: Any, _device: Any, num_bytes: int) -> CudaMemory:
        asked.append(num_bytes)
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        return CudaMemory(own, [own, own], None, "test")

    monkeypatch.setattr(CudaMemory, "open", open_memory)
    group: Any = Group()
    reducer = CudaReducer.open(group, Mesh.single().watch, CPU, AREA, 512)
    assert asked == [HEAD_BYTES + 2 * AREA]
    assert reducer.is_large(512)
    assert not reducer.is_large(511)
