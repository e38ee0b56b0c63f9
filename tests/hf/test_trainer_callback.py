"""What the callback does between a Trainer and the experts; `tests/test_examples.py` trains with both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from test_implementation import ids
from test_share import loss_of, made

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.hf.trainer_callback import ExpertCallback
from moeclipse.testing.run_ranks import run_ranks


def arguments(**given: Any) -> Any:
    return SimpleNamespace(**{"save_strategy": "no", "max_grad_norm": 0.25, "output_dir": "", **given})


def test_saving_by_rank_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'save_strategy="no" and give ExpertCallback\(save_every=STEPS\)'):
        ExpertCallback().on_train_begin(arguments(save_strategy="steps"), None, None)


def one_step(mesh: Mesh, folder: Path) -> None:
    model, args = made("mixtral", mesh), arguments(output_dir=str(folder))
    wrapped = moeclipse.parallelize(model, mesh, dense="ddp")  # as Trainer does
    callback = ExpertCallback(save_every=2)
    for _ in range(2):  # a second training with the same callback clips as the first
        callback.on_train_begin(args, None, None, model=model)
        assert args.max_grad_norm == 0, "Trainer would clip before gradients are whole"
        loss_of(wrapped, ids(mesh.rank)).backward()
        callback.on_pre_optimizer_step(args, None, None, model=model)
        norm = moeclipse.clip_grad_norm_(model, float("inf"))
        assert abs(float(norm) - 0.25) < 1e-4
        model.zero_grad()
        callback.on_train_end(args, None, None, model=model)
        assert args.max_grad_norm == 0.25
    for step in (1, 2):
        callback.on_step_end(args, SimpleNamespace(global_step=step), None, model=model)
    assert not (folder / "checkpoint-1").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2", dtype=torch.float64)
    assert again.state_dict().keys() == moeclipse.full_state_dict(model).keys()


def test_gradients_are_finished_clipped_and_models_saved(tmp_path: Path) -> None:
    run_ranks(2, one_step, tmp_path)
