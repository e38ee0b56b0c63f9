"""Loss on text that training does not read: every few steps, on all ranks, exact.

Windows of `eval.files`, or those that `eval.share` holds back, are read in one order, in microbatches of one
size, each shared out over the data ranks as in training. Losses are added up in float64 by source and
gathered in the order of ranks; targets are counted from the data alone. So the number is a matter of weights
and text: layouts differ by what the order of a sum does to its last bits.

Contract. Nothing of training changes: no gradient, no load, no random number, no choice of a schedule. Ranks
without a sample take part in every exchange.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.exchange import total
from moeclipse.comm.async_ops.reading import send
from moeclipse.comm.mesh import Mesh
from moeclipse.model.transformer import Transformer
from moeclipse.moe.tokens import Tokens
from moeclipse.pipeline.overlap import StageLayout
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.data_config import eval_part
from moeclipse.train.data.samples import Microbatch, Samples, SampleSource, as_microbatch, even_part
from moeclipse.train.data.sources import add_by_source, open_samples

MOST_NATS = 700.0
"""exp of more is no number."""
LONG = 20
"""Steps of training: validation that reads as much is announced, lest a run seem to stand still."""


class Evaluation:
    """What is evaluated, and how."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        model: Transformer,
        samples: SampleSource,
        layout: StageLayout | None = None,
    ) -> None:
        """`samples`: those of training, of which some may be held out; `layout`: of a pipeline."""
        self.config, self.mesh, self.model, self.layout = config, mesh, model, layout
        self.samples = samples
        if config.eval.files:
            data = eval_part(config.data, config.eval)
            opened = open_samples(data, config.model.vocab_size, config.run.seed)
            assert isinstance(opened, Samples)
            self.samples, windows = opened, np.arange(len(opened))
        else:
            windows = samples.held_windows()
        source = self.samples.source_of(windows)
        most = config.eval.samples
        parts = [windows[source == number] for number in range(len(self.samples.names))]
        self.windows = np.concatenate([some_of(part, most) for part in parts])
        self.targets = [int(self.samples.counted(some_of(part, most)).sum()) for part in parts]
        self.rows = max(1, config.data.batch_size // config.optim.accumulate)

    @property
    def notes(self) -> list[str]:
        """What should be known before the first one."""
        steps = len(self.windows) // self.config.data.batch_size
        if steps < LONG:
            return []
        told = f"validation reads {len(self.windows):,} samples each time, as many as {steps:,} steps do"
        return [f"{told}; eval.samples limits them"]

    def is_due(self, done: int) -> bool:
        """After so many steps."""
        return done % self.config.eval.every == 0 or done == self.config.run.steps

    def run(self) -> dict[str, object]:
        """Loss and perplexity, of all targets and of each source; the same on every rank. Collective."""
        mesh = self.mesh
        sums = torch.zeros(len(self.targets), dtype=torch.float64, device=mesh.device)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), mesh.recorder.apart("evaluation"):
                for m, first in enumerate(range(0, len(self.windows), self.rows)):
                    self._microbatch(m, self.windows[first : first + self.rows], sums)
                found = total(mesh.grads, mesh.world, sums, "exchange of evaluated losses").get().tolist()
        finally:
            self.model.train(was_training)
        told = told_of(sum(found), sum(self.targets))
        if len(self.targets) > 1:
            parts = zip(self.samples.names, found, self.targets, strict=True)
            told["eval_sources"] = {name: told_of(one, count) for name, one, count in parts if count}
        return told

    def _microbatch(self, m: int, windows: np.ndarray, sums: torch.Tensor) -> None:
        mesh = self.mesh
        first, stop = even_part(len(windows), mesh.num_data, mesh.data_index)
        batch = as_microbatch(self.samples, windows[first:stop], first, len(windows))
        tokens = Tokens(mesh=mesh, first=batch.first_token, total=batch.total_tokens, microbatch=m)
        loss_T = self._losses(batch, tokens)
        if loss_T is not None:
            sources = batch.sources
            if sources is None:
                sources = torch.zeros(stop - first, dtype=torch.int64)
            add_by_source(sums, loss_T, sources, mesh)

    def _losses(self, batch: Microbatch, tokens: Tokens) -> torch.Tensor | None:
        """Of each token; None on ranks without the head."""
        device, model = self.mesh.device, self.model
        ids, targets = send(batch.inputs, device), send(batch.targets, device)
        documents = None if batch.documents is None else send(batch.documents, device)
        if self.layout is None:
            h_TD, _ = model.hidden(ids, tokens, documents)
            return model.losses(h_TD, targets)[1]
        return self._through_stages(self.layout.first_copy, ids, targets, tokens, documents)

    def _through_stages(
        self,
        layout: StageLayout,
        ids: torch.Tensor,
        targets: torch.Tensor,
        tokens: Tokens,
        documents: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Stage by stage in their order; a rank that has sent its rows goes on with the next microbatch."""
        mesh, model, place = self.mesh, self.model, self.mesh.pp_index
        positions = model.positions(ids, documents)
        tokens = replace(tokens, group=mesh.data)
        rows = ids.numel() // (model.tp.size if model.tp.parts_tokens else 1)
        h_TD: torch.Tensor | None = None
        for stage, layers in enumerate(layout.stages):
            if layout.rank_of[stage] != place:
                continue
            if stage == 0:
                h_TD = model.embed(ids)
            elif layout.rank_of[stage - 1] != place:
                h_TD = torch.empty(rows, self.config.model.d_model, dtype=model.dtype, device=mesh.device)
                self._transfer(h_TD, layout.rank_of[stage - 1], place, stage - 1)
            for index in layers:
                h_TD, _ = model.layer(index)(h_TD, positions, tokens)
            assert h_TD is not None
            if stage + 1 < len(layout.stages) and layout.rank_of[stage + 1] != place:
                self._transfer(h_TD.contiguous(), place, layout.rank_of[stage + 1], stage)
        if layout.rank_of[-1] != place:
            return None
        assert h_TD is not None
        return model.losses(h_TD, targets)[1]

    def _transfer(self, h_TD: torch.Tensor, source: int, target: int, stage: int) -> None:
        """Activations behind a stage to the next one, over the wire that training uses."""
        mesh = self.mesh
        group, here = mesh.pipe("F", source, target), mesh.pp_index
        start = dist.isend if here == source else dist.irecv
        other = group.ranks[target if here == source else source]
        label = f"evaluated activations behind stage {stage}"
        lane = mesh.lane(f"p2p:{source}>{target}")
        lane.launch(group, label, lambda: start(h_TD, other, group=group.handle), None, h_TD).get()


def some_of(windows: np.ndarray, most: int) -> np.ndarray:
    """At most so many, from end to end; 0: all."""
    if not most or len(windows) <= most:
        return windows
    return windows[np.arange(most) * len(windows) // most]


def told_of(loss: float, targets: int) -> dict[str, object]:
    mean = loss / max(targets, 1)
    perplexity = math.exp(min(mean, MOST_NATS)) if math.isfinite(mean) else math.nan
    return {"eval_loss": mean, "eval_perplexity": perplexity, "eval_targets": targets}


def opened_for(
    config: TrainConfig,
    mesh: Mesh,
    model: Transformer,
    samples: SampleSource,
    layout: StageLayout | None,
) -> Evaluation | None:
    """None where nothing is to be evaluated."""
    return Evaluation(config, mesh, model, samples, layout) if config.eval.asked_for else None
