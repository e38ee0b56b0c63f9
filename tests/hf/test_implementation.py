"""`experts_implementation="moeclipse"` in models that transformers builds: its logits, its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import TINY, build, in_float64

import moeclipse.hf
from moeclipse.comm.mesh import Mesh
from moeclipse.hf.foreign_experts import activation_of, is_experts
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

MODELS = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"]
MORE = sorted(set(TINY) - {*MODELS, "llama4_text"})  # whose experts cannot be chosen


def ids(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randint(48, (rows, 8), generator=torch.Generator().manual_seed(seed))


def outcome(model: Any, how: str) -> dict[str, torch.Tensor]:
    model.set_experts_implementation(how)
    model.zero_grad()
    tokens = ids()
    logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return grads | {"logits": logits.detach()}


def both(_: Mesh, model_type: str) -> int:
    moeclipse.hf.register()
    moeclipse.hf.register()
    with in_float64():
        model = build(model_type).double()
        expected = outcome(model, "eager")
        moe_layers = sum(type(part).__name__.endswith("Experts") for part in model.modules())
        assert moeclipse.hf.num_experts_layers(model) == 0
        for _ in range(2):
            found = outcome(model, "moeclipse")
            assert found.keys() == expected.keys()
            bad = {name: difference(found[name], expected[name]) for name in expected}
            assert all(value <= 1e-12 for value in bad.values()), bad
    assert moeclipse.hf.num_experts_layers(model) == moe_layers
    return moe_layers


@pytest.mark.parametrize(
    "model_type", [*MODELS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_logits_and_gradients_are_those_of_eager(model_type: str) -> None:
    assert run_alone(both, model_type) > 0


def round_trip(_: Mesh, folder: Path) -> None:
    moeclipse.hf.register()
    model = build("qwen3_moe")
    model.set_experts_implementation("moeclipse")
    model.save_pretrained(folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="moeclipse", attn_implementation="eager"
    )
    assert moeclipse.hf.num_experts_layers(again) == 2
    assert torch.equal(model(input_ids=ids()).logits, again(input_ids=ids()).logits)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain.set_experts_implementation("eager")
    assert moeclipse.hf.num_experts_layers(plain) == 0
    generated = again.generate(ids()[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(
        generated, plain.generate(ids()[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    )


def test_a_model_is_saved_loaded_and_generates(tmp_path: Path) -> None:
    run_alone(round_trip, tmp_path)


def types(_: Mesh) -> None:
    """bf16 models, and autocast over fp32 ones, round as eager does, about."""
    moeclipse.hf.register()
    model = build("mixtral")
    for context, given in (
        (torch.autocast("cpu", torch.bfloat16), model),
        (torch.no_grad(), build("mixtral").bfloat16()),
    ):
        with context:
            given.set_experts_implementation("eager")
            expected = given(input_ids=ids()).logits
            given.set_experts_implementation("moeclipse")
            found = given(input_ids=ids()).logits
        assert found.dtype == expected.dtype
        assert difference(found.float(), expected.float()) < 0.05


def test_half_precision_and_autocast() -> None:
    run_alone(types)


def without(_: Mesh) -> None:
    """An activation that is not ours goes to transformers' own products; a number too high is no expert."""
    moeclipse.hf.register()
    model = build("mixtral", hidden_act="gelu_pytorch_tanh", intermediate_size=8)  # their products want it
    model.set_experts_implementation("eager")
    expected = model(input_ids=ids()).logits
    model.set_experts_implementation("moeclipse")
    assert moeclipse.hf.num_experts_layers(model) == 0
    assert difference(model(input_ids=ids()).logits, expected) < 1e-5
    experts = next(module for module in build("mixtral").modules() if is_experts(module))
    assert activation_of(experts) == "swiglu"
    experts.config._experts_implementation = "moeclipse"
    x, scores = torch.randn(2, 16), torch.tensor([[0.5, 0.5], [1.0, 7.0]])
    experts._is_expert_parallel = True
    y = experts(x, torch.tensor([[0, 1], [2, 4]]), scores)
    alone = experts(x[1:], torch.tensor([[2]]), torch.ones(1, 1))
    assert torch.allclose(y[1:], alone, atol=1e-6)


def test_what_is_not_ours_is_left_to_transformers() -> None:
    run_alone(without)


def compiled(_: Mesh) -> None:
    """One graph, the same numbers."""
    moeclipse.hf.register()
    model = build("qwen3_moe")
    model.set_experts_implementation("moeclipse")
    expected = model(input_ids=ids(), use_cache=False).logits
    expected.sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = call(input_ids=ids(), use_cache=False).logits
    found.sum().backward()
    assert difference(found, expected) < 1e-6
    assert all(difference(p.grad, grads[name]) < 1e-5 for name, p in model.named_parameters())


@pytest.mark.full
def test_a_model_is_compiled_in_one_graph() -> None:
    run_alone(compiled)
