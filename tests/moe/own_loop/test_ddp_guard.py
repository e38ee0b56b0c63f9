"""Wrappers that were told about experts pass; others are named. On ranks: tests/own_loop."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.own_loop.guards import averaged_text, refuse_wrong_wrap, wrapping
from moeclipse.testing.run_ranks import run_ranks


def sharded(mesh: Mesh) -> list[bool]:
    """Whether each of three modules is refused: one that is cut, one inside, one that was left out."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    cut, left = model
    refuse_wrong_wrap(model)
    before = wrapping(model)
    over = DeviceMesh("cpu", list(range(mesh.num_ranks)))
    fully_shard(model, mesh=over, ignored_params=set(left.parameters()))
    assert wrapping(model) != before
    found = []
    for module in (cut, cut[0], left):
        try:
            refuse_wrong_wrap(module)
            found.append(False)
        except ConfigError as error:
            found.append("ignored_params=moeclipse.expert_parameters(model)" in str(error))
    return found


def test_modules_whose_parameters_were_cut_are_refused() -> None:
    assert run_ranks(2, sharded) == [[True, True, False]] * 2


def test_the_text_says_what_to_do() -> None:
    assert "DDP(moeclipse.exclude_experts(model))" in averaged_text("moe.experts.up")
