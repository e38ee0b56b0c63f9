"""No word to the host inside a step of one rank: who asks for a number of the device is named by its line.

On the CPU the step runs with the one node that kernels have (`MoE.fused`), and every operation that would
stop the host on a GPU is written down with the line it comes from. References are left out: where there is a
GPU their kernels run; and so is the reading of a corpus, which stays on the host. What torch.cuda itself has
to say stands in tests/gpu/test_host_words_on_gpu.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

SOURCE = str(Path(moeclipse.__file__).parent)
WORDS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::bincount",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::lift_fresh",  # a tensor of numbers that the host has
}
SMALL: dict[str, Any] = {
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.d_model": 16,
    "model.head_dim": 8,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "moe.num_experts": 4,
    "moe.d_ff": 16,
    "moe.num_shared_experts": 1,
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.accumulate": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model.dtype": "bfloat16"},
    "biases that move": {"gate.kind": "sigmoid", "gate.bias_rate": 0.01, "gate.z_loss": 0.1},
    "gated shared experts": {"moe.shared_gate": True, "moe.expert_bias": True},
    "norms of heads": {"model.qk_norm": "head", "model.tie_embeddings": True},
}


class Words(TorchDispatchMode):
    """Operations that a GPU would have to stop for, and the lines of ours that they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        by_mask = name.startswith("aten::index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for argument in args
            if isinstance(argument, list | tuple)
            for index in argument
        )
        if name in WORDS or by_mask:
            self._note(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def of_methods(self) -> Iterator[None]:
        """Also those that a tensor on the CPU answers without an operation."""
        usual = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}

        def heard(name: str) -> Callable[..., Any]:
            def call(tensor: torch.Tensor, *args: Any) -> Any:
                self._note(name)
                return usual[name](tensor, *args)

            return call

        for name in usual:
            setattr(torch.Tensor, name, heard(name))
        yield
        for name, method in usual.items():
            setattr(torch.Tensor, name, method)

    def _note(self, name: str) -> None:
        frame, ours = sys._getframe(2), []
        while frame is not None:
            code = frame.f_code
            if code.co_name.endswith("_reference") or code.co_filename.endswith("train/data/samples.py"):
                return
            if code.co_filename.startswith(SOURCE):
                ours.append(f"{Path(code.co_filename).relative_to(SOURCE)}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        self.found.append(f"{name} in {' < '.join(ours)}")


def words_of(mesh: Mesh, changes: dict[str, Any], corpus: str) -> list[str]:
    config = with_values(TrainConfig(), {**SMALL, "data.files": (corpus,), **changes})
    learner = Learner(config, mesh)
    for layer in learner.layers:
        layer.fused = True
    learner.step(0)
    with Words() as words, words.of_methods():
        sums = learner.backward(1)
        shards = [bucket.reduced() for bucket in learner.buckets]
        squares = learner.optim.sum_of_squares(shards)
        learner.optim.update(shards, 1e-3, (squares + 0 * sums["loss"]).sqrt())
    return words.found


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_one_rank_asks_for_nothing(case: str) -> None:
    corpus = str(Path(__file__).with_name("text.txt"))
    assert run_alone(words_of, CASES[case], corpus) == []


def test_words_are_heard() -> None:
    with Words() as words, words.of_methods():
        x = torch.arange(4)
        x.sum().item()
        x[x > 1]
        torch.bincount(x)
        torch.tensor([1, 2])
        int(x[0])
        x.tolist()
    names = [line.split(" ")[0] for line in words.found]
    assert names == [
        "aten::_local_scalar_dense",
        "aten::index",
        "aten::bincount",
        "aten::lift_fresh",
        "aten::_local_scalar_dense",
        "tolist",
    ]
