"""Any `nn.Module` as an expert.

    MoE(..., experts=lambda expert: MyExpert())            one module for each expert, called with its rows
    MoE(..., experts=joint(lambda ids: MyExperts(ids)))    one module for all of a rank's experts: called with
                                                           all rows, grouped, and the number of rows of each

The adapter keeps autograd's graph of each call between forward and backward (`moe/experts/inner_graph`). It
computes input and weight gradients together, in dgrad, because a module cannot be asked for one alone; wgrad
then only adds them up. The width of what comes out may differ from the width of what goes in (`d_out`).

Modules of one layer must be built alike: a shadow runs in another expert's module with the owner's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from moeclipse.core.errors import ConfigError
from moeclipse.moe.experts.inner_graph import InnerGraph
from moeclipse.moe.experts.protocols import PendingWgrad, Unhooked
from moeclipse.moe.experts.two_projections import add_up
from moeclipse.moe.tokens import Inputs, Structure
from moeclipse.tensor.weight_grad import Grads, accumulator


@dataclass(frozen=True)
class Joint:
    """Marks a factory that makes one module for all experts of a rank."""

    make: Callable[[Sequence[int]], nn.Module]


def joint(make: Callable[[Sequence[int]], nn.Module]) -> Joint:
    """One module for all experts of a rank: module(rows, counts)."""
    return Joint(make)


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One module's run over a part of the rows."""

    graph: InnerGraph
    rows: slice


@dataclass(frozen=True, kw_only=True)
class ModulesSaved:
    """The runs of one forward; `empty` has the inputs' shapes."""

    calls: list[ModuleCall]
    empty: tuple[torch.Tensor, ...]
    structure: Structure
    """How the rows of this forward were given; those of another may be given otherwise."""


@dataclass(frozen=True, kw_only=True)
class ModulesPending:
    """Weight gradients, a `PendingWgrad`: there already, because autograd gives them with the rows'."""

    d_weights: list[Grads]
    """By call."""

    def add_to(self, *into: torch.Tensor | None) -> None:
        found = [grad for grads in self.d_weights for grad in grads]
        for place, grad in zip(into, found, strict=True):
            if grad is not None and place is not None:
                place += grad.to(place.dtype)


class NamedModules(nn.ModuleList):
    """A list whose modules have names of their own in `state_dict`."""

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str]) -> None:
        super().__init__()
        for name, module in zip(names, modules, strict=True):
            self.add_module(name, module)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]


class ModuleExperts(Unhooked):
    """The modules of this rank's experts as an `ExpertSet`."""

    _version = 2
    """Of its names in state_dict: 1 counted the slots of each rank from 0."""
    loads: int = 0
    """How often a state was loaded."""

    def __init__(
        self,
        ids: Sequence[int],
        make: Callable[[int], nn.Module] | Joint,
        d_out: int,
        num_experts: int | None = None,
    ) -> None:
        super().__init__()
        self._ids, self.out_width = tuple(ids), d_out
        self.num_experts = len(self._ids) if num_experts is None else num_experts
        self.joint = isinstance(make, Joint)
        made = [make.make(self._ids)] if isinstance(make, Joint) else [make(expert) for expert in ids]
        self.parts = NamedModules(made, self._names())
        self.counts_of_weights = [len(list(module.parameters())) for module in self.parts]

    @property
    def ids(self) -> tuple[int, ...]:
        return self._ids

    @ids.setter
    def ids(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)
        self.parts = NamedModules(list(self.parts), self._names())

    def _names(self) -> list[str]:
        """Of the modules: an expert's number, so that ranks never give one name to two experts."""
        if self.joint:
            all_here = self._ids == tuple(range(self.num_experts))
            return ["0" if all_here else "experts_" + "_".join(map(str, self._ids))]
        return [str(expert) for expert in self._ids]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, object],
        prefix: str,
        local_metadata: dict[str, object],
        *others: object,
    ) -> None:
        """Names by slot, which 0.1 saved, are understood; experts of other ranks are passed over."""
        self.loads += 1
        names = self._names()
        by_slot = {str(slot): name for slot, name in enumerate(names)}
        for key in [key for key in state_dict if key.startswith(f"{prefix}parts.")]:
            name, _, rest = key.removeprefix(f"{prefix}parts.").partition(".")
            if local_metadata.get("version") == 1 and name in by_slot and by_slot[name] != name:
                state_dict[f"{prefix}parts.{by_slot[name]}.{rest}"] = state_dict.pop(key)
            elif name not in names and name.isdecimal() and int(name) < self.num_experts:
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def reset_parameters(self) -> None:
        """Asks each module that knows how."""
        for module in self.parts.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for module in self.parts for parameter in module.parameters())

    def forward(
        self, x: Inputs, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ModulesSaved]:
        structure, rows = Structure.take_apart(x)
        if self.joint:
            assert shadows is None, "the layer refuses shadows where one module serves all experts"
            part = slice(0, len(rows[0]))
            done = [self._call(self.parts[0], structure, rows, part, counts=list(counts))]
        else:
            done, start = [], 0
            for number, count in enumerate(counts):
                weights = None if shadows is None else shadows[number]
                module = self.parts[number if shadows is None else 0]
                done.append(self._call(module, structure, rows, slice(start, start + count), weights))
                start += count
        results = [y for y, _ in done]
        return (
            torch.cat(results) if results else rows[0].new_empty(0, self.out_width),
            ModulesSaved(
                calls=[call for _, call in done],
                empty=tuple(tensor.new_empty(0, *tensor.shape[1:]) for tensor in rows),
                structure=structure,
            ),
        )

    def _call(
        self,
        module: nn.Module,
        structure: Structure,
        rows: Sequence[torch.Tensor],
        part: slice,
        flat: torch.Tensor | None = None,
        counts: list[int] | None = None,
    ) -> tuple[torch.Tensor, ModuleCall]:
        named = None if flat is None else self._named(module, flat)
        weights = tuple(module.parameters()) if named is None else tuple(named.values())

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            given = (structure.put_together(inputs), *([] if counts is None else [counts]))
            y: torch.Tensor = module(*given) if named is None else functional_call(module, named, given)
            return y.to(rows[0].dtype)  # under autocast a module may answer in another type

        y, graph = InnerGraph.record(run, [tensor[part] for tensor in rows], weights)
        if y.shape != (part.stop - part.start, self.out_width):
            raise ConfigError(
                f"an expert returned shape {tuple(y.shape)} for {part.stop - part.start} rows; "
                f"expected [{part.stop - part.start}, {self.out_width}]; give d_out to MoE if it differs"
            )
        return y, ModuleCall(graph=graph, rows=part)

    def dgrad(self, dy: torch.Tensor, saved: ModulesSaved) -> tuple[Inputs, ModulesPending]:
        d_rows: list[list[torch.Tensor]] = []
        d_weights: list[Grads] = []
        for call in saved.calls:
            grads, split = call.graph.backward(dy[call.rows]), len(saved.empty)
            count = call.rows.stop - call.rows.start
            d_rows.append(
                [
                    like.new_zeros(count, *like.shape[1:]) if grad is None else grad
                    for like, grad in zip(saved.empty, grads, strict=False)
                ]
            )
            d_weights.append(tuple(grads[split:]))
        joined = [torch.cat(parts) for parts in zip(saved.empty, *d_rows, strict=True)]
        return saved.structure.put_together(joined), ModulesPending(d_weights=d_weights)

    def wgrad(
        self, pending: Sequence[PendingWgrad], begun: Grads = (), wanted: Sequence[bool] | None = None
    ) -> Grads:
        return add_up(self.weights, pending, begun, wanted)

    # Shadows: an expert's weights as one row.

    def flatten(self, slots: Sequence[int]) -> torch.Tensor:
        rows = [torch.cat([p.detach().flatten() for p in self.parts[slot].parameters()]) for slot in slots]
        if rows:
            return torch.stack(rows)
        first = next(iter(self.weights))
        size = sum(p.numel() for p in self.parts[0].parameters())
        return first.detach().new_empty(0, size)

    @staticmethod
    def _named(module: nn.Module, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        named, start = {}, 0
        for name, parameter in module.named_parameters():
            part = flat[start : start + parameter.numel()].view_as(parameter).detach()
            named[name] = part.requires_grad_(parameter.requires_grad)
            start += parameter.numel()
        return named

    def shadow_wgrad(self, pending: ModulesPending, rows: torch.Tensor) -> None:
        for row, grads in zip(rows, pending.d_weights, strict=True):
            start = 0
            for parameter, grad in zip(self.parts[0].parameters(), grads, strict=True):
                if grad is not None:
                    row[start : start + parameter.numel()] += grad.flatten().to(row.dtype)
                start += parameter.numel()

    def add_shadow_grads(
        self, slots: Sequence[int], rows: torch.Tensor, weight_grads: Sequence[torch.Tensor | None]
    ) -> None:
        first = [sum(self.counts_of_weights[:slot]) for slot in range(len(self.parts))]
        for slot, row in zip(slots, rows, strict=True):
            start = 0
            for number, parameter in enumerate(self.parts[slot].parameters(), first[slot]):
                fresh = weight_grads[number]
                if parameter.requires_grad:
                    into = accumulator(parameter)[0] if fresh is None else fresh
                    into += row[start : start + parameter.numel()].view_as(into).to(into.dtype)
                start += parameter.numel()
