"""The microbatches of a step through a verified program: stages over ranks, overlap, recompute.

What `Learner.backward` does microbatch by microbatch, in the order of a program instead. The sums it returns
and the gradients it leaves are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.comm.async_ops.exchange import total
from moeclipse.comm.async_ops.reading import send
from moeclipse.comm.async_ops.record import StepStamps
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.shares import even_bounds
from moeclipse.model.passes import MicrobatchLoads, MicrobatchState
from moeclipse.model.transformer import Transformer
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.precision import WIDE
from moeclipse.pipeline.overlap import StageLayout
from moeclipse.pipeline.runtime import Runtime
from moeclipse.report.slowdown import Slowdown
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COMPUTE
from moeclipse.schedule.op import Op
from moeclipse.train.config import TrainConfig, needs_whole_microbatches
from moeclipse.train.data.samples import Batches, Microbatch
from moeclipse.train.data.sources import add_by_source, zero_sums
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.predict.step_program import EMBEDDING, step_program

LOOKED_AT = range(4, 12)
"""Steps whose ops are timed one by one: stamps cost time, and more steps say the same."""


class Pipelined:
    """This rank's stages, and the program that runs them."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        layout: StageLayout,
        model: Transformer,
        batches: Batches,
        buckets: Buckets,
    ) -> None:
        self.config, self.mesh, self.model, self.batches = config, mesh, model, batches
        self.layout, self.buckets = layout, buckets
        verified = step_program(config, mesh, layout, model, buckets, chunks_of(config, mesh))
        stages = {number: model.stage(layers) for number, layers in layout.held_by(mesh.pp_index).items()}
        self.runtime = Runtime(
            verified, mesh, stages, model.tp.wgrads, width=config.model.d_model, dtype=model.dtype
        )
        self.runtime.ends = {
            kinds.BUCKET_REDUCE: lambda op: buckets.reduce(op.step or 0),
            kinds.TIED_SUM: self._add_other_end,
        }
        self.slowdown = Slowdown()
        """Of compute under communication, from the first steps in which kernels were warm."""
        self._seen: list[tuple[Op, Any, Any]] = []
        self._fed: dict[tuple[int, int], MicrobatchState] = {}
        """Microbatches of the step that runs."""
        self._tie()
        self._prepare()

    def _tie(self) -> None:
        """A head that is tied to the embedding adds to the same gradient, maybe on another rank."""
        first, last = self.layout.rank_of[0], self.layout.rank_of[-1]
        self._ends: Group | None = None
        frozen = ParameterGroups.of(self.config.optim, self.config.lora).is_frozen
        self.tied = self.config.model.tie_embeddings and not frozen(EMBEDDING)
        if self.tied and first != last:
            self._ends = self.mesh.ends()

    def _prepare(self) -> None:
        """Before the first step: say how often gradients of the embedding come in a step."""
        embedding = getattr(self.model, "embedding", None)
        if embedding is None or not self.tied:
            return
        embedding.accumulation.uses = int(self.model.begins) + int(self.model.ends)
        embedding.accumulation.elsewhere = int(self._ends is not None)

    def _add_other_end(self, _: Op) -> None:
        """The embedding's gradient of both ends, the same bits on both, before it is reduced over dp."""
        assert self._ends is not None
        state = self.model.embedding.accumulation  # type: ignore[attr-defined]
        state.fill()
        both = total(self.mesh.grads, self._ends, state.main_grad, "gradient of the tied embedding").get()
        state.main_grad.copy_(both.view_as(state.main_grad))
        state.backward_done()

    @property
    def backwards(self) -> int:
        """Backward passes of a step through each layer: chunks of a microbatch go one by one."""
        shape = self.runtime.verified.program.pipeline()
        # Of two copies each takes half of the microbatches, and both cut as many.
        passing = shape.microbatches_of(min(self.layout.held_by(self.mesh.pp_index)))
        return sum(self.runtime.chunks.get(m, 1) for m in passing)

    def _look(self, step: int) -> None:
        """Time the ops of a step, if it is one of those that the price of overlap is taken from."""
        if self.runtime.observe not in (None, self._saw):
            return  # somebody else watches
        looks = step in LOOKED_AT and self.mesh.num_ranks > 1
        self.runtime.observe = self._saw if looks else None

    def _saw(self, op: Op, begun: object, ended: object) -> None:
        self._seen.append((op, begun, ended))

    def looked(self, stamps: StepStamps) -> None:
        """After a step: what its ops took, beside transfers and alone."""
        if self._seen:
            seconds = self.mesh.recorder.seconds
            computed = [seen for seen in self._seen if seen[0].lane == COMPUTE]
            ops = [((op.kind, op.layer, op.chunk is None), seconds(a), seconds(b)) for op, a, b in computed]
            self.slowdown.add(ops, [(launched, done) for _, _, launched, done in stamps.transfers])
            self._seen.clear()

    def loss_so_far(self) -> torch.Tensor:
        """Of the microbatches that have come to their end."""
        known = [part.loss_sum.detach() for part in self._fed.values() if part.loss_sum is not None]
        return torch.stack(known).sum()

    def run(self, step: int, loss_scale: float = 1.0) -> torch.Tensor:
        """This rank's sums, as those of `train/step/sequential`; gradients are `loss_scale` times theirs."""
        mesh, accumulate = self.mesh, self.config.optim.accumulate
        fed = self._fed = {}
        loads: dict[int, MicrobatchLoads] = {}
        sources: dict[tuple[int, int], torch.Tensor] = {}

        def feed(m: int, chunk: int, chunks: int) -> MicrobatchState:
            if m not in loads:
                loads[m] = MicrobatchLoads(
                    chunks, each=self.config.placement.used_by(self.mesh.ep * self.mesh.tp)
                )
                batch = self.batches.microbatch(step, m, mesh.data_index, mesh.num_data)
                for number in range(chunks):
                    fed[m, number] = self._chunk(batch, step, m, number, loads[m], loss_scale)
                    if batch.sources is not None:
                        sources[m, number] = batch.sources[part_of(batch, number, chunks)]
            return fed[m, chunk]

        self._look(step)
        dtype = WIDE[self.model.dtype]
        tokens = self.batches.counted(step)
        self.buckets.arm(self.backwards, placed=True)
        self.runtime.step(feed, torch.full((), loss_scale / tokens, dtype=dtype, device=mesh.device))
        sums = zero_sums(self.batches, mesh)
        for key in sorted(fed):
            part = fed[key]
            if part.loss_sum is not None:
                sums[0] += part.loss_sum * (mesh.tp_index == 0)  # tp ranks have the same loss
                if key in sources and part.loss_T is not None:
                    add_by_source(sums[3:], part.loss_T, sources[key], mesh)
            for report in part.reports:
                sums[1] += report.aux_loss / accumulate
                sums[2] += report.num_dropped
        self._fed = {}
        return sums

    def _chunk(
        self, batch: Microbatch, step: int, m: int, chunk: int, loads: MicrobatchLoads, loss_scale: float
    ) -> MicrobatchState:
        mesh = self.mesh
        part = part_of(batch, chunk, loads.chunks)
        tokens = Tokens(
            mesh=mesh,
            first=batch.first_token + part.start * batch.inputs.shape[1],
            total=batch.total_tokens,
            step=step,
            microbatch=m,
        )
        inputs, targets = (send(ids[part], mesh.device) for ids in (batch.inputs, batch.targets))
        documents = None if batch.documents is None else send(batch.documents[part], mesh.device)
        aux_scale = loss_scale / self.config.optim.accumulate
        return self.model.microbatch(inputs, targets, tokens, loads, aux_scale, documents)


def part_of(batch: Microbatch, chunk: int, chunks: int) -> slice:
    """The samples of one chunk."""
    bounds = even_bounds(len(batch.inputs), chunks)
    return slice(bounds[chunk], bounds[chunk + 1])


def chunks_of(config: TrainConfig, mesh: Mesh) -> int:
    """Into how many chunks a microbatch outside pairs is cut."""
    return chunks_for(config, mesh.num_data)


def chunks_for(config: TrainConfig, num_data: int) -> int:
    """The same for so many ranks that read tokens of their own."""
    pipeline = config.pipeline
    if pipeline.overlap != "pair+self":
        return 1
    fewest = config.data.batch_size // (config.optim.accumulate * num_data)
    if pipeline.chunks == "auto":
        return 1 if needs_whole_microbatches(config) else min(2, max(fewest, 1))
    return pipeline.chunks
