"""Configurations as transformers writes them, in our keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import COMMON, TINY

from moeclipse.core.config import problems_of, with_values
from moeclipse.hf.families import FAMILIES
from moeclipse.hf.read import contradictions, read_config
from moeclipse.train.config import TrainConfig


def theirs(model_type: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model, as it is saved."""
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **TINY[model_type], **changes})
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def read(model_type: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return read_config(theirs(model_type, tmp_path, **changes), "here").values


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_family_gives_a_sound_configuration(family: Any, tmp_path: Path) -> None:
    values = read(family.model_type, tmp_path)
    config = with_values(TrainConfig(), values)
    assert list(problems_of(config.model, "model.")) == []
    assert list(problems_of(config.moe, "moe.")) == []
    assert list(problems_of(config.gate, "gate.")) == []
    assert list(contradictions(values, config, "here")) == []
    other = with_values(config, {"model.d_model": 17})
    assert list(contradictions(values, other, "here")) == [
        "model.d_model (17) contradicts here/config.json, which says 16; leave it out"
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family: Any, tmp_path: Path) -> None:
    """A file that names the model's type and nothing else reads as the full one that transformers writes."""
    config = transformers.AutoConfig.for_model(family.model_type)
    for key in ("num_experts_per_tok", "n_routed_experts", "n_shared_experts"):  # of some there is no default
        if getattr(config, key, 1) is None:
            setattr(config, key, 2)
    if family.model_type == "lfm2_moe":
        config.layer_types = ["full_attention", "conv"] * (config.num_hidden_layers // 2)
    config.save_pretrained(tmp_path)
    full = json.loads((tmp_path / "config.json").read_text())
    needed = {"model_type", *read_keys(family)}
    short = {key: value for key, value in full.items() if key in needed or key not in family.defaults}
    assert read_config(short, "here").values == read_config(full, "here").values


def read_keys(family: Any) -> list[str]:
    return list(family.keys.values())
