"""What `parallelize` hands to DDP and FSDP2; the numbers are compared in tests/own_loop."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.parallelize import parallelize
from moeclipse.testing.run_ranks import run_ranks


def model(mesh: Mesh | None) -> nn.Module:
    gate = GateConfig(top_k=2, choose="gap")
    return nn.Sequential(OrderedDict(dense=nn.Linear(4, 4), moe=MoE(4, 4, 4, gate=gate, mesh=mesh)))


def under_ddp(mesh: Mesh) -> list[str]:
    wrapped: Any = parallelize(model(mesh), mesh, dense="ddp", gradient_as_bucket_view=True)
    assert wrapped.gradient_as_bucket_view
    return sorted(wrapped.parameters_to_ignore)


def test_ddp_leaves_experts_and_counters_alone() -> None:
    expected = ["moe.experts.down", "moe.experts.up", "moe.gate.dynamic.seen_3", "moe.load_E"]
    assert run_ranks(2, under_ddp) == [expected] * 2


def under_fsdp2(mesh: Mesh) -> list[str]:
    wrapped = parallelize(model(mesh), mesh, dense="fsdp2", reshard_after_forward=False)
    return sorted(name for name, p in wrapped.named_parameters() if not isinstance(p, DTensor))


def test_fsdp2_cuts_all_but_experts() -> None:
    assert run_ranks(2, under_fsdp2) == [["moe.experts.down", "moe.experts.up"]] * 2


@apart
def test_one_rank_needs_no_wrapper() -> None:
    made = model(None)
    assert parallelize(made, Mesh.single(), dense="ddp") is made
    assert parallelize(made, Mesh.single(), dense="fsdp2") is made


@apart
def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be 'ddp', 'fsdp2' or None"):
        parallelize(model(None), Mesh.single(), dense="zero")  # type: ignore[arg-type]
