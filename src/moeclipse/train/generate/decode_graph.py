"""The next token of all texts as a CUDA graph: one launch instead of hundreds.

Idea. A step that reads one token of each row does the same work every time, at other places. With the places
in a tensor, and all keys of the cache in sight of a mask, no shape changes and nothing is asked of the host:
on one rank the step is captured once and replayed (`train/step/graphs`).

Contract. The logits of `Decoder.read` within rounding: there only keys that exist are read, here all places
of the cache are, masked. The first steps run eagerly, so that kernels are compiled and loaded. What cannot
be captured goes on eagerly. While Python runs the model it is `writing`; a replay leaves it as it is, so that
a step is one copy and one launch. It serves the next texts as well: as many, about as long (`room_for`), of a
model whose weights lie where they lay.

Hazard. The logits are overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.model.decode import Decoder, writing
from moeclipse.model.transformer import Transformer
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.train.step.graphs import WARM_STEPS, Capture, Replay

ROOM = 256
"""Tokens."""


class DecodeGraph:
    """Reads what a decoder would, one token a row."""

    def __init__(self, decoder: Decoder, capture: Capture) -> None:
        device = decoder.model.mesh.device
        self.decoder, self._capture = decoder, capture
        self._told_3B = torch.zeros(3, decoder.rows, dtype=torch.int64, device=device)
        """Of each row its token, its place, and whether it has one."""
        self._logits_BV: torch.Tensor | None = None
        self._graph: Replay | None = None
        self._steps = 0
        self.refused = ""
        """Why nothing is captured."""
        self._state = state_of(decoder.model)

    def serves(self, rows: int, length: int) -> bool:
        """Whether other texts can be read by the same graph, once its decoder has begun anew."""
        alike = (self.decoder.rows, self.decoder.length) == (rows, room_for(length))
        return self._graph is not None and alike and self._state == state_of(self.decoder.model)

    def read(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of each row, [B, V]; rows have one new token or none."""
        first_B = self.decoder.grow(new)
        tokens, counts = [row[0] if row else 0 for row in new], list(map(len, new))
        self._told_3B.copy_(torch.tensor([tokens, first_B, counts], dtype=torch.int64))
        self._steps += 1
        if self._graph is None:
            with writing(self.decoder.model):
                if not self.refused and self._steps > WARM_STEPS:
                    self._take()
                if self._graph is None:
                    self._capture.eagerly(self._work)
        if self._graph is not None:
            self._graph.replay()
        assert self._logits_BV is not None
        return self._logits_BV

    def _take(self) -> None:
        try:
            self._graph = self._capture.capture(self._work)
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]

    def _work(self) -> None:
        decoder = self.decoder
        token_B, place_B, count_B = self._told_3B
        h_BD = decoder.forward(token_B[:, None], place_B, count_B, decoder.cache.length)
        logits_BV = decoder.logits(h_BD, torch.arange(decoder.rows, device=h_BD.device))
        if self._logits_BV is None:
            self._logits_BV = torch.empty_like(logits_BV)
        self._logits_BV.copy_(logits_BV)


def room_for(length: int) -> int:
    """Of texts of so many tokens: texts of many lengths share a graph, and masked places cost little."""
    return -(-length // ROOM) * ROOM


def state_of(model: Transformer) -> tuple[object, ...]:
    """What a graph holds fast of a model: where its tensors lie, and how its gates choose."""
    tensors = (*model.parameters(), *model.buffers())
    gates = [layer.gate.config for _, layer in moe_layers(model) if isinstance(layer.gate, Gate)]
    return (*((tensor.data_ptr(), tensor.dtype) for tensor in tensors), *map(repr, gates))


def obstacle(decoder: Decoder) -> str:
    """Why a step cannot be a graph; empty where it can. To be asked while the model is `writing`."""
    model = decoder.model
    if model.mesh.device.type != "cuda":
        return "there is no CUDA device"
    if model.mesh.num_ranks > 1:
        return "ranks tell each other how many rows they send"
    if decoder.rotary.scaling == "dynamic":
        return "angles change with the length of a text"
    if model.config.held_mixers != {"attention"}:
        return "mixers other than attention were never captured"
    if any(layer.weights_elsewhere is not None for layer in model.all_layers):
        return "weights come from the host, layer by layer"
    if not all(layer.runs_on_device for _, layer in moe_layers(model)):
        return "experts without kernels need the host"
    return ""
