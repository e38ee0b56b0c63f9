"""A layer in training as one part that asks no other rank, and what is left of it.

    dense, or all experts on this rank      h -> h'                all of it
    some experts on other ranks             h -> h', x, choices    attention, gate, and who sends what
    a gate that asks other ranks            h -> h', x             attention

A part is a function of one tensor that gives tensors; somebody else says how it is run
(`train/step/partial_graphs`). What is left is the exchange with its experts, and losses that need the loads
of all ranks.

Contract. The layer's own forward, operation by operation.
Hazard. Not every run runs the part's Python: what it would write down, it wrote down the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from moeclipse.model.layer import TransformerLayer
from moeclipse.model.recompute import Part
from moeclipse.model.rotary import Positions
from moeclipse.moe.exchange.dispatch_on_device import prepare_sending
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.losses import MoEReport
from moeclipse.moe.tokens import Tokens
from moeclipse.moe.tune.exchange_policy import plans_on_device

Run = Callable[[Part, torch.Tensor], tuple[torch.Tensor, ...]]


class Front:
    """Of one layer, without tensor parallelism."""

    def __init__(self, layer: TransformerLayer, run: Run) -> None:
        self.layer, self._run = layer, run
        self._choices: Routing | None = None
        """How the gate's choices look: a part gives tensors alone."""

    @property
    def _reach(self) -> Literal["attention", "gate", "layer"]:
        """How far the part goes."""
        moe = self.layer.moe
        if moe is None:
            return "layer"
        # Which experts are near changes when experts move: such a gate reads other memory from then on.
        near = moe.gate.near_E is not None and moe.gate.config.max_leaving < 1
        if near or not moe.gate.compiles:
            return "attention"
        return "layer" if moe.runs_on_device else "gate"

    @property
    def _knows_senders(self) -> bool:
        """Where experts have replicas, ranks first share out rows among them."""
        return self.layer.moe is not None and self.layer.moe.dispatcher.table is None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What its tensors' shapes depend on, beside the input."""
        moe = self.layer.moe
        return () if moe is None else (self._reach, self._knows_senders, *moe.dispatcher.slot_bounds)

    def __call__(
        self, h_TD: torch.Tensor, positions: Positions, tokens: Tokens
    ) -> tuple[torch.Tensor, MoEReport | None]:
        def part(h_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._ahead(h_TD, positions, tokens)

        layer, moe, reach = self.layer, self.layer.moe, self._reach
        h_TD, *found = self._run(part, h_TD)
        if moe is None:
            return h_TD, None
        _, tokens = layer.to_experts(h_TD, tokens)
        if reach == "layer":
            routing = self._routing(found)
            return h_TD, moe.report(routing, moe.gather_loads([routing], tokens).total(), tokens)
        x_TD, *found = found
        if reach == "gate":
            y_TD, report = moe.run(x_TD, tokens, routing=self._routing(found))
        else:
            y_TD, report = moe.run(x_TD, tokens)
        return h_TD + layer.from_experts(y_TD, len(x_TD)), report

    def _ahead(self, h_TD: torch.Tensor, positions: Positions, tokens: Tokens) -> tuple[torch.Tensor, ...]:
        layer, moe, reach = self.layer, self.layer.moe, self._reach
        h_TD, x_TD = layer.attend(h_TD, positions, tokens)
        if moe is None:
            return (h_TD + layer.dense_block(x_TD),)
        if reach == "attention":
            return h_TD, x_TD
        x_TD, tokens = layer.to_experts(x_TD, tokens)
        routing = moe.gate(x_TD, tokens)
        if reach == "gate" and self._knows_senders and plans_on_device(routing.scores_TK):
            routing = replace(routing, sending=prepare_sending(routing.expert_ids_TK, moe.dispatcher))
        self._choices = routing.filled([tensor.detach() for tensor in routing.tensors()])
        if reach == "gate":
            return h_TD, x_TD, *routing.tensors()
        y_TD = moe.apply_experts(routing, x_TD, tokens)
        return h_TD + layer.from_experts(y_TD, len(x_TD)), *routing.tensors()

    def _routing(self, tensors: list[torch.Tensor]) -> Routing:
        assert self._choices is not None
        return self._choices.filled(tensors)
