"""A wire that is slow on purpose, and writes down what happens on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from layer_parity import make

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.transport import TorchTransport
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.layer import MoE

DELAY = 0.03
Event = tuple[str, str, float]


class SlowResult:
    """A transfer that is done no earlier than `due`, and writes down when it is waited for."""

    def __init__(self, inner: InFlight[torch.Tensor], due: float, told: Callable[[], None]) -> None:
        self.inner, self.due, self.told = inner, due, told

    def get(self) -> torch.Tensor:
        self.told()
        time.sleep(max(0.0, self.due - time.monotonic()))
        return self.inner.get()


class SlowTransport(TorchTransport):
    """A wire that carries one transfer at a time, each for DELAY seconds, and writes down when it began."""

    def __init__(self, plain: TorchTransport, events: list[Event]) -> None:
        super().__init__(plain.lane, plain.group)
        object.__setattr__(self, "events", events)
        object.__setattr__(self, "state", {"free": 0.0})

    def all_to_all(self, rows: Any, send: Any, receive: Any, label: str, out: Any = None) -> Any:
        now = time.monotonic()
        due = max(now, self.state["free"]) + DELAY
        self.state["free"] = due
        self.events.append(("launch", label, now))
        inner = super().all_to_all(rows, send, receive, label, out)
        return SlowResult(inner, due, lambda: self.events.append(("wait", label, time.monotonic())))


def on_a_slow_wire(mesh: Mesh, **exchange: Any) -> tuple[MoE, list[Event]]:
    moe = make(GateConfig(top_k=2), 8, 0, mesh, exchange=exchange)
    events: list[Event] = []
    dispatcher = moe.dispatcher
    slow = SlowTransport(TorchTransport(dispatcher.lane, dispatcher.group), events)
    moe.dispatcher = Dispatcher(
        placement=dispatcher.placement,
        rank_of_E=dispatcher.rank_of_E,
        slot_of_E=dispatcher.slot_of_E,
        group=dispatcher.group,
        lane=dispatcher.lane,
        transport=slow,
    )
    return moe, events
