"""What is launched before what, while two microbatches take turns: nothing is waited for that could hide."""

from __future__ import annotations

from typing import Any

import torch
from layer_parity import D
from slow_wire import on_a_slow_wire
from torch import nn

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.exchange.dispatch_interleaved import InTurns
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.run_ranks import run_ranks


class Dense(torch.autograd.Function):
    """Says when it runs; a microbatch is known by the number in its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[Any], name: str) -> torch.Tensor:
        events.append(("dense", name, 0.0))
        ctx.told = events, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        events, name = ctx.told
        events.append(("dense back", name, 0.0))
        return dy, None, None


class Two(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.moe, self.events = on_a_slow_wire(mesh)
        plain_forward, plain_dgrad, plain_wgrad = (
            self.moe.experts.forward,
            self.moe.experts.dgrad,
            self.moe.experts.wgrad,
        )
        self.moe.experts.forward = self.told("experts", plain_forward)  # type: ignore[method-assign]
        self.moe.experts.dgrad = self.told("dgrad", plain_dgrad)  # type: ignore[method-assign]
        self.moe.experts.wgrad = self.told("wgrad", plain_wgrad)  # type: ignore[method-assign]

    def told(self, name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.events.append((name, "", 0.0))
            return function(*args, **options)

        return run

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        for number in range(2):
            x = x + self.moe(Dense.apply(x, self.events, f"{name}{number}"))
        return x


def order(mesh: Mesh) -> list[str]:
    model = Two(mesh)
    given = [
        (
            fill_normal(
                torch.empty(6, D, dtype=torch.float64), key_of(name, mesh.rank), 1.0
            ).requires_grad_(),
            name,
        )
        for name in "AB"
    ]
    outputs = moeclipse.overlap(model, given)
    model.events.append(("backward", "", 0.0))
    sum(y.sum() for y in outputs).backward()
    short = {"backward dispatch": "S'", "backward combine": "R'", "dispatch": "S", "combine": "R"}
    found = []
    for kind, label, _ in model.events:
        name = next((letter for word, letter in short.items() if label.startswith(word)), label)
        if name in short.values():
            found.append(f"{kind} {name}")
        elif "gradient" not in label and "score" not in label:
            found.append(f"{kind} {name}".strip())
    return [now for before, now in zip(["", *found], found, strict=False) if now != before]  # rows and scores


FORWARD = """
dense A0 | launch S
dense B0 | launch S
wait S | experts | launch R
wait S | experts | launch R
wait R | dense A1 | launch S
wait R | dense B1 | launch S
wait S | experts | launch R
wait S | experts | launch R
wait R
"""
BACKWARD = """
launch S'
wait S' | dgrad | launch R' | wgrad
wait S' | dgrad | launch R' | wgrad
wait R' | dense back B1 | launch S'
wait R' | dense back A1 | launch S'
wait S' | dgrad | launch R' | wgrad
wait S' | dgrad | launch R' | wgrad
wait R'
"""
"""One line for each turn: B's dense part, experts or next layer stand between a launch of A and its wait."""


def test_turns_stand_between_a_launch_and_its_wait_in_both_directions() -> None:
    for found in run_ranks(2, order):
        text = " | ".join(found)
        forward, back = text.split(" | backward | ")
        assert forward == " | ".join(line for line in FORWARD.strip().splitlines())
        expected = " | ".join(BACKWARD.strip().splitlines())
        assert back.startswith(expected)


def test_parts_of_a_call_that_nobody_asked_for_have_no_gradient() -> None:
    rows = object.__new__(InTurns)
    rows.back, rows.inputs = None, [torch.zeros(0), torch.zeros(0)]
    assert rows.compute_back([True, False, True]) == (None, None, None)
    assert rows.collect_back() == ([None, None], None)
