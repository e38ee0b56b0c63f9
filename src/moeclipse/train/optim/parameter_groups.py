"""Which parameters of a model are trained, and how fast: `optim.frozen` and `optim.lr_factors` by name.

A pattern picks every name that it occurs in; `*` stands for anything. Names are those of the model's
parameters (`layers.3.moe.gate.weight`), the same in any layout, and a stack of experts has one name. What a
gate adapts without gradients (its selection bias) has a name, too, and stands still where that is frozen.

Contract: collective over stages, and all ranks find the same faults: a pattern that picks nothing, and
patterns that leave nothing to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.core.values import nearest
from moeclipse.model.lora_config import NO_LORA, LoraConfig, is_adapter
from moeclipse.moe.layer import MoE
from moeclipse.train.optim.optim_config import OptimConfig, factor_of, picks


@dataclass(frozen=True, kw_only=True)
class ParameterGroups:
    """What a configuration says of names."""

    frozen: tuple[str, ...] = ()
    factors: tuple[tuple[str, float], ...] = ()
    adapters_only: bool = False
    """All else is frozen, too (`model/lora`)."""

    @classmethod
    def of(cls, optim: OptimConfig, lora: LoraConfig = NO_LORA) -> ParameterGroups:
        factors = tuple(map(factor_of, optim.lr_factors))
        return cls(frozen=optim.frozen, factors=factors, adapters_only=lora.rank > 0)

    def is_frozen(self, name: str) -> bool:
        if self.adapters_only and not is_adapter(name):
            return True
        return any(picks(pattern, name) for pattern in self.frozen)

    def lr_factor(self, name: str) -> float:
        """Of the first pattern that picks it."""
        return next((factor for pattern, factor in self.factors if picks(pattern, name)), 1.0)

    def problems_of(self, model: nn.Module) -> list[str]:
        """Of a whole model, in one process."""
        kept = set(model.state_dict())
        buffers = [name for name, _ in model.named_buffers() if name in kept]
        return list(self._problems([name for name, _ in model.named_parameters()], buffers))

    def apply(self, model: nn.Module, mesh: Mesh) -> None:
        """Frozen parameters want no gradient from here on. Collective over stages."""
        if not (self.frozen or self.factors or self.adapters_only):
            return
        kept = set(model.state_dict())
        mine = [name for name, _ in model.named_parameters()]
        told = [mine, [name for name, _ in model.named_buffers() if name in kept]]
        everyone = mesh.gather_objects(told) if mesh.pp > 1 else [told]
        parameters, buffers = (
            list(dict.fromkeys(name for rank in everyone for name in rank[kind])) for kind in (0, 1)
        )
        if lines := list(self._problems(parameters, buffers)):
            raise ConfigError(lines)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.is_frozen(name))

    def adapting(self, layers: Mapping[int, MoE]) -> dict[int, MoE]:
        """Those whose gates may move what they adapt."""
        return {
            number: moe
            for number, moe in layers.items()
            if not self.is_frozen(f"layers.{moe.layer}.moe.gate.bias_E")
        }

    def _problems(self, parameters: Sequence[str], buffers: Sequence[str]) -> Iterator[str]:
        given = [("frozen", pattern, [*parameters, *buffers]) for pattern in self.frozen]
        given += [("lr_factors", pattern, list(parameters)) for pattern, _ in self.factors]
        for key, pattern, names in given:
            if not any(picks(pattern, name) for name in names):
                yield f"optim.{key}: {pattern!r} picks no parameter; {near(pattern, names)}"
        if all(self.is_frozen(name) for name in parameters):
            yield f"optim.frozen ({list(self.frozen)}) leaves nothing to train; freeze less"


def near(pattern: str, names: Sequence[str]) -> str:
    """Names, or parts of them, that are like a pattern."""
    words = dict.fromkeys(word for name in names for word in (*name.split("."), name) if not word.isdigit())
    close = nearest(pattern.replace("*", ""), words)
    if close:
        return f"did you mean {close!r}?"
    return f"names are such as {', '.join(names[:2])}"
