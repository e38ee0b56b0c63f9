"""Adapters of peft beside experts that our kernels compute, in loops and trainers that are not ours.

peft adds B A to W for each forward and hands the sum on, so every call below must reach `grouped_experts`
with a weight that wants a gradient: where one goes elsewhere, its numbers may agree all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_implementation import ids
from test_share import made
from tiny_models import TINY, build, in_float64, peft

import moeclipse.hf
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.hf import implementation
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

STEPS = 2
MODELS = ("qwen3_moe", "gpt_oss")
MORE = sorted(set(TINY) - {*MODELS, "llama4_text"})  # whose experts cannot be chosen
BLOCKS = {"granitemoe": "block_sparse_moe", "lfm2_moe": "feed_forward"}
"""What holds the experts, where it is not `mlp`; of families whose names begin so."""
Values = dict[str, torch.Tensor]


def lora(model_type: str, **options: Any) -> peft.LoraConfig:
    block = next((name for family, name in BLOCKS.items() if model_type.startswith(family)), "mlp")
    given = {"target_modules": [], "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, **options}
    parameters = [f"{block}.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    return peft.LoraConfig(**{"target_parameters": parameters, **given})


def filled(model: Any) -> Any:
    """B that is not zero."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(0.3 * random)
    return model


def wrapped(model_type: str, how: str) -> Any:
    model = build(model_type).double()
    model.set_experts_implementation(how)
    return filled(peft.get_peft_model(model, lora(model_type)).double())


def seen_by_us(compute: Callable[[], Values]) -> tuple[Values, int]:
    """What it returns, and how many calls of ours took weights that want a gradient."""
    calls, ours = [], implementation.grouped_experts

    def spy(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(all(weight.requires_grad for weight in given[3:5]))
        return ours(*given, **options)

    implementation.grouped_experts = spy
    try:
        return compute(), sum(calls)
    finally:
        implementation.grouped_experts = ours


def loop(how: str, model_type: str) -> Values:
    model, tokens = wrapped(model_type, how), ids()
    logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert moeclipse.hf.num_experts_layers(model) == (0 if how == "eager" else expert_layers(model))
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and grad.abs().max() > 0 for name, grad in grads.items())
    assert len(grads) == 4 * expert_layers(model)
    return grads | {"logits": logits.detach(), "layers": torch.tensor(expert_layers(model))}


def expert_layers(model: Any) -> int:
    """As transformers has built it."""
    return sum(type(part).__name__.endswith("Experts") for part in model.modules())


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    """Plain descent: Adam would hide a factor. The second step starts from what the first changed."""
    given = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    given |= {
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "save_strategy": "no",
        "report_to": "none",
    }
    given |= {"use_cpu": True, "disable_tqdm": True, "seed": 1, "dataloader_pin_memory": False}
    return kind(output_dir=str(folder), **given, **more)


def result(trainer: Any) -> Values:
    loss = trainer.train().training_loss
    changed = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return changed | {"loss": torch.tensor(loss), "layers": torch.tensor(expert_layers(trainer.model))}


def under_trainer(how: str, folder: Path, model_type: str) -> Values:
    data = [{"input_ids": row, "labels": row} for row in ids(rows=6)]
    model = wrapped(model_type, how)
    return result(
        transformers.Trainer(
            model=model, args=arguments(transformers.TrainingArguments, folder), train_dataset=data
        )
    )


def under_sft_trainer(how: str, folder: Path) -> Values:
    """TRL wraps the model by peft itself."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(n): n for n in range(48)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    rows = datasets.table.InMemoryTable.from_pydict({"input_ids": ids(rows=6).tolist()})
    data = datasets.Dataset(rows, fingerprint="ids")
    model = build("qwen3_moe").double()
    model.set_experts_implementation(how)
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments(
            trl.SFTConfig,
            folder,
            bf16=False,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=lora("qwen3_moe"),
    )
    filled(trainer.model.double())
    return result(trainer)


def both(_: Mesh, compute: Callable[..., Values], *given: Any) -> float:
    """eager's numbers are ours; returns how many calls were ours, for each layer with experts."""
    moeclipse.hf.register()
    with in_float64():
        expected, none = seen_by_us(lambda: compute("eager", *given))
        found, calls = seen_by_us(lambda: compute("moeclipse", *given))
    assert none == 0
    assert found.keys() == expected.keys()
    apart = {name: difference(found[name], expected[name]) for name in expected}
    assert max(apart.values()) <= 1e-12, apart
    return calls / int(expected["layers"])


EACH = pytest.mark.parametrize(
    "model_type", [*MODELS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)


@EACH
def test_a_plain_loop(model_type: str) -> None:
    assert run_alone(both, loop, model_type) == 1


@EACH
def test_the_trainer_of_transformers(tmp_path: Path, model_type: str) -> None:
    assert run_alone(both, under_trainer, tmp_path, model_type) == STEPS


@pytest.mark.full
def test_the_trainer_of_trl(tmp_path: Path) -> None:
    assert run_alone(both, under_sft_trainer, tmp_path) == STEPS


def over_ranks(mesh: Mesh) -> None:
    """An adapter of one rank's experts would be averaged with another's, or be of experts elsewhere."""
    with in_float64():
        model = made("mixtral", mesh)
        adapted = peft.get_peft_model(model, lora("mixtral"))
        with pytest.raises(ConfigError, match=r"adapters of peft .* moeclipse train --lora\.rank"):
            adapted(input_ids=ids())
        other = wrapped("mixtral", "moeclipse")
        with pytest.raises(ConfigError, match=r"adapters of peft .* moeclipse train --lora\.rank"):
            moeclipse.hf.share_experts(other, mesh)


def test_experts_on_several_ranks_refuse_them() -> None:
    run_ranks(2, over_ranks)
