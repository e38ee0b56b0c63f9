"""accelerate around a model whose experts are on two ranks: what it would spoil is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import Net, layer, loss_of, tokens

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks


def text_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "no error"


def prepared(mesh: Mesh, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    here = {"RANK": mesh.rank, "LOCAL_RANK": mesh.rank, "WORLD_SIZE": mesh.num_ranks}
    for key, value in (here | {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}).items():  # the group is there
        patch.setenv(key, str(value))
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    made = moeclipse.exclude_experts(Net(layer(mesh=mesh)))
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, tokens(rank=mesh.rank)))
    told = {"step": text_of(optimizer.step)}
    moeclipse.sync_gradients(model)
    told["clip"] = text_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    for name, safe in (("safetensors", True), ("pickle", False)):
        told[name] = text_of(
            lambda name=name, safe=safe: accelerator.save_state(folder / name, safe_serialization=safe)
        )
        assert not list(folder.glob(f"{name}/*.*"))
    accelerator.register_save_state_pre_hook(lambda _models, weights, _folder: weights.clear())
    told["by a hook"] = text_of(lambda: accelerator.save_state(folder / "hook"))
    return told


def test_what_accelerate_does_with_one_ranks_experts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for told in run_ranks(2, prepared, tmp_path, monkeypatch):
        assert "sync_gradients has not finished" in told["step"]
        assert "use moeclipse.clip_grad_norm_(model, max_norm)" in told["clip"]
        for form in ("safetensors", "pickle"):
            assert "save with torch.distributed.checkpoint" in told[form]
        assert told["by a hook"] == "no error"
