"""What a model with adapters is made of: how each group of tensors is kept, and what of it is trained.

    weights of this rank: 31.4 MiB in 212 tensors, 1.2 MiB of them trained
      experts' up         96  nf4           96 adapted     18.1 MiB
      attention           32  bfloat16      16 adapted      6.0 MiB
      adapters            84  bfloat16      trained         1.2 MiB

Every parameter of the rank is in one of the groups, so nothing is left out of quantising, adapting or
training without a line that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from moeclipse.model.lora_config import LoraConfig, is_adapter
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.ops.frozen import Frozen
from moeclipse.train.step.memory_bytes import readable

GROUPS = (
    ("adapters", re.compile(r"lora_")),
    ("norms", re.compile(r"norm\.weight$")),
    ("experts' up", re.compile(r"\.moe\.experts\.up")),
    ("experts' down", re.compile(r"\.moe\.experts\.down")),
    ("shared experts", re.compile(r"\.moe\.shared\.")),
    ("gates", re.compile(r"\.moe\.gate\.")),
    ("attention", re.compile(r"\.attention\.")),
    ("dense layers", re.compile(r"\.dense\.")),
    ("embedding, head", re.compile(r"")),
)
"""The first that a name holds is its group."""


@dataclass(kw_only=True)
class WeightGroup:
    tensors: int = 0
    trained: int = 0
    adapted: int = 0
    nbytes: int = 0
    trained_bytes: int = 0
    kinds: dict[str, None] = field(default_factory=dict)

    def state(self) -> str:
        if self.trained == self.tensors:
            return "trained"
        known = [f"{self.trained} trained"] if self.trained else []
        known += [f"{self.adapted} adapted"] if self.adapted else []
        return ", ".join(known) or "frozen"


def groups_of(model: nn.Module) -> dict[str, WeightGroup]:
    """In the order of `GROUPS`; those that have tensors."""
    frozen = {name: part for name, part in model.named_modules() if isinstance(part, Frozen)}
    stacks = {
        f"{name}.experts." if name else "experts.": layer.experts.ids for name, layer in moe_layers(model)
    }
    adapted = {matrix for name, _ in model.named_parameters() if is_adapter(name) for matrix in beside(name)}
    found = {name: WeightGroup() for name, _ in GROUPS}
    seen: set[str] = set()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        matrix = owner if owner in frozen else name
        group = found[next(title for title, pattern in GROUPS if pattern.search(matrix))]
        group.nbytes += parameter.nbytes
        group.trained_bytes += parameter.nbytes if parameter.requires_grad else 0
        if matrix in seen:
            continue
        seen.add(matrix)
        count = next((len(ids) for prefix, ids in stacks.items() if matrix.startswith(prefix)), 1)
        group.tensors += count
        group.trained += count if parameter.requires_grad else 0
        group.adapted += count if matrix in adapted else 0
        kind = frozen[matrix].kind if matrix in frozen else str(parameter.dtype).removeprefix("torch.")
        group.kinds[kind] = None
    return {name: group for name, group in found.items() if group.tensors}


def beside(adapter: str) -> Iterator[str]:
    """The matrix that a parameter of an adapter adds to."""
    if (one := re.fullmatch(r"(.*)\.adapters\.lora_(\w+)\.[ab]\.weight", adapter)) is not None:
        yield f"{one[1]}.{one[2]}.weight"
    elif (one := re.fullmatch(r"(.*\.experts)\.lora_(up|down)_[ab]", adapter)) is not None:
        yield f"{one[1]}.{one[2]}"


def weights_told(model: nn.Module, lora: LoraConfig) -> list[str]:
    """The table as one note, where a model has adapters."""
    return ["\n".join(weight_lines(model))] if lora.rank else []


def weight_lines(model: nn.Module) -> list[str]:
    """The table; a line for each group."""
    found = groups_of(model)
    total, trained = (sum(getattr(g, n) for g in found.values()) for n in ("nbytes", "trained_bytes"))
    count = sum(group.tensors for group in found.values())
    rows = [
        (name, str(group.tensors), ", ".join(group.kinds), group.state(), readable(group.nbytes))
        for name, group in found.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = f"weights of this rank: {readable(total)} in {count} tensors, {readable(trained)} of them trained"
    return [head] + [
        f"  {name:<{widths[0]}}  {tensors:>{widths[1]}}  {kinds:<{widths[2]}}  {state:<{widths[3]}}  "
        f"{size:>{widths[4]}}"
        for name, tensors, kinds, state, size in rows
    ]
