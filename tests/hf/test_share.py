"""A transformers model whose experts are shared out: gradients of one process, and the whole model again."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from test_implementation import MODELS, ids
from tiny_models import Widened, build, in_float64

import moeclipse
import moeclipse.hf
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.hf.share import share_experts
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

SMART = {"schedule": "smart", "chunks": 2, "group_size": 1}


def made(model_type: str, mesh: Mesh, **exchange: Any) -> Any:
    moeclipse.hf.register()
    model = build(model_type).double()
    model.set_experts_implementation("moeclipse")
    return share_experts(model, mesh, exchange=exchange)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def steps(mesh: Mesh, model_type: str, dense: str | None, exchange: dict[str, Any], again: bool) -> Any:
    """Two clipped steps; each rank has its own rows of the batch."""
    with in_float64():
        shared = made(model_type, mesh, **exchange)
        if again:
            shared.train()
            wide = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Widened())}
            shared.gradient_checkpointing_enable(gradient_checkpointing_kwargs=wide)
        model: Any = moeclipse.parallelize(shared, mesh, dense=dense) if mesh.num_ranks > 1 else shared
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
        losses = []
        for step in range(2):
            tokens = (
                ids(step, rows=4).chunk(mesh.num_ranks)[mesh.rank]
                if mesh.num_ranks > 1
                else ids(step, rows=4)
            )
            loss = loss_of(model, tokens)
            loss.backward()
            moeclipse.sync_gradients(model)
            norm = moeclipse.clip_grad_norm_(model, 0.3)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.detach(), norm]
        return moeclipse.full_state_dict(model), losses


CASES = [
    ("mixtral", "ddp", {}, False),
    ("qwen3_moe", "fsdp2", SMART, False),
    ("olmoe", "ddp", SMART, True),
    ("deepseek_v3", "ddp", {"schedule": "smart"}, False),
    ("gpt_oss", "ddp", SMART, True),
]


@pytest.mark.parametrize(
    ("model_type", "dense", "exchange", "again"),
    [
        pytest.param(*case, marks=[] if case[0] in ("qwen3_moe", "gpt_oss") else pytest.mark.full)
        for case in CASES
    ],
)
def test_two_steps_equal_one_process(model_type: str, dense: str, exchange: Any, again: bool) -> None:
    expected, (_, norm, *_) = run_alone(steps, model_type, None, {}, False)
    for state, losses in run_ranks(2, steps, model_type, dense, exchange, again):
        assert state.keys() == expected.keys()
        bad = {name: difference(state[name], expected[name]) for name in expected}
        assert all(value <= 1e-12 for value in bad.values()), bad
        assert difference(losses[1], norm) < 1e-12
    assert {case[0] for case in CASES} == set(MODELS)


def whole(mesh: Mesh, folder: Path) -> None:
    """Saved whole, loaded whole by transformers, loaded in part from plain tensors, copied, and by DCP."""
    model = made("gpt_oss", mesh)
    expected = model(input_ids=ids()).logits
    moeclipse.hf.save_pretrained(model, folder / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    again.set_experts_implementation("eager")
    assert difference(again(input_ids=ids()).logits, expected) < 1e-6
    with pytest.raises(NotImplementedError, match="full_state_dict"):
        model.save_pretrained(folder / f"wrong{mesh.rank}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(input_ids=ids()).logits, expected)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder / "dcp")
    assert torch.equal(model(input_ids=ids()).logits, expected)
    full = moeclipse.full_state_dict(copied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(full)
    assert torch.equal(model(input_ids=ids()).logits, expected)


def test_the_whole_model_comes_back(tmp_path: Path) -> None:
    run_ranks(2, whole, tmp_path)


def refused(mesh: Mesh) -> list[str]:
    moeclipse.hf.register()
    texts = []
    tanh = build("mixtral", hidden_act="gelu_pytorch_tanh")
    tanh.set_experts_implementation("moeclipse")
    for model in (build("mixtral"), tanh, torch.nn.Linear(2, 2)):
        try:
            share_experts(model, mesh)
        except ConfigError as error:
            texts.append(str(error))
    wrong = torch.distributed.fsdp.fully_shard(made("mixtral", mesh))
    try:
        wrong(input_ids=ids())
    except ConfigError as error:
        texts.append(str(error))
    return texts


def test_what_cannot_be_shared_says_why() -> None:
    for name, activation, none, wrapped in run_ranks(2, refused):
        assert 'experts_implementation="moeclipse"' in name
        assert "computes an activation that we do not have" in activation
        assert "no experts whose implementation can be chosen" in none
        assert "fully_shard cuts expert parameters of different experts" in wrapped


def alone(mesh: Mesh) -> None:
    model = made("mixtral", mesh)
    assert not list(moeclipse.moe.own_loop.standalone.moe_layers(model)), "one rank has all experts"
    assert loss_of(model, ids()).isfinite()


def test_on_one_rank_nothing_is_shared() -> None:
    run_alone(alone)
