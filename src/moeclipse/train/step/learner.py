"""What one rank trains: model, data and optimizer, one step at a time.

A step: microbatches forward and backward, gradients reduced while the last backward runs, one exchange that
tells every rank loss, norm and whether all is finite, the update, and then the host's look at these numbers.
Everything random is a function of (seed, step, ...), so a checkpoint needs no generator state and a resumed
run repeats the lost steps exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch

from moeclipse.comm.async_ops.exchange import sum_of_parts
from moeclipse.comm.async_ops.lane import gather
from moeclipse.comm.async_ops.reading import Reading
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.core.steps import nth
from moeclipse.model.segment_memory import memories
from moeclipse.model.transformer import Transformer
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.moe.validate import expert_group, is_sharded
from moeclipse.ops.random import key_of
from moeclipse.pipeline.overlap import StageLayout, lay_out
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.evaluation import opened_for
from moeclipse.train.data.samples import Batches
from moeclipse.train.data.sources import corpus_of, open_samples, told_by_source
from moeclipse.train.observe.run_figures import StepRecord
from moeclipse.train.observe.step_times import StepTimes
from moeclipse.train.optim.adamw import learning_rate
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.optim.state_place import optimizer_of
from moeclipse.train.placement.load_trace import AskedLoad, LoadHistory, StepLoad, counted_together
from moeclipse.train.placement.may_move import as_far_as_it_goes
from moeclipse.train.placement.model_placement import ModelPlacement
from moeclipse.train.predict.host_share import share_for
from moeclipse.train.predict.step_program import (
    grads_take_turns,
    ledger_of,
    one_stage,
    step_program,
    updates_in_backward,
    updates_in_next_forward,
)
from moeclipse.train.step import memory_state
from moeclipse.train.step.clip import LayerClip
from moeclipse.train.step.dtype import choose_alike, choose_dtype, repeat_bits
from moeclipse.train.step.graphs import Graphs
from moeclipse.train.step.hosted_learner import HostedLearner
from moeclipse.train.step.integrity import Integrity
from moeclipse.train.step.nonfinite import Accident, look_again
from moeclipse.train.step.pipelined import Pipelined
from moeclipse.train.step.results import CORRUPTED, BadSteps, LossScale, StepResults, norm_if_good
from moeclipse.train.step.sequential import SequentialStep


class Learner(HostedLearner):
    """Model, data and optimizer of one rank."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        config, self.experts_do = as_far_as_it_goes(config, expert_group(mesh, config.moe).size)
        config, share, notes = share_for(config, mesh)
        self.config, self.mesh = config, mesh
        samples = open_samples(config.data, config.model.vocab_size, config.run.seed, config.eval.held_out)
        self.samples, self.corpus = samples, corpus_of(samples)
        self.batches = Batches(samples, config.data.batch_size, config.optim.accumulate, config.data.order)
        self.dtype = choose_dtype(config.model.dtype, mesh.device)
        repeat_bits(config.run.deterministic, mesh.device)
        assert mesh.hosts is not None  # all ranks ask together, also those whose layers need not know
        if config.lora.has("experts") and is_sharded(mesh, config.moe):
            mesh.expert_grads()  # likewise
        layout = None
        if config.runs_program(mesh.pp, mesh.num_ranks):
            layout = lay_out(config.pipeline, config.model.num_layers, mesh.pp, config.optim.accumulate)
        self.placement = ModelPlacement(config, mesh, layout)
        if layout is not None and layout.num_chains > 1 and not mesh.mirrored:
            raise ConfigError(f"{layout.schedule} holds two copies of the model: make Mesh(mirrored=True)")
        self._weights_on_host()
        self.model = self._make_model(layout)
        self.groups = ParameterGroups.of(config.optim, config.lora)
        self.groups.apply(self.model, mesh)
        in_backward = updates_in_backward(config, mesh.num_ranks, mesh.pp)
        self.buckets = self._make_buckets()
        later = updates_in_next_forward(config, mesh.num_ranks, mesh.pp)
        self.optim = optimizer_of(config, mesh, self.buckets, share, next_forward=later, weights=self.weights)
        self.pipelined: Pipelined | None = None
        if layout is not None:
            self.pipelined = Pipelined(config, mesh, layout, self.model, self.batches, self.buckets)
        self._inputs_on_host()
        if (
            config.parallel.check_launches
            and mesh.num_ranks > 1
            and not (config.model.memory and mesh.tp > 1)
        ):
            mesh.recorder.ledger = ledger_of(self.program(), mesh)
        self.sequential = SequentialStep(config, mesh, self.model, self.buckets, self.batches)
        """Used where there is no pipeline."""
        self._follow_program(later)
        self.sequential.notes[:0] = notes
        self.by_layer: LayerClip | None = None
        if config.optim.clip == "layer":
            self.by_layer = LayerClip(self.optim, config.model.num_layers, in_backward=in_backward)
            self.sequential.judge = self.by_layer.judge
            if self.pipelined is not None:
                self.by_layer.ask = self.pipelined.loss_so_far
        self.placement.bind(self.optim)
        self.evaluation = opened_for(config, mesh, self.model, samples, layout)
        self.evaluated: dict[str, object] = {}
        """What was said of the last state that was evaluated."""
        self.layers = [layer for _, layer in moe_layers(self.model)]
        self.wanted_LE = counted_together(self.layers, config.moe.num_experts, mesh.device)
        self.memories = tuple(memories(self.model))
        choose_alike(self.layers, config.run.deterministic, mesh.device)
        self.bad = BadSteps(config.optim.max_bad_steps)
        self.signals: Callable[[], int] = lambda: 0
        """A number that every rank learns of every other with a step's results (`train/run/saving`)."""
        self.loss_scale = LossScale(config.optim.loss_scale, self.dtype)
        self.loads, self.times = LoadHistory(config.placement.decay), StepTimes(mesh)
        self.integrity = Integrity(config, self.optim, self.placement, mesh, self._buffers)

    def _make_model(self, layout: StageLayout | None) -> Transformer:
        config, mesh, parallel = self.config, self.mesh, self.config.parallel
        wanted = {"auto": None, "on": True, "off": False}[parallel.async_all_reduce]
        sequence = parallel.sequence_parallel and mesh.tp > 1
        how: dict[str, Any] = {"sequence_parallel": sequence, "async_all_reduce": wanted}
        return Transformer(
            config.model,
            config.moe,
            config.gate,
            mesh=mesh,
            tp=TensorParallel.of(mesh, peer=parallel.peer, **how),
            seed=config.run.seed,
            dtype=self.dtype,
            held=None if layout is None else layout.layers_of(mesh.pp_index),
            placement_of=self.placement.placement_of,
            lora=config.lora,
            **({} if self.weights is None else {"built": self.weights.adopt}),
        )

    def _make_buckets(self) -> Buckets:
        optim = self.config.optim
        return Buckets(
            self.model,
            self.mesh,
            optim.bucket_mb,
            self.config.parallel.peer,
            self.placement.bucket,
            optim.main_grad,
            self.groups.lr_factor,
            blocks=optim.state == "8bit",
            by_layer=optim.clip == "layer" or self.config.memory.main_grad == "host",
            turns=grads_take_turns(self.config, self.mesh.num_ranks, self.mesh.pp),
            grads_leave=self.config.memory.main_grad == "host",
            **({} if self.weights is None else {"lent_to": self.weights.lent_to}),
        )

    @property
    def graphs(self) -> Graphs | None:
        """Microbatches or parts of them as CUDA graphs, where they are."""
        return self.sequential.graphs or self.sequential.parts

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.data.seq_len

    @cached_property
    def adapting(self) -> dict[int, MoE]:
        """The layers whose gates may move what they adapt."""
        return self.groups.adapting(self.numbered)

    def program(self) -> Verified:
        """The whole step; without a pipeline, as autograd runs it. Collective."""
        if self.pipelined is not None:
            return self.pipelined.runtime.verified
        layout = one_stage(self.config.model.num_layers)
        return step_program(self.config, self.mesh, layout, self.model, self.buckets, 1)

    def backward(self, step: int) -> dict[str, torch.Tensor]:
        """All microbatches of a step; gradients are on their way afterwards. Returns this rank's sums."""
        mesh, recorder = self.mesh, self.mesh.recorder
        # For a user's own layers: tp ranks that hold the same tokens draw the same numbers.
        place = mesh.rank if self.model.tp.parts_tokens else mesh.data_index
        torch.manual_seed(key_of(self.config.run.seed, step, place) >> 1)
        self.buckets.zero()
        self._begin_copies()
        if self.by_layer is not None:
            self.by_layer.begin(self.lr(step), self.loss_scale.value)
        if self.memories:
            memory_state.begin_step(self.memories, self.batches.continues(step))
        self.wanted_LE.zero_()
        if self.pipelined is None:
            sums = self.sequential.run(step, self.loss_scale.value)
        else:
            with recorder.compute("program"):
                sums = self.pipelined.run(step, self.loss_scale.value)
        with recorder.compute("end of backward"):
            self.model.tp.wgrads.check_empty(self.model.named_parameters())
            self.buckets.finish()
        self._loss_of_source = sums[3:]
        return {"loss": sums[0], "aux_loss": sums[1], "dropped": sums[2]}

    def step(self, step: int) -> StepRecord:
        """One optimizer step; its record is the same on all ranks but for the time; `times` knows more later.

        A step that was not finite, and is when it is computed again, is computed once more and taken.
        """
        try:
            return self._under_ledger(step, tries=2)
        except Accident as accident:
            record = self._under_ledger(step, tries=1)
            return {**record, "notes": [str(accident), *record.get("notes", ())]}

    def _under_ledger(self, step: int, tries: int) -> StepRecord:
        ledger = self.mesh.recorder.ledger
        if ledger is None:
            return self._step(step, tries)
        with ledger.step(quiet=[number for number, bucket in enumerate(self.buckets) if bucket.quiet]):
            return self._step(step, tries)

    def evaluate(self, done: int) -> dict[str, object]:
        """After so many steps: loss on text that is held out, or nothing where it is not due. Collective."""
        if self.evaluation is None or not self.evaluation.is_due(done):
            return {}
        self.evaluated = self.evaluation.run()
        return self.evaluated

    def _step(self, step: int, tries: int) -> StepRecord:
        self.mesh.watch.log.begin_step(step)
        (recorder := self.mesh.recorder).begin_step()
        self._look_ahead(step)
        sums = self.backward(step)
        with recorder.compute("update"):
            lr, scale = self.lr(step), self.loss_scale.value
            rows, load, told = self._update(step, sums, lr, scale)
            self.sequential.check()
            results = StepResults.of(rows, self.batches.counted(step), scale)
            if results.skipped:
                self.optim.take_back()
                if recorder.ledger is not None:
                    recorder.ledger.leave_out(kinds.BUCKET_GATHER)
            else:
                self.optim.publish()
                load.rebalance(self.adapting)
                self.loads.add(step, load, self.layers)
            with recorder.apart("between two steps"):
                notes = self._recheck(step, results, tries) if results.skipped else told
                notes += self._between(step, results.skipped)
        step_ms = self._end_step(step)
        if not self.loss_scale.after_step(results.loss, results.norm):
            self.bad.add(step, results.skipped, results.loss, results.norm)
        record: dict[str, object] = {
            "step": step,
            "loss": results.loss,
            "aux_loss": results.aux_loss,
            "lr": lr,
            "grad_norm": results.norm,
            "tokens_per_s": 1e3 * self.tokens_per_step / step_ms,
            "num_tokens": self.tokens_per_step,
            "step_ms": step_ms,
            "dropped": results.dropped,
            "skipped": results.skipped,
            "signals": results.signals,
        }
        if scale != 1:
            record["loss_scale"] = scale
        if notes:
            record["notes"] = notes
        more = {**self.placement.taken, **load.record(self.tokens_per_step)}
        if results.of_sources:
            more |= told_by_source(self.batches, step, results.of_sources)
        return cast(StepRecord, record | more)

    def _update(
        self, step: int, sums: dict[str, torch.Tensor], lr: float, scale: float
    ) -> tuple[list[list[float]], StepLoad, list[str]]:
        """Update this rank's shards; (what each rank says of the step, its loads, notes). Collective.

        The update is on its way before the host knows whether the step is a good one: the norm tells it.
        """
        mesh, what, by_layer = self.mesh, "exchange of step results", self.by_layer
        updated = by_layer is not None and by_layer.in_backward
        if self.grads is not None:
            shards = self.grads.shards
        else:
            shards = [] if updated else self.buckets.reduced()
        with mesh.recorder.apart("integrity"):
            corrupted = [] if updated else self.integrity.look(step)
        squares_L = torch.empty(0, device=mesh.device) if by_layer is None else by_layer.squares(shards)
        squares = squares_L.sum() if by_layer else (self.grads or self.optim).sum_of_squares(shards)
        told = [squares.new_full((), n) for n in (bool(corrupted), self.integrity.signal(self.signals()))]
        mine = torch.cat([torch.stack([*sums.values(), squares, *told]), self._loss_of_source, squares_L])
        results = gather(mesh.grads, mesh.world, mine, what).get()
        shape = (self.num_moe_layers, self.config.moe.num_experts)
        asked = AskedLoad(self.numbered, shape, mesh, self.config.moe.expert_tp == "sharded")
        reading = Reading(results, mesh.watch, what, mesh.world.ranks)
        if by_layer is None:
            self.optim.update(shards, lr, norm_if_good(sum_of_parts(results), scale), scale)
        else:
            by_layer.update(shards, lr, sum_of_parts(results), scale)
        rows = self.integrity.hear(step, reading.get())
        rows, notes = (rows, []) if by_layer is None else by_layer.hear(rows)
        if any(row[CORRUPTED] for row in rows):
            self.optim.take_back()
            with mesh.recorder.apart("integrity"):
                self.integrity.raise_together(corrupted)
        return rows, asked.get(), notes

    def _look_ahead(self, step: int) -> None:
        """Where backward updates: what is wrong with weights and state is found before it."""
        if self.by_layer is not None and self.by_layer.in_backward and (found := self.integrity.look(step)):
            self.integrity.raise_together(found)

    def lr(self, step: int) -> float:
        return learning_rate(self.config.optim, step, self.config.run.steps)

    def _end_step(self, step: int) -> float:
        """Milliseconds that it took here."""
        stamps = self.mesh.recorder.end_step()
        if self.pipelined is not None:
            self.pipelined.looked(stamps)
        exchanging = self.layers if self.mesh.num_ranks > 1 else []
        return self.times.after(step, stamps, sum(layer.schedule.take_rows() for layer in exchanging))

    def _between(self, step: int, skipped: bool) -> list[str]:
        notes = self.placement.after_step(step, self.loads.trace) if self.placement.layers else []
        notes += self.graphs.take_notes() if self.graphs is not None else []
        if self.memories:
            memory_state.end_step(self.memories, skipped=skipped)
        self.integrity.remember(step + 1)
        return notes

    def _recheck(self, step: int, results: StepResults, tries: int) -> list[str]:
        """Where the first of several bad steps went wrong; a scale that is too high is no reason to ask.

        Raises Accident where it did not go wrong again and another try is left.
        """
        overflowed = self.loss_scale.dynamic and math.isfinite(results.loss)
        if self.bad.count or self.by_layer or self.grads or overflowed:
            return []
        with self.graphs.watched() if self.graphs is not None else nullcontext():
            again = partial(self.backward, step)
            transient, self.bad.why = look_again(self.model, self.buckets, self.mesh, again, results.losses)
        for layer in self.layers:
            layer.gate.take_seen()  # seen twice
        if transient and tries > 1:
            memory_state.end_step(self.memories, skipped=True)
            raise Accident(f"step {nth(step)}: {self.bad.why}; the step is computed anew")
        return [f"step {nth(step)}: {self.bad.why}"]
