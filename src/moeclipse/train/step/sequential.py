"""The microbatches of a step one after the other: forward and backward by autograd, eagerly or replayed.

What `train/step/pipelined` does in the order of a program, for runs without stages and without overlap
between microbatches. Where a microbatch can be a CUDA graph (`train/step/graphs`), it is one; where ranks
exchange rows in it, what stands between is (`train/step/partial_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from moeclipse.comm.async_ops.reading import send
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.token_gather import TokenGather
from moeclipse.model.transformer import Transformer
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.moe.tokens import Tokens
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.samples import Batches, Microbatch
from moeclipse.train.data.sources import add_by_source, zero_sums
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.step.graphs import CudaCapture, MicrobatchGraphs, obstacle
from moeclipse.train.step.partial_graphs import PartCapture, PartGraphs, obstacle_to_parts
from moeclipse.train.step.recompute import arrange


def gathering(model: Transformer) -> list[TokenGather]:
    return [layer.wire() for _, layer in moe_layers(model) if layer.gathers]


class SequentialStep:
    """Runs them on this rank."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, model: Transformer, buckets: Buckets, batches: Batches
    ) -> None:
        self.config, self.mesh, self.model = config, mesh, model
        self.buckets, self.batches = buckets, batches
        self.sums = zero_sums(batches, mesh)
        self.counting: Callable[[Transformer], AbstractContextManager[None]] = lambda _: nullcontext()
        """Around each forward (`train/observe/memory_table`)."""
        self.judge: Callable[[torch.Tensor], None] | None = None
        """Told the loss of all of a step, before its last backward (`train/step/clip`)."""
        self.notes = arrange(config, mesh, model)
        self._wires = list({id(one): one for one in gathering(model)}.values())
        self.graphs: MicrobatchGraphs | None = None
        self.parts: PartGraphs | None = None
        if not obstacle(config, mesh, model):
            states = [state for bucket in buckets for state in bucket.sums]
            self.graphs = MicrobatchGraphs(self.replayed, states, CudaCapture(mesh.device), mesh.recorder)
        elif not obstacle_to_parts(config, mesh, model):
            self.parts = PartGraphs(model.all_layers, PartCapture(mesh.device), mesh.recorder)

    def run(self, step: int, loss_scale: float = 1.0) -> torch.Tensor:
        """This rank's (loss, aux loss, dropped rows, loss of each source if there are several), summed.

        Gradients are `loss_scale` times theirs.
        """
        mesh, accumulate = self.mesh, self.config.optim.accumulate
        self.sums.zero_()
        for m in range(accumulate):
            batch = self.batches.microbatch(step, m, mesh.data_index, mesh.num_data)
            with mesh.recorder.compute(f"microbatch {m}"):
                read = (send(batch.inputs, mesh.device), send(batch.targets, mesh.device))
                if self.graphs is not None:
                    self.graphs.run(*read, loss_scale, m)
                    continue
                if m == accumulate - 1:
                    self.buckets.arm()
                tokens = self._tokens(batch, step, m)
                given = (*read, loss_scale, tokens, batch, self.batches.counted(step))
                if self.parts is not None:
                    self.parts.run(partial(self._compute, *given), first=m == 0)
                else:
                    self._compute(*given)
        if self.graphs is not None:
            self.buckets.arm()  # a replay tells no bucket what is complete: all leave at the end
        return self.sums.clone()

    def check(self) -> None:
        """Raise where ranks did not meet in a graph; asked once the numbers of a step are on the host."""
        for wire in self._wires:
            wire.check()

    def _tokens(self, batch: Microbatch, step: int, m: int) -> Tokens:
        length, total = self.config.data.seq_len, batch.total_tokens
        largest = -(-total // (length * self.mesh.num_data)) * length
        return Tokens(
            mesh=self.mesh, first=batch.first_token, total=total, step=step, microbatch=m, largest=largest
        )

    def replayed(self, inputs: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, m: int) -> None:
        """A microbatch whose gates do not ask for the step; all ranks have as many tokens."""
        mesh, mine = self.mesh, inputs.numel()
        place = mesh.data_index * mine
        tokens = Tokens(mesh=mesh, first=place, total=mesh.num_data * mine, microbatch=m)
        self._compute(inputs, targets, scale, tokens)

    def _compute(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        scale: float | torch.Tensor,
        tokens: Tokens,
        batch: Microbatch | None = None,
        counted: int = 0,
    ) -> None:
        """Gradients into their accumulators, the rest into this step's sums."""
        device, accumulate = self.mesh.device, self.config.optim.accumulate
        documents = None if batch is None or batch.documents is None else send(batch.documents, device)
        with self.counting(self.model):
            out = self.model(inputs, targets, tokens, documents)
        counted = counted or self.config.data.batch_size * self.config.data.seq_len
        loss = out.loss_sum / counted + out.aux_loss / accumulate
        if self.judge is not None and tokens.microbatch == accumulate - 1:
            self.judge(self.sums[0] + out.loss_sum.detach())
        (loss * (scale.to(loss.dtype) if isinstance(scale, torch.Tensor) else scale)).backward()
        told = [report.num_dropped for report in out.reports]
        dropped = torch.stack(told).sum(dtype=torch.float64) if told else self.sums.new_zeros(())
        loss_sum = out.loss_sum.detach() * (self.mesh.tp_index == 0)  # tp ranks have the same loss
        self.sums[:3] += torch.stack([loss_sum, out.aux_loss.detach() / accumulate, dropped]).double()
        if batch is not None and batch.sources is not None:
            add_by_source(self.sums[3:], out.loss_T, batch.sources, self.mesh)
