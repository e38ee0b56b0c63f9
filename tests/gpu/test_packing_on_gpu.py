"""Packed documents on a GPU: flex attention's loss and gradients against the definition, and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.ops.attention_blocks import document_blocks
from moeclipse.testing.compare import difference
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from pieces import join, reduced

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def learner_of(folder: Path, device: str, **changes: Any) -> Learner:
    rng = np.random.default_rng(0)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(300):
            text = "".join(chr(c) for c in rng.integers(97, 123, rng.integers(1, 300)))
            file.write(json.dumps({"text": text}) + "\n")
    keys = {
        "model.num_layers": 2,
        "model.d_model": 128,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 64,
        "model.vocab_size": 257,
        "moe.num_experts": 4,
        "moe.d_ff": 64,
        "data.files": (str(folder / "a.jsonl"),),
        "data.documents": "packed",
        "data.seq_len": 256,
        "data.batch_size": 4,
        "eval.share": 0.2,
        **changes,
    }
    return Learner(with_values(TrainConfig(), keys), Mesh.single(device))


def test_gradients_against_float64(tmp_path: Path) -> None:
    exact = learner_of(tmp_path, "cuda", **{"model.dtype": "float64"})
    right_loss = float(exact.backward(0)["loss"])
    right = join([reduced(exact)])
    found = learner_of(tmp_path, "cuda", **{"model.dtype": "float32"})
    loss = float(found.backward(0)["loss"])
    assert loss == pytest.approx(right_loss, rel=1e-3)
    for name, value in join([reduced(found)]).items():
        assert difference(value.double(), right[name]) < 2e-2, name


def test_steps_and_evaluation_run_in_bf16(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, "cuda", **{"model.dtype": "bfloat16", "optim.lr": 1e-3})
    assert learner.graphs is None, "documents are others in every microbatch"
    losses = [learner.step(step)["loss"] for step in range(8)]
    assert losses[-1] < losses[0]
    assert learner.evaluate(100)["eval_loss"] == pytest.approx(losses[-1], rel=0.2)


def test_layers_share_the_blocks_of_a_microbatch() -> None:
    documents = torch.zeros(2, 256, dtype=torch.int64, device="cuda")
    assert document_blocks(documents, 0) is document_blocks(documents, 0)
    assert document_blocks(documents.clone(), 0) is not document_blocks(documents, 0)
