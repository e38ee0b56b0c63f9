"""The private names of torch that this room uses do what is said of them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.private_torch import ignore_in_ddp, ignored_by_ddp
from moeclipse.testing.run_ranks import run_ranks


def wrapped(mesh: Mesh) -> list[bool]:
    """Whether the ranks hold the same: DDP makes parameters alike that it was not told to ignore."""
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "experts": nn.Linear(3, 3)})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0 + mesh.rank)
    assert ignored_by_ddp(model) == set()
    ignore_in_ddp(model, {"experts.weight", "experts.bias"})
    assert ignored_by_ddp(model) == {"experts.weight", "experts.bias"}
    DistributedDataParallel(model)
    return [bool((model[name].weight == 1).all()) for name in ("dense", "experts")]


def test_what_is_ignored_stays_as_it_is() -> None:
    assert run_ranks(2, wrapped) == [[True, True], [True, False]]
