"""What a checkpoint holds of one rank's run, and how a run goes on from it.

Weights and optimizer state (`train/optim/adamw`), buffers, what layers remember, loads of experts, and some
numbers. Everything random is a function of the step, so no generator is saved. State that lies on the host is
written from there.

Contract: logical names; any layout loads any other. The part of `Learner` that is no part of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.segment_memory import LayerMemory
from moeclipse.model.transformer import Transformer
from moeclipse.moe.gate.dynamic_gates import BORN_LATER
from moeclipse.moe.layer import MoE
from moeclipse.train.checkpoints.async_save import AsyncSave
from moeclipse.train.checkpoints.checkpoint import Checkpoint, Piece, check_model, check_state, save
from moeclipse.train.checkpoints.manifest import HfState
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.samples import Batches
from moeclipse.train.fingerprint import fingerprint_of, in_present_terms
from moeclipse.train.optim.adamw import AdamW, Readable
from moeclipse.train.placement.load_trace import LoadHistory
from moeclipse.train.placement.model_placement import ModelPlacement
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.run.survival_config import CheckpointConfig
from moeclipse.train.step import memory_state
from moeclipse.train.step.integrity import Integrity
from moeclipse.train.step.results import BadSteps, LossScale

STATE_KINDS = {"step": int, "updates": int, "bad_steps": int, "data": dict, "exchange": list}
"""What a checkpoint's state must hold for a run to go on."""


class CheckpointedState:
    """Of one rank."""

    hf: HfState | None = None
    """What turns checkpoints into folders of a Hugging Face model; None where the run began from none."""
    config: TrainConfig
    mesh: Mesh
    dtype: torch.dtype
    model: Transformer
    optim: AdamW
    batches: Batches
    placement: ModelPlacement
    integrity: Integrity
    bad: BadSteps
    loss_scale: LossScale
    loads: LoadHistory
    layers: list[MoE]
    memories: tuple[LayerMemory, ...]

    def fingerprint(self) -> dict[str, dict[str, object]]:
        """What a checkpoint must have in common with a run that continues it."""
        return fingerprint_of(self.config, self.dtype)

    def save(self, folder: Path, step: int, async_save: AsyncSave | None = None) -> Path:
        """A checkpoint of the state before `step`; with `async_save` it is only begun."""
        self.integrity.before_save()
        self.placement.before_save()
        state = {
            "step": step,
            "updates": self.optim.updates,
            "bad_steps": self.bad.count,
            "loss_scale": self.loss_scale.state(),
            "seed": self.config.run.seed,
            "data": self.batches.state(step),
            "fingerprint": self.fingerprint(),
            "exchange": self.of_all_layers(lambda layer: layer.schedule.state()),
            "placement": self.placement.state(),
            "plan": self.placement.planner.state(),
            **({"hf": self.hf} if self.hf else {}),
        }
        given = self.config.checkpoint
        ranks = PatientRanks(self.mesh, given.deadline_s)
        return save(folder, step, self._pieces(), state, ranks, keep=given.keep, async_save=async_save)

    @property
    def checkpointing(self) -> CheckpointConfig:
        """How a run saves: what is on the host is written from where it lies, without room for a copy."""
        given, stays = self.config.checkpoint, self.optim.host is None and self.optim.weights is None
        return given if stays else replace(given, asynchronous=False)

    def make_save_ready(self, async_save: AsyncSave) -> None:
        if self.mesh.device.type == "cuda":
            async_save.make_ready(self.optim.num_bytes)

    def _pieces(self) -> list[Piece]:
        """What this rank saves."""
        pieces = [*self.optim.pieces(), *memory_state.memory_pieces(self.memories, self.batches)]
        if self.mesh.dense_grads.index == 0:  # the first of those that hold these layers
            pieces += [
                Piece(name=f"buffer/{name}", shape=tuple(buffer.shape), start=0, data=buffer.flatten())
                for name, buffer in self._buffers()
            ]
        return pieces + list(self.loads.pieces() if self.mesh.rank == 0 else ())

    def load(self, checkpoint: Checkpoint) -> int:
        """Continue from a checkpoint of any layout; returns the step to run next."""
        state = checkpoint.state
        check_state(state, STATE_KINDS, checkpoint.path)
        expected = self.fingerprint()
        stored = in_present_terms(state.get("fingerprint") or {}, expected, TrainConfig())
        check_model(stored, expected)
        step = int(state["step"])
        self.batches.check_state(state["data"], step)
        self.placement.load_state(state.get("placement"))
        self.placement.planner.load_state(state.get("plan"))
        self.optim.load(checkpoint, int(state["updates"]))
        self.bad.count = int(state["bad_steps"])
        self.loss_scale.load_state(state.get("loss_scale"))
        self.hf = state.get("hf")
        for number, layer in self.numbered.items():
            # Another cut of rows would round sums differently.
            layer.schedule.load_state(state["exchange"][number])
        self.load_buffers(checkpoint, needed=True)
        memory_state.load_memory(self.memories, self.batches, self.mesh, checkpoint)
        sharded = self.config.moe.expert_tp == "sharded"
        self.loads.load(checkpoint, self.mesh.num_data if sharded else self.mesh.stage.size)
        self.integrity.remember(step)
        return step

    def load_weights(self, source: Readable) -> None:
        """Begin from weights of any layout, with an optimizer and data of its own."""
        self.optim.load_weights(source)
        self.load_buffers(source)
        self.integrity.remember(0)

    def load_buffers(self, source: Readable, needed: bool = False) -> None:
        for name, buffer in self._buffers():
            wanted = f"buffer/{name}" in source or (needed and not name.endswith(BORN_LATER))
            if wanted and (data := source.read(f"buffer/{name}")) is not None:
                buffer.copy_(data.view(buffer.shape))

    @cached_property
    def num_moe_layers(self) -> int:
        """Of the whole model."""
        return self.config.num_expert_layers

    @cached_property
    def numbered(self) -> dict[int, MoE]:
        """This rank's MoE layers, by their number among those of the whole model."""
        number_of = {layer: number for number, layer in enumerate(self.config.model.expert_layers)}
        return {number_of[layer.layer]: layer for layer in self.layers}

    def of_all_layers(self, tell: Callable[[MoE], object]) -> list[object]:
        """What each MoE layer of the model says of itself (JSON-able), on every rank. Collective."""
        mine = {str(number): tell(layer) for number, layer in self.numbered.items()}
        stages = self.mesh.gather_objects(mine) if self.mesh.pp > 1 else [mine]
        known = {number: said for stage in stages for number, said in stage.items()}
        return [known[str(number)] for number in range(self.num_moe_layers)]

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        kept = set(self.model.state_dict())
        return [(name, buffer) for name, buffer in self.model.named_buffers() if name in kept]
