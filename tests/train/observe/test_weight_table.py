"""The table of a model with adapters has every parameter in it, and says how each group is kept."""

from __future__ import annotations

from typing import Any

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.model.transformer import Transformer
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.weight_table import groups_of, weight_lines
from moeclipse.train.optim.parameter_groups import ParameterGroups

VALUES: dict[str, Any] = {
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.qk_norm": "head",
    "moe.num_experts": 4,
    "moe.num_shared_experts": 1,
    "moe.shared_gate": True,
    "lora.rank": 4,
    "lora.targets": ("q", "v", "up"),
    "model.base": "nf4",
    "model.dense_base": "fp8",
}


def made(**values: Any) -> Transformer:
    config = with_values(TrainConfig(), {**VALUES, **values})
    model = Transformer(config.model, config.moe, config.gate, mesh=Mesh.single(), lora=config.lora)
    ParameterGroups.of(config.optim, config.lora).apply(model, Mesh.single())
    return model


def test_every_parameter_is_in_a_group() -> None:
    model = made()
    found = groups_of(model)
    told = {name: (group.tensors, list(group.kinds), group.state()) for name, group in found.items()}
    assert told == {
        "adapters": (2 * 2 * 3 + 2 * 2 * 4, ["float32"], "trained"),
        "norms": (2 * 3 + 2 * 3 + 1, ["float32"], "frozen"),
        "experts' up": (2 * 4, ["nf4"], "8 adapted"),
        "experts' down": (2 * 4, ["nf4"], "frozen"),
        "shared experts": (2 * 3, ["float32", "fp8"], "frozen"),
        "gates": (2, ["float32"], "frozen"),
        "attention": (4 * 3, ["fp8"], "6 adapted"),
        "dense layers": (2, ["fp8"], "frozen"),
        "embedding, head": (2, ["float32"], "frozen"),
    }
    assert sum(group.nbytes for group in found.values()) == sum(p.nbytes for p in model.parameters())


def test_the_table_is_short_and_speaks_of_bytes() -> None:
    lines = weight_lines(made())
    assert len(lines) <= 10
    adapters = sum(p.nbytes for n, p in made().named_parameters() if "lora_" in n)
    assert lines[0].startswith("weights of this rank: ")
    assert lines[0].endswith(f"{adapters / 1024:.1f} KiB of them trained")
    (up,) = [line for line in lines if "experts' up" in line]
    size = 8 * (256 * 128 + 512 * 128 // 64 + 4 * 4 + 4)
    assert up.split() == ["experts'", "up", "8", "nf4", "8", "adapted", f"{size / 1024:.1f}", "KiB"]
