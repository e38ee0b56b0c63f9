"""What two runs must have in common, and in words where they differ.

A fingerprint is a nested, JSON-able dict. `differences` compares the one a checkpoint holds with the one
of this run and names every field that differs, so that no one has to diff two files by hand.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from moeclipse.core.config import to_flat
from moeclipse.core.renames import with_new_names
from moeclipse.moe.config import SHAPE_KEYS, STYLE_KEYS, MoEConfig
from moeclipse.train.config import TrainConfig


def fingerprint_of(config: TrainConfig, dtype: torch.dtype) -> dict[str, dict[str, object]]:
    """Of a model: what a checkpoint must have in common with a run that continues it."""
    model: dict[str, object] = {**asdict(config.model), "dtype": str(dtype).removeprefix("torch.")}
    del model["from_hf"]  # where weights came from, not what they are
    # How experts are placed and rows exchanged is the layout's business.
    moe: dict[str, object] = {name: getattr(config.moe, name) for name in SHAPE_KEYS}
    usual = MoEConfig()
    moe |= {
        name: value for name in STYLE_KEYS if (value := getattr(config.moe, name)) != getattr(usual, name)
    }
    gate: dict[str, object] = {"kind": config.gate.kind}
    if config.gate.choose != "top_k":
        held = " with gate.mean_experts" if config.gate.mean_experts else ""
        gate["choose"] = f"{config.gate.choose}{held}"
    if config.gate.logit_bias:
        gate["logit_bias"] = "true"
    return {"model": model, "moe": moe, "gate": gate, **config.lora.fingerprint()}


def as_json(value: Mapping[str, object]) -> dict[str, object]:
    """`value` as it comes back from a JSON file: tuples become lists, keys become strings."""
    found: dict[str, object] = json.loads(json.dumps(value))
    return found


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, leaf) of every leaf; an empty mapping is a leaf of its own."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
        else:
            yield name, value


def in_present_terms(
    stored: Mapping[str, Any], expected: Mapping[str, object], usual: object
) -> dict[str, Any]:
    """A stored fingerprint as the present version would have written it.

    Renamed keys get their present names. A key that came later stands in `expected` alone; what was before
    it is its default, so it gets that of `usual`, a configuration with nothing but defaults.
    """
    found = copy.deepcopy(with_new_names(type(usual), stored))
    defaults = to_flat(usual)
    for name, _ in flatten(as_json(expected)):
        section, _, key = name.rpartition(".")
        if found.get(section) and key not in found[section] and name in defaults:
            found[section][key] = defaults[name]
    return found


def differences(found: Mapping[str, object], expected: Mapping[str, object], prefix: str = "") -> list[str]:
    """One line per field that differs: `model.d_model is 128 in the checkpoint, 256 in this run`."""
    old = dict(flatten(as_json(found), prefix))
    new = dict(flatten(as_json(expected), prefix))
    lines = []
    for name in [*new, *(name for name in old if name not in new)]:
        if name not in old:
            lines.append(f"{name} is absent from the checkpoint, {new[name]!r} in this run")
        elif name not in new:
            lines.append(f"{name} is {old[name]!r} in the checkpoint, absent from this run")
        elif old[name] != new[name]:
            lines.append(f"{name} is {old[name]!r} in the checkpoint, {new[name]!r} in this run")
    return lines
