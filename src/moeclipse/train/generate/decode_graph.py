"""The next token of all texts as a CUDA graph: one launch instead of hundreds.

Idea. A step that reads one token of each row does the same work every time, at other places. With the places
in a tensor, and all keys of the cache in sight of a mask, no shape changes and nothing is asked of the host:
on one rank the step is captured once and replayed (`train/step/graphs`).

Contract. The logits of `Decoder.read` within rounding: there only keys that exist are read, here all places
of the cache are, masked. The first steps run eagerly, so that kernels are compiled and loaded. What cannot
be captured goes on eagerly.

Hazard. The logits are overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.model.decode import Decoder
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.train.step.graphs import WARM_STEPS, Capture, Replay


class DecodeGraph:
    """Reads what a decoder would, one token a row."""

    def __init__(self, decoder: Decoder, capture: Capture) -> None:
        device = decoder.model.mesh.device
        self.decoder, self._capture = decoder, capture
        self._ids_B1 = torch.zeros(decoder.rows, 1, dtype=torch.int64, device=device)
        self._place_B = torch.zeros(decoder.rows, dtype=torch.int64, device=device)
        self._count_B = torch.zeros(decoder.rows, dtype=torch.int64, device=device)
        self._logits_BV: torch.Tensor | None = None
        self._graph: Replay | None = None
        self._steps = 0
        self.refused = ""
        """Why nothing is captured."""

    def read(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of each row, [B, V]; rows have one new token or none."""
        first_B = self.decoder.grow(new)
        tokens = [row[0] if row else 0 for row in new]
        self._ids_B1.copy_(torch.tensor(tokens, dtype=torch.int64)[:, None])
        self._place_B.copy_(torch.tensor(first_B, dtype=torch.int64))
        self._count_B.copy_(torch.tensor(list(map(len, new)), dtype=torch.int64))
        self._steps += 1
        if self._graph is None and not self.refused and self._steps > WARM_STEPS:
            self._take()
        if self._graph is None:
            self._capture.eagerly(self._work)
        else:
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
        h_BD = decoder.forward(self._ids_B1, self._place_B, self._count_B, decoder.cache.length)
        logits_BV = decoder.logits(h_BD, torch.arange(decoder.rows, device=h_BD.device))
        if self._logits_BV is None:
            self._logits_BV = torch.empty_like(logits_BV)
        self._logits_BV.copy_(logits_BV)


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
    if not all(layer.runs_on_device for _, layer in moe_layers(model)):
        return "experts without kernels need the host"
    return ""
