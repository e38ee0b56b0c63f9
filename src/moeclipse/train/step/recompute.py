"""Activation recompute: a policy for each layer, so that what forward keeps fits the device.

    off < norms < attn < full       from what costs nothing to what keeps least

`auto` takes the first that fits. It tries: the last layer of the model reads one sample in each way, and what
the graph behind it holds is counted. To that come all that lies on the device already (weights, gradients,
optimizer state), one layer's worth while backward is in it, as much again for what backward itself makes, and
logits. Numbers do not depend on the choice, not in a bit.

This is for one rank. Several choose before they build anything (`train/step/recompute_ranks`).

Hazard. Memory that other programs take later is not foreseen; what fragments is, by MARGIN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.auto import Auto
from moeclipse.model.layer import TransformerLayer
from moeclipse.model.recompute import Again
from moeclipse.model.transformer import Transformer
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.tensor.vocab import CHUNK_BYTES
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.memory_bytes import kept_behind, readable, room_on

LADDER: tuple[Again, ...] = ("off", "norms", "attn", "full")
MARGIN = 0.95


def arrange(config: TrainConfig, mesh: Mesh, model: Transformer) -> list[str]:
    """Tell layers what to recompute, where autograd runs them; what is to be said of it."""
    asked = config.pipeline.recompute
    if config.runs_program(mesh.pp, mesh.num_ranks):
        return []
    again = [layer for layer in model.all_layers if config.pipeline.runs_again(layer.index)]
    level, notes = asked, []
    if level == "auto":
        level = "off"
        if mesh.device.type == "cuda" and mesh.num_ranks == 1 and not config.model.memory and again:
            expected = peaks(config, mesh, model, len(again))
            room = room_on(mesh.device)
            level = pick(expected, room)
            notes = told(expected, room, level)
    for layer in again:
        layer.again = level
    return notes


def pick(expected: Mapping[Again, float], room: float) -> Again:
    """The first that fits; where none does, the one that takes least."""
    least: Again = min(LADDER, key=lambda level: expected[level])
    places: dict[Again, int] = {level: place for place, level in enumerate(LADDER)}
    return Auto[Again](costs=places, plain=least, wins=lambda level: expected[level] <= MARGIN * room).choice


def told(expected: Mapping[Again, float], room: float, level: Again) -> list[str]:
    if level == "off":
        return []
    note = f"recompute: {level}, for {readable(expected[level])} of {readable(room)}; without it "
    note += f"{readable(expected['off'])}"
    if expected[level] > MARGIN * room:
        note += "; it may not fit: raise optim.accumulate, or see optim.state and optim.master"
    return [note]


def peaks(config: TrainConfig, mesh: Mesh, model: Transformer, num_again: int) -> dict[Again, float]:
    """The most memory that a step is expected to take, by recompute policy."""
    samples = -(-config.data.batch_size // config.optim.accumulate)
    kept = {level: samples * kept_by(model, mesh, config.data.seq_len, level) for level in LADDER}
    rest = len(model.layers) - num_again
    logits = samples * config.data.seq_len * config.model.vocab_size * model.dtype.itemsize
    beside = torch.cuda.memory_allocated(mesh.device) + 2 * min(logits, CHUNK_BYTES) + 2 * kept["off"]
    return {level: beside + num_again * kept[level] + rest * kept["off"] for level in LADDER}


def kept_by(model: Transformer, mesh: Mesh, length: int, level: Again) -> int:
    """Bytes that the last layer keeps of one sample."""
    layer = model.layer(max(map(int, model.layers)))
    ids_BS = torch.zeros(1, length, dtype=torch.int64, device=mesh.device)
    # Not zeros: all tokens would choose the same experts. It does not matter which they choose.
    h_TD = torch.empty(length, model.config.d_model, device=mesh.device, dtype=model.dtype)
    fill_normal(h_TD, key_of(0, "trial"), 1.0)
    tokens = Tokens(mesh=mesh, first=0, total=length, group=mesh.data)
    before = layer.again
    try:
        layer.again = level
        found = layer(h_TD.requires_grad_(), model.positions(ids_BS), tokens)
        return kept_behind(found, own_memory(layer))
    finally:
        layer.again = before
        if layer.moe is not None:
            layer.moe.load_E.zero_()
            layer.moe.gate.take_seen()


def own_memory(layer: TransformerLayer) -> set[int]:
    """Addresses of what a layer has in any case."""
    return {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
