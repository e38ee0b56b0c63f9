"""Which tensors peers have open, over a driver that only pretends to open them."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared import inputs as shared_inputs
from moeclipse.comm.shared.inputs import SharedInputs
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.ops.cuda_driver import DriverError
from moeclipse.testing.run_ranks import run_ranks

ELSEWHERE = 1 << 48  # a peer's memory is seen at a multiple of this
PAGE = 1 << 21


class Driver:
    """Allocations are pages; a handle is the address of one, and whose it is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.opened, self.refuses = rank, list[int](), False

    def allocation_of(self, address: int) -> int:
        return address // PAGE * PAGE

    def ipc_handle(self, allocation: int) -> bytes:
        if self.refuses:
            raise DriverError("no name with code 1", 1)
        return allocation.to_bytes(8, "little") + bytes([self.rank]) + bytes(55)

    def open_ipc(self, handle: bytes) -> int:
        opened = int.from_bytes(handle[:8], "little") + ELSEWHERE * (handle[8] + 1)
        assert opened not in self.opened, "an allocation is opened once"
        self.opened.append(opened)
        return opened

    def close_ipc(self, address: int) -> None:
        self.opened.remove(address)


def made(mesh: Mesh) -> tuple[SharedInputs, Driver]:
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    inputs, driver = SharedInputs(mesh.world, mesh.watch, torch.device("cpu")), Driver(mesh.rank)
    inputs._driver = driver  # type: ignore[assignment]
    return inputs, driver


def seen_from(mesh: Mesh, x: torch.Tensor) -> list[int]:
    """Where everyone's `x` lies, as this rank sees it."""
    everyone = tell_all(mesh.world, mesh.watch, x.data_ptr(), "test")
    return [at + ELSEWHERE * (rank + 1) * (rank != mesh.rank) for rank, at in enumerate(everyone)]


def aligned(length: int, skip: int = 0) -> torch.Tensor:
    """Pages of their own, so that no two tensors share an allocation."""
    raw = torch.zeros(4 * length + 2 * PAGE, dtype=torch.uint8)
    first = -raw.data_ptr() % PAGE + skip
    return raw[first : first + 4 * length].view(torch.float32)


def shared(mesh: Mesh) -> None:
    inputs, driver = made(mesh)
    x = aligned(1024, 64 * mesh.rank)
    inputs.share(x)
    at = seen_from(mesh, x)
    share, offset = inputs.find(x.data_ptr(), x.nbytes) or (None, 1)
    assert share is not None
    assert (offset, share.number) == (0, 1)
    assert inputs.row(share, 0).tolist() == at
    assert inputs.find(x.data_ptr() - 16, 16) is None
    assert inputs.find(x.data_ptr() + 16, x.nbytes) is None, "it ends outside"
    assert inputs.find(x.data_ptr() + 256, 512) == (share, 256)
    assert inputs.row(share, 256).tolist() == [address + 256 for address in at]
    assert len(driver.opened) == mesh.num_ranks - 1

    captured = inputs.add(x)
    assert captured.tolist() == [0] * mesh.num_ranks, "nothing is known while a graph is captured"
    with pytest.raises(ConfigError, match="a graph is being captured; share before that"):
        inputs.share(aligned(16))
    inputs.register()
    assert captured.tolist() == at
    used = inputs._used
    inputs.unshare(x)
    assert inputs.find(x.data_ptr(), x.nbytes) is None
    assert len(driver.opened) == mesh.num_ranks - 1, "a graph still reads it"
    y = aligned(1024)
    inputs.share(y)
    assert len(driver.opened) == 2 * (mesh.num_ranks - 1)
    row = inputs.add(x)
    assert row.tolist() == [0] * mesh.num_ranks, "rows that come back are empty"
    assert inputs._used == used
    inputs.forget()
    inputs.unshare(y)
    assert len(driver.opened) == mesh.num_ranks - 1
    inputs.close()
    assert driver.opened == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_of_shared_and_captured_inputs(num_ranks: int) -> None:
    run_ranks(num_ranks, shared)


def kept(mesh: Mesh) -> None:
    inputs, _ = made(mesh)
    addresses = set()
    for _ in range(20):
        x = torch.zeros(1 << 20)
        addresses.add(x.data_ptr())
        inputs.share(x)
        del x
    assert len(addresses) == 20, "what is shared is kept, so nothing else comes to lie there"


def test_what_is_shared_is_kept_alive() -> None:
    run_ranks(2, kept)


def refused(mesh: Mesh) -> None:
    inputs, driver = made(mesh)
    x = aligned(1024)
    for wrong, why in (
        (x[:16] if mesh.rank else x, "rank 1 shares 16 x float32, rank 0 1024 x float32; all ranks"),
        (x[1:] if mesh.rank else x, "rank 1 cannot share 1023 x float32: it does not begin on a mul"),
        (x.view(32, 32).t(), "rank 0 cannot share 1024 x float32: it is empty, or not contiguous"),
        (x[:0], "it is empty, or not contiguous"),
    ):
        with pytest.raises(ConfigError, match=why):
            inputs.share(wrong)
    inputs.share(x)
    with pytest.raises(ConfigError, match="it overlaps one that is shared"):
        inputs.share(x[512:])
    y = aligned(16)
    inputs.share(y)
    with pytest.raises(ConfigError, match="were shared: rank 0 tensor 1, rank 1 tensor 2"):
        inputs.unshare(y if mesh.rank else x)
    with pytest.raises(ConfigError, match="were shared: rank 0 one that is not, rank 1 tensor 2"):
        inputs.unshare(y if mesh.rank else y.clone())
    if mesh.rank:
        driver.refuses = True
    why = "rank 1 cannot share its inputs: no name with code 1; leave expandable_segments out of PYTORCH_"
    with pytest.raises(CommError, match=why):
        inputs.share(aligned(16))
    assert inputs.find(x.data_ptr(), x.nbytes) is not None
    assert len(inputs.starts) == 2


def test_all_ranks_are_told_what_cannot_be_shared() -> None:
    run_ranks(2, refused)


def too_many(mesh: Mesh) -> None:
    shared_inputs.MAX_ROWS = 4
    inputs, _ = made(mesh)
    for _ in range(4):
        inputs.add(torch.zeros(4))
    with pytest.raises(CommError, match=r"4 reductions read their inputs where they lie.*unshare\(\)"):
        inputs.add(torch.zeros(4))


def test_rows_end_with_an_error() -> None:
    run_ranks(2, too_many)
