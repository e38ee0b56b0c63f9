"""What the memory of a rank is taken for: weights, gradients, optimizer state, and what each layer keeps.

    lines = table.lines()      after the first step: a line for each, in bytes that people read

Idea. State lies in flat tensors, whose bytes are known. What forward keeps for backward is held by the nodes
of autograd's graph: behind each layer the graph is walked as far as it is new, and every tensor that a node
saved counts once, with all of its memory, for the first layer that has it. Parameters count for nobody.

Contract. Only the first microbatch of a run is looked at, and nothing of it is touched: hooks on saved
tensors would count, too, but hand backward other tensor objects than the parameters it adds gradients to.
Counted is what autograd keeps, so in runs whose microbatches go through a program (pipelines, overlap,
recompute) state and peak are told, and of layers that they are not counted.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.shard_state import STATES
from moeclipse.train.step.host_inputs import HostInputs
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.memory_bytes import readable, roots_of, saved_behind

BEFORE, BEHIND = "embedding", "head and loss"


class MemoryTable:
    """Of one rank; it speaks once, after the first step."""

    def __init__(
        self,
        optim: AdamW,
        layers: Iterable[tuple[str, nn.Module]],
        *,
        by_autograd: bool,
        inputs: HostInputs | None = None,
    ) -> None:
        """`layers` by name, as they run; `by_autograd`: autograd keeps what they need."""
        self.optim, self.layers, self.by_autograd, self.inputs = optim, list(layers), by_autograd, inputs
        self.kept: dict[str, int] = {}
        """Bytes of one microbatch."""
        self._told = False

    def counting(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around the forward of a microbatch; only the first is counted."""
        return self._count(model) if self.by_autograd and not self.kept else nullcontext()

    @contextmanager
    def _count(self, model: nn.Module) -> Iterator[None]:
        seen_nodes: set[Any] = set()
        seen = {tensor.untyped_storage().data_ptr() for tensor in self._own()}

        def look(name: str, *found: object) -> None:
            new = saved_behind(roots_of(found), seen_nodes)
            sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in new}
            self.kept[name] = sum(size for address, size in sizes.items() if address not in seen)
            seen.update(sizes)

        def layer_done(name: str, _: nn.Module, args: object, out: object) -> None:
            if not self.kept:
                look(BEFORE, args)
            look(name, out)

        hooks = [layer.register_forward_hook(partial(layer_done, name)) for name, layer in self.layers]
        hooks.append(model.register_forward_hook(lambda _module, _args, out: look(BEHIND, out)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _own(self) -> Iterator[torch.Tensor]:
        for bucket in (*self.optim.buckets, *self.optim.buckets.frozen):
            yield bucket.params
        for _, layer in self.layers:
            yield from layer.buffers()

    def state(self) -> dict[str, int]:
        """Bytes of all that outlives a step."""
        everywhere = (*self.optim.buckets, *self.optim.buckets.frozen)
        grads = {bucket.grads.data_ptr(): bucket.grads.nbytes for bucket in everywhere}  # some share them
        found = {
            "weights": sum(bucket.params.nbytes for bucket in everywhere if bucket.lent is None),
            "main_grad": sum(grads.values()),
            "master weights": 0,
            "moments": 0,
        }
        for state in self.optim.states:
            for kind in STATES:
                if kind not in state.on_host:
                    sizes = [tensor.nbytes for tensor in state.tensors_of(kind).values()]
                    found["master weights" if kind == "weight" else "moments"] += sum(sizes)
        if self.optim.host is not None:
            found["buffers for state of the host"] = self.optim.host.buffer_bytes
        if self.inputs is not None:
            found["buffers for inputs of layers"] = self.inputs.buffer_bytes
        if self.optim.weights is not None:
            found["buffers for weights of the host"] = self.optim.weights.buffer_bytes
        return found

    def lines(self) -> list[str]:
        """The table, the first time that it is asked for."""
        if self._told:
            return []
        self._told = True
        rows = [(name, size) for name, size in self.state().items() if size]
        rows += [(f"{name}, kept of a microbatch", size) for name, size in self.kept.items()]
        rows.append(("peak so far", peak(self.optim.buckets.buckets[0].params.device)))
        if self.optim.host is not None:
            rows.append(("state in the host's memory", self.optim.host.num_bytes))
        if self.optim.grads is not None:
            rows.append(("gradients in the host's memory", self.optim.grads.num_bytes))
        if self.inputs is not None:
            rows.append(("inputs of layers in the host's memory", self.inputs.num_bytes))
        if self.optim.weights is not None:
            rows.append(("weights in the host's memory", self.optim.weights.num_bytes))
        width = max(len(name) for name, _ in rows)
        found = ["memory of this rank", *(f"  {name:<{width}}  {readable(size):>10}" for name, size in rows)]
        if not self.by_autograd:
            found.append("  what layers keep is not counted where microbatches go through a program")
        return found


def watched(learner: Learner) -> MemoryTable:
    """The table of a run that begins; layers by their number in the model."""
    layers = [(f"layer {number}", layer) for number, layer in learner.model.layers.items()]
    table = MemoryTable(learner.optim, layers, by_autograd=learner.pipelined is None, inputs=learner.inputs)
    learner.sequential.counting = table.counting
    return table


def by_kind(learner: Learner) -> dict[str, object]:
    """Bytes of every rank at its peak, by what they are taken for, for the summary. Collective."""
    state = MemoryTable(learner.optim, [], by_autograd=False, inputs=learner.inputs).state()
    rest = max(peak(learner.mesh.device) - sum(state.values()), 0)
    with learner.mesh.recorder.apart("memory of ranks"):
        everyone = learner.mesh.gather_objects([*state.values(), rest])
    return {"kinds": [*state, "the rest at its peak"], "ranks": everyone}


def peak(device: torch.device) -> int:
    """The most bytes of the device, or of this process, that were in use at a time."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
